"""The streamed backward pass: its gradients are those of plain autograd through the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.func import functional_call

from calibrate import tune_stream
from calibrate.grid import Grid
from calibrate.quantize import Recipe, quantize
from calibrate.results import Results
from calibrate.tune import Training, _Trainer
from calibrate.tune_stream import divergence
from models.checkpoint import Folder
from models.opened import OpenedModel, open_model
from models.skeleton import load_model
from tests.helpers import MODEL_TYPES, tiny_checkpoint, tokens

WINDOWS = tokens(4, 24)


def trainer(model: OpenedModel, folder: Path, zero: str, head: bool) -> _Trainer:
    """A training in fp32, of which nothing is rounded but the codes."""
    grids = tuple(
        (linear.name, Grid(32, zero, torch.float32))  # type: ignore[arg-type]
        for linear in model.linears
        if head or linear.layer is not None
    )
    results = Results(folder)
    quantize(model.checkpoint, model.linears, Recipe(grids, ("rtn",), torch.float32), None, results)
    return _Trainer(
        model.checkpoint, model.checkpoint, model.linears, torch.float32, WINDOWS, results, Training(tokens=48)
    )


def plain_gradients(model: OpenedModel, trained: _Trainer, batch: list[int]) -> tuple[float, list[torch.Tensor]]:
    """The same loss and gradients by autograd through the whole model, in the order of the trainer's parameters."""
    reference, student = (load_model(model.checkpoint, torch.float32) for _ in range(2))
    weights = {name: value.detach() for name, value in student.named_parameters(remove_duplicate=False)}
    shifts = []
    for index, layer in enumerate(trained.trained):
        found = trained.results.load(index)
        for name in layer.grids:
            linear, q = layer.where[name], found.linears[name]
            scale_shift = torch.zeros_like(q.scales, requires_grad=True)
            shifts.append(scale_shift)
            middle = 8.0 if q.zero_points is None else q.zero_points.float()[..., None]
            steps = q.codes.float().view(*q.scales.shape, -1) - middle
            weight = steps * (q.scales * (1 + scale_shift))[..., None]
            if q.zeros is not None:
                zero_shift = torch.zeros_like(q.scales, requires_grad=True)
                shifts.append(zero_shift)
                weight = weight + (q.zeros + q.scales * zero_shift)[..., None]
            key = f"{linear.module}.weight"
            whole = weights[key]
            rows = weight.view(q.codes.shape)
            weights[key] = torch.cat([whole[: linear.start], rows, whole[linear.stop :]])
        for name, vector in layer.tensors.items():
            shift = torch.zeros_like(vector.start, requires_grad=True)
            shifts.append(shift)
            weights[name] = vector.start + vector.unit * shift
    ids = WINDOWS[batch]
    logits = functional_call(student, weights, (ids,), {"use_cache": False}, tie_weights=False).logits
    with torch.no_grad():
        expected = torch.log_softmax(reference(ids, use_cache=False).logits, -1)
    loss = (expected.exp() * (expected - torch.log_softmax(logits, -1))).sum()
    return float(loss.detach()), list(torch.autograd.grad(loss, shifts))


# Every kind of grid for two families, which differ most; one for the others.
CASES = [
    (model_type, zero, head)
    for model_type in MODEL_TYPES
    for zero in ("none", "integer", "float")
    for head in (False, True)
    if model_type in ("llama", "spark2_5") or (zero, head) == ("float", False)
]


@pytest.mark.parametrize(("model_type", "zero", "head"), CASES)
def test_streamed_gradients_are_those_of_plain_autograd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, zero: str, head: bool
) -> None:
    # Several parts of tokens, and of the head's rows; the last ones smaller.
    monkeypatch.setattr(tune_stream, "ROWS", 20)
    monkeypatch.setattr(tune_stream, "HEAD_ROWS", 200)
    model = open_model(Folder(tiny_checkpoint(tmp_path / "model", model_type)))
    trained = trainer(model, tmp_path / "results", zero, head)
    batch = [0, 2]
    loss, expected = plain_gradients(model, trained, batch)
    boundaries = trained.layers.forward(trained.embedded[batch])
    with trained.end.loaded():
        found, gradient = trained.end.loss(WINDOWS[batch], trained.expected[batch], boundaries[-1], train=True)
    assert gradient is not None
    assert list(trained.layers.backward(boundaries, gradient)) == list(reversed(range(len(trained.replay))))
    assert found == pytest.approx(loss, rel=1e-4)
    assert len(trained.parameters) == len(expected)
    for parameter, gradient in zip(trained.parameters, expected, strict=True):
        assert parameter.shift.grad is not None
        torch.testing.assert_close(parameter.shift.grad, gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))


def test_divergence_and_its_gradient_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_stream, "CHUNK", 100)
    a, b = torch.randn(2, 7, 30, generator=torch.Generator().manual_seed(0)) * 3
    b.requires_grad_()
    expected = torch.nn.functional.kl_div(b.log_softmax(-1), a.log_softmax(-1), reduction="sum", log_target=True)
    expected.backward()
    loss, gradient = divergence(a, b.detach())
    assert loss == pytest.approx(float(expected.detach()))
    torch.testing.assert_close(gradient, b.grad)
