"""End-to-end tuning: it helps or changes nothing, keeps the layout, fits in memory, and resumes to the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate import tune as module
from calibrate.grid import Grid
from calibrate.quantize import Recipe, quantize
from calibrate.results import Results
from calibrate.search import round_to_nearest
from calibrate.tune import Training, Tuned, tune
from calibrate.tune_parameters import TrainedGrid, trained_vector
from models.checkpoint import Folder
from models.opened import OpenedModel, open_model
from tests.helpers import tiny_checkpoint, tokens

WINDOWS = tokens(8, 32)
# A rate that moves scales by more than bf16 rounds away, in so few steps.
TRAINING = Training(steps=12, rounds=4, tokens=64, learning_rate=2e-3, every=4, held_out=4)
# Enough that held-out windows gain by more than the rounding of bf16 decides.
MANY = tokens(64, 32)


class Killed(BaseException):
    pass


@pytest.fixture
def model(tmp_path: Path) -> OpenedModel:
    return open_model(Folder(tiny_checkpoint(tmp_path / "model", "qwen2", num_hidden_layers=3)))


def quantized(model: OpenedModel, folder: Path, zero: str = "none", head: bool = False) -> Results:
    grids = tuple(
        (linear.name, Grid(64, zero))  # type: ignore[arg-type]
        for linear in model.linears
        if head or linear.layer is not None
    )
    results = Results(folder)
    quantize(model.checkpoint, model.linears, Recipe(grids, ("rtn",), torch.bfloat16), None, results)
    return results


def tuned(
    model: OpenedModel, results: Results, training: Training = TRAINING, windows: torch.Tensor = WINDOWS
) -> Tuned:
    arguments = (model.checkpoint, model.checkpoint, model.linears, torch.bfloat16, windows, results)
    return tune(*arguments, training=training)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("zero", "head"), [("none", True), ("integer", False), ("float", False)])
def test_tuning_lowers_the_held_out_divergence_within_the_same_layout(
    tmp_path: Path, model: OpenedModel, zero: str, head: bool
) -> None:
    results = quantized(model, tmp_path / "results", zero, head)
    found = tuned(model, results, replace(TRAINING, tokens=256), MANY)
    words = found.note.split()
    before, after = float(words[words.index("from") + 1]), float(words[words.index("to") + 1].rstrip(","))
    assert 0 < after < before
    moved = 0
    for index in range(4):
        old, new = results.load(index), found.results.load(index)
        assert old.linears.keys() == new.linears.keys() and len(old.linears) == (7 if index < 3 else head)
        for name, linear in new.linears.items():
            was = old.linears[name]
            assert torch.equal(linear.codes, was.codes) and linear.grid == was.grid
            assert linear.scales.shape == was.scales.shape and (linear.scales > 0).all()
            assert (linear.zero_points is None) == (was.zero_points is None)
            assert linear.zero_points is None or torch.equal(linear.zero_points, was.zero_points)  # type: ignore[arg-type]
            moved += not torch.equal(linear.scales, was.scales)
        for name, tensor in new.tensors.items():
            source = model.checkpoint.read(name)
            assert tensor.dtype == torch.bfloat16 and tensor.shape == source.shape and not torch.equal(tensor, source)
            assert new.reasons[name] == "tuned"
    assert moved >= 20
    assert {name.rpartition(".")[2] for name in found.results.load(0).tensors} == {"weight", "bias"}
    assert list(found.results.load(3).tensors) == ["model.norm.weight"]


def test_tuning_that_only_harms_changes_nothing_and_says_so(tmp_path: Path, model: OpenedModel) -> None:
    results = quantized(model, tmp_path / "results")
    found = tuned(model, results, Training(steps=2, tokens=64, every=1, held_out=4, learning_rate=20.0))
    assert "did not improve" in found.note
    for index in range(4):
        old, new = results.load(index), found.results.load(index)
        assert new.tensors == {}
        for name, linear in new.linears.items():
            assert torch.equal(linear.dequantize(), old.linears[name].dequantize())


@pytest.mark.parametrize("moment", ["before a look", "after a look", "writing", "written"])
def test_a_killed_training_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: OpenedModel, moment: str
) -> None:
    expected = tuned(model, quantized(model, tmp_path / "whole"))
    results = quantized(model, tmp_path / "results")
    with monkeypatch.context() as patch:
        kill(patch, moment)
        with pytest.raises(Killed):
            tuned(model, results)
    steps: list[int] = []
    plain = module._Trainer._step

    def counted(self: module._Trainer, step: int) -> None:
        steps.append(step)
        plain(self, step)

    monkeypatch.setattr(module._Trainer, "_step", counted)
    found = tuned(model, results)
    assert steps == {"before a look": list(range(4, 12)), "after a look": list(range(8, 12))}.get(moment, [])
    assert found.note == expected.note
    assert files(found.results.folder) == files(expected.results.folder)
    assert not (results.folder / module.STATE).exists()


def kill(patch: pytest.MonkeyPatch, moment: str) -> None:
    def dies_at(owner: object, name: str, when: Callable[..., bool], after: bool = False) -> None:
        plain = getattr(owner, name)

        def method(*arguments: object, **named: object) -> object:
            if when(*arguments) and not after:
                raise Killed
            found = plain(*arguments, **named)
            if when(*arguments):
                raise Killed
            return found

        patch.setattr(owner, name, method)

    if moment == "before a look":
        dies_at(module._Trainer, "_step", lambda self, step: step == 6)
    elif moment == "after a look":
        dies_at(module._Trainer, "_save", lambda self, file: self.state.step == 8, after=True)
    elif moment == "writing":
        dies_at(module._Trainer, "write", lambda self, results: True, after=True)
    else:
        dies_at(Path, "unlink", lambda path: path.name == module.STATE)


def test_one_layers_weights_are_in_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: OpenedModel
) -> None:
    loaded: list[int] = []
    plain = module._Trainer._update

    def counted(self: module._Trainer, index: int, step: int) -> None:
        layers = self.replay.layers
        loaded.append(sum(p.device.type != "meta" for layer in layers for p in layer.parameters()))
        with_gradients = [
            i for i, t in enumerate(self.trained) if any(p.shift.grad is not None for p in t.parameters())
        ]
        assert with_gradients == [index]
        plain(self, index, step)

    monkeypatch.setattr(module._Trainer, "_update", counted)
    tuned(model, quantized(model, tmp_path / "results"), Training(steps=1, tokens=64))
    assert loaded == [0] * 4


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["none", "integer", "float", "8 bits"]),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.01, 0.3, 5.0]),
)
def test_what_is_trained_is_what_is_stored(zero: str, seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 96, generator=generator) * 0.02
    grid_ = Grid(32, bits=8) if zero == "8 bits" else Grid(32, zero)  # type: ignore[arg-type]
    linear = round_to_nearest(weight, grid_)
    linear.scales[::2] *= 1 if zero == "integer" else -1
    grid = TrainedGrid.of(linear)
    for parameter in grid.parameters():
        parameter.shift.copy_(torch.randn(parameter.shift.shape, generator=generator) * size)
    stored = grid.quantized(linear)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(grid.weight(linear, dtype), stored.dequantize(dtype))
    assert (stored.scales.sign() == linear.scales.sign()).all()
    if size == 0:
        assert torch.equal(stored.dequantize(), linear.dequantize())


def test_a_vector_of_zeros_can_be_trained() -> None:
    bias = trained_vector(torch.zeros(4, dtype=torch.bfloat16))
    bias.add_gradient(torch.tensor([1.0, 0.0, -2.0, 0.0]))
    bias.shift.sub_(bias.shift.grad)  # type: ignore[arg-type]
    assert bias.value().tolist() == [-1.0, 0.0, 2.0, 0.0]


@given(st.integers(2, 40), st.integers(1, 4096))
def test_every_window_is_trained_on_once_a_round_or_held_out(count: int, tokens_: int) -> None:
    training = Training(tokens=tokens_)
    train, held = training.split(count)
    assert sorted(train + held) == list(range(count)) and train and held
    size = len(training.batch(0, train, 64))
    assert training.fitted(len(train), 64).steps == min(160, 3 * (len(train) // size))
    per_round = len(train) // size
    for start in (0, per_round):
        seen = [w for step in range(start, start + per_round) for w in training.batch(step, train, 64)]
        assert len(set(seen)) == len(seen) == per_round * size and set(seen) <= set(train)


def test_rows_of_a_fused_module_that_are_not_quantised_stay_the_sources(tmp_path: Path) -> None:
    model = open_model(Folder(tiny_checkpoint(tmp_path / "model", "phi3")))
    grids = tuple((linear.name, Grid(64)) for linear in model.linears if linear.name.endswith(("k_proj", "gate_proj")))
    results = Results(tmp_path / "results")
    quantize(model.checkpoint, model.linears, Recipe(grids, ("rtn",), torch.bfloat16), None, results)
    trainer = module._Trainer(
        model.checkpoint, model.checkpoint, model.linears, torch.bfloat16, WINDOWS, results, TRAINING
    )
    read = trainer.trained[0].reader(results.load(0), model.checkpoint.read, torch.bfloat16)
    for linear in (linear for linear in model.linears if linear.layer == 0):
        rows, source = (r(f"{linear.module}.weight") for r in (read, model.checkpoint.read))
        assert rows.shape == source.shape
        same = torch.equal(rows[linear.start : linear.stop], source[linear.start : linear.stop])
        assert same == (not linear.name.endswith(("k_proj", "gate_proj")))
