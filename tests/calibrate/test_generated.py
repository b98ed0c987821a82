"""Text that the model writes itself: drawn from its own distribution, the same from the same seed, and continued."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedModel

from calibrate import generated
from calibrate.generated import Generation, batch_sizes, first_tokens, generate
from models.checkpoint import Checkpoint, Folder
from models.errors import BadInput
from models.skeleton import load_model
from tests.helpers import BOS, tiny_checkpoint

WANTED = Generation(count=6, length=12, first=(BOS,), keeps_first=False, seed=3, dtype="float32")


@pytest.fixture(scope="module", params=["llama", "spark2_5"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Folder(tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param, num_hidden_layers=2))


@pytest.mark.parametrize("keeps_first", [False, True])
def test_tokens_are_drawn_from_the_whole_distribution_of_the_model(
    checkpoint: Checkpoint, tmp_path: Path, keeps_first: bool
) -> None:
    wanted = replace(WANTED, count=500, keeps_first=keeps_first)
    ids = generate(checkpoint, wanted, tmp_path)
    assert ids.shape == (500, 12) and ids.dtype == torch.int64
    if keeps_first:
        assert ids[:, 0].eq(BOS).all()
    whole = ids if keeps_first else torch.cat([torch.full((500, 1), BOS), ids], 1)
    with torch.no_grad():
        logits = load_model(checkpoint, torch.float32)(whole[:, :-1], use_cache=False).logits.double()
    log = torch.log_softmax(logits, -1)
    # A drawn token's negative log-likelihood is the entropy on average, whatever the tokens before it.
    entropy = -(log.exp() * log).sum(-1)
    spread = ((log.exp() * log.square()).sum(-1) - entropy.square()).sum().sqrt()
    surprise = -log.gather(-1, whole[:, 1:, None])[..., 0]
    assert abs(float((surprise - entropy).sum() / spread)) < 4
    # And where only likely tokens are drawn, as checkpoints prefer for their chats, it is far below.
    likely = log.masked_fill(log < log.topk(20).values[..., -1:], -torch.inf).log_softmax(-1)
    assert float((-(likely.exp() * log.clamp_min(-1e3)).sum(-1) - entropy).sum() / spread) < -8


def test_the_seed_decides_and_nothing_else_of_torchs_generator_is_used(checkpoint: Checkpoint, tmp_path: Path) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = generate(checkpoint, WANTED, tmp_path / "one")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(generate(checkpoint, WANTED, tmp_path / "two"), one)
    assert not torch.equal(generate(checkpoint, replace(WANTED, seed=4), tmp_path / "three"), one)
    assert len({tuple(window) for window in one.tolist()}) == len(one)


@pytest.mark.parametrize("preferred", [{"eos_token_id": list(range(4, 4000))}, {"repetition_penalty": 9.0}])
def test_what_a_checkpoint_prefers_for_its_chats_does_not_count(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preferred: dict[str, Any]
) -> None:
    """An end of text among it, behind which transformers would fill the window with padding."""
    plain = generate(checkpoint, WANTED, tmp_path / "plain")

    def preferring(*arguments: Any) -> PreTrainedModel:
        model = load_model(*arguments)
        model.generation_config = GenerationConfig(**preferred)
        return model

    monkeypatch.setattr(generated, "load_model", preferring)
    assert torch.equal(generate(checkpoint, WANTED, tmp_path / "preferring"), plain)


def test_batches_that_are_there_are_not_written_again(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generated, "BATCH_TOKENS", 2 * WANTED.length)
    told: list[tuple[int, int]] = []
    whole = generate(checkpoint, WANTED, tmp_path, lambda done, total: told.append((done, total)))
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3 and torch.equal(generate(checkpoint, WANTED, tmp_path), whole)
    assert told == sorted(told) and told[-1] == (6 * 12, 6 * 12)
    stay = {file: file.stat().st_mtime_ns for file in files[:2]}
    files[2].unlink()
    assert torch.equal(generate(checkpoint, WANTED, tmp_path), whole)
    assert {file: file.stat().st_mtime_ns for file in stay} == stay
    assert len({tuple(window) for window in whole.tolist()}) == len(whole)


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "broken", "llama", num_hidden_layers=2)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInput, match=r"model.layers.1.mlp.up_proj.weight: expected finite .* nan at \[3, 5\]"):
        generate(Folder(folder), WANTED, tmp_path / "own")
    assert not list((tmp_path / "own").iterdir())


def test_a_batch_holds_whole_windows_and_all_of_them() -> None:
    assert batch_sizes(70, 512) == [32, 32, 6]
    assert batch_sizes(3, 10**6) == [1, 1, 1]


@pytest.mark.parametrize(("bos", "eos", "expected"), [(1, 2, (1,)), (None, 2, (2,)), (0, None, (0,))])
def test_a_text_begins_behind_the_token_of_a_beginning_or_of_an_end(bos: Any, eos: Any, expected: Any) -> None:
    assert first_tokens(SimpleNamespace(bos_token_id=bos, eos_token_id=eos)) == expected


def test_a_tokenizer_without_such_a_token_is_refused() -> None:
    with pytest.raises(BadInput, match="generated: the tokenizer has no token for the beginning or the end of a text"):
        first_tokens(SimpleNamespace(bos_token_id=None, eos_token_id=None))
