"""Greedy continuations: their first divergence with the reference's margin there, and exactly as many as asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from models.checkpoint import Checkpoint, Folder
from models.skeleton import load_model
from tests.helpers import MODEL_TYPES, tiny_checkpoint, tokens
from validate import greedy
from validate.engines.workers.torch_session import TorchSession
from validate.greedy import Continuations, Divergence, continue_greedily, divergences


def made(rows: list[list[int]], margins: list[list[float]]) -> Continuations:
    return Continuations(torch.tensor(rows), torch.tensor(margins))


def test_the_first_divergence_comes_with_the_references_margin_there() -> None:
    reference = made([[1, 2, 3, 4], [5, 6, 7, 8], [1, 1, 1, 1]], [[0.5, 0.25, 2, 1], [3, 4, 5, 6], [9, 9, 9, 9]])
    other = made([[1, 9, 3, 5], [5, 6, 7, 8], [1, 1, 1, 2]], [[7.0] * 4] * 3)
    assert divergences(reference, other) == [
        Divergence(prompt=0, step=1, reference_token=2, token=9, margin=0.25),
        Divergence(prompt=2, step=3, reference_token=1, token=2, margin=9),
    ]
    assert divergences(reference, reference) == []


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_continuations_are_the_argmax_of_the_full_forward(tmp_path: Path, model_type: str) -> None:
    source = Folder(tiny_checkpoint(tmp_path, model_type))
    prompts = tokens(2, 20)
    found = continue_greedily(source, prompts, 6, torch.float32)
    model, ids, margins = load_model(source, torch.float32), prompts, []
    with torch.no_grad():
        for _ in range(6):
            best = model(input_ids=ids, use_cache=False).logits[:, -1].float().topk(2)
            margins.append(best.values[:, 0] - best.values[:, 1])
            ids = torch.cat([ids, best.indices[:, :1]], 1)
    assert torch.equal(found.tokens, ids[:, 20:])
    assert torch.allclose(found.margins, torch.stack(margins, 1), atol=1e-3)


def test_the_end_of_text_does_not_end_a_continuation(tmp_path: Path) -> None:
    prompts = tokens(2, 8)
    source = Folder(tiny_checkpoint(tmp_path / "a", "llama"))
    free = continue_greedily(source, prompts, 5, torch.float32)
    # The same weights, but now the second tokens end the text.
    stop = [int(token) for token in free.tokens[:, 1]]
    other = Folder(tiny_checkpoint(tmp_path / "b", "llama", eos_token_id=stop))
    assert other.config["eos_token_id"] == stop
    stopped = continue_greedily(other, prompts, 5, torch.float32)
    assert torch.equal(stopped.tokens, free.tokens)
    assert stopped.margins.shape == (2, 5)


@pytest.mark.parametrize("preferred", [{"repetition_penalty": 9.0}, {"no_repeat_ngram_size": 1}])
def test_what_a_checkpoint_prefers_for_its_chats_changes_no_continuation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preferred: dict[str, float]
) -> None:
    """Neither ours nor that of an engine that loads transformers' models."""
    source, prompts = Folder(tiny_checkpoint(tmp_path, "llama")), tokens(4, 20)
    plain = continue_greedily(source, prompts, 20, torch.float32)

    def preferring(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
        model = load_model(checkpoint, dtype)
        model.generation_config.update(**preferred)
        return model

    monkeypatch.setattr(greedy, "load_model", preferring)
    model = preferring(source, torch.float32)
    changed = model.generate(prompts, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert not torch.equal(changed[:, 20:], plain.tokens)
    assert torch.equal(continue_greedily(source, prompts, 20, torch.float32).tokens, plain.tokens)
    assert torch.equal(TorchSession(model).continue_greedily(prompts, 20), plain.tokens)
