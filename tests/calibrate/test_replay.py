"""Replay, layer by layer, against the full forward of the real model: every bit, for every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from calibrate.replay import Replay
from calibrate.statistics import observe
from models.checkpoint import Folder
from models.skeleton import load_model
from tests.helpers import MODEL_TYPES, WINDOW, tiny_checkpoint, tokens

# Two batch shapes, longer and shorter than the sliding window; the last batch is smaller.
BATCHES = [tokens(3, 40, seed=1), tokens(2, 9, seed=2), tokens(3, 40, seed=3), tokens(1, 40, seed=4)]
every_type = pytest.mark.parametrize("model_type", MODEL_TYPES)


def checkpoint(folder: Path, model_type: str, **config: object) -> Folder:
    return Folder(tiny_checkpoint(folder, model_type, **config))  # type: ignore[arg-type]


def replay_logits(replay: Replay, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    hidden = replay.embed(batches)
    for index in range(len(replay)):
        with replay.layer(index) as layer:
            hidden = [replay.run(layer, index, h) for h in hidden]
    with replay.end() as logits:
        return [logits(ids, h) for ids, h in zip(batches, hidden, strict=True)]


@torch.no_grad()
def full_logits(model: PreTrainedModel, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    return [model(batch, use_cache=False).logits for batch in batches]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_type
def test_replay_is_the_full_forward_bit_for_bit(
    tmp_path: Path, model_type: str, dtype: torch.dtype, attention: str
) -> None:
    assert BATCHES[0].shape[1] > 2 * WINDOW
    source = checkpoint(tmp_path, model_type)
    found = replay_logits(Replay(source, dtype, attention), BATCHES)
    for ours, theirs in zip(found, full_logits(load_model(source, dtype, attention), BATCHES), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("model_type", ["llama", "spark2_5"])
def test_the_head_is_the_embedding_only_when_tied(tmp_path: Path, model_type: str, tied: bool) -> None:
    source = checkpoint(tmp_path, model_type, tie_word_embeddings=tied)
    (found,), (expected,) = (
        replay_logits(Replay(source, torch.float32), BATCHES[:1]),
        full_logits(load_model(source, torch.float32), BATCHES[:1]),
    )
    assert torch.equal(found, expected)


def test_the_sliding_window_matters_to_the_test(tmp_path: Path) -> None:
    """Or replay with the wrong mask would pass above."""
    short, long = (
        full_logits(load_model(checkpoint(tmp_path / str(w), "spark2_5", sliding_window=w), torch.float32), BATCHES[:1])
        for w in (WINDOW, 100)
    )
    assert not torch.equal(short[0][:, WINDOW:], long[0][:, WINDOW:])


@every_type
def test_hooks_see_the_input_of_each_linear_as_in_the_full_model(tmp_path: Path, model_type: str) -> None:
    source = checkpoint(tmp_path, model_type)
    model = load_model(source, torch.float32)
    expected: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            expected[name] = []
            module.register_forward_pre_hook(lambda _, inputs, name=name: expected[name].append(inputs[0]))
    full_logits(model, BATCHES)
    replay = Replay(source, torch.float32)
    hidden = replay.embed(BATCHES)
    seen = 0
    for index in range(len(replay)):
        with replay.layer(index) as layer:
            linears = {n: m for n, m in layer.named_modules() if isinstance(m, nn.Linear)}
            with observe(linears) as observed:
                hidden = [replay.run(layer, index, h) for h in hidden]
        for name in linears:
            inputs = torch.cat([x.reshape(-1, x.shape[-1]) for x in expected[f"{replay.prefix(index)}.{name}"]])
            assert observed[name].tokens == len(inputs) == sum(batch.numel() for batch in BATCHES)
            assert torch.allclose(observed[name].second_moments(), inputs.square().mean(0), rtol=1e-5)
            seen += 1
    assert seen == len(expected)


@every_type
def test_before_the_head_is_what_the_head_reads(tmp_path: Path, model_type: str) -> None:
    source = checkpoint(tmp_path, model_type)
    model = load_model(source, torch.float32)
    expected: list[torch.Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: expected.append(inputs[0]))
    full_logits(model, BATCHES)
    replay = Replay(source, torch.float32)
    hidden = replay.embed(BATCHES)
    for index in range(len(replay)):
        with replay.layer(index) as layer:
            hidden = [replay.run(layer, index, h) for h in hidden]
    with replay.before_head() as inputs:
        found = [inputs(ids, h) for ids, h in zip(BATCHES, hidden, strict=True)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_only_one_layer_is_in_memory_at_a_time(tmp_path: Path) -> None:
    replay = Replay(checkpoint(tmp_path, "llama", num_hidden_layers=3), torch.float32)

    def loaded() -> set[str]:
        modules = {str(i): layer for i, layer in enumerate(replay.layers)} | {"model": replay.model}
        return {name for name, module in modules.items() if any(not p.is_meta for p in module.parameters())}

    hidden = replay.embed(BATCHES[:1])
    assert loaded() == set()
    with replay.layer(1) as layer:
        assert loaded() == {"1"}
        replay.run(layer, 1, hidden[0])
    with pytest.raises(RuntimeError), replay.layer(2):
        raise RuntimeError
    with replay.end():
        assert loaded() == {"model"}
    assert loaded() == set()


def test_a_layer_may_be_read_from_somewhere_else(tmp_path: Path) -> None:
    replay = Replay(checkpoint(tmp_path, "llama"), torch.float32)
    with replay.layer(1, read=lambda name: torch.full_like(replay.read(name), 0.5)) as layer:
        assert all((p == 0.5).all() for p in layer.parameters())


def test_a_batch_shape_that_was_not_recorded_is_an_error(tmp_path: Path) -> None:
    replay = Replay(checkpoint(tmp_path, "llama"), torch.float32)
    (hidden,) = replay.embed([tokens(2, 8)])
    with replay.layer(0) as layer, pytest.raises(KeyError):
        replay.run(layer, 0, hidden[:1])
