"""How methods compose, and that none is ever worse than rounding to nearest."""

from __future__ import annotations

import pytest
import torch

from calibrate import methods as module
from calibrate.composition import METHODS, STAGES, Method, composition_problems
from calibrate.grid import Grid, ZeroKind
from calibrate.methods import CHOOSE, REFINE, choose, choose_together
from calibrate.search import error, round_to_nearest
from calibrate.statistics import Moments


def test_every_method_that_works_on_a_linear_has_its_function() -> None:
    stages = {name: method.stage for name, method in METHODS.items()}
    assert set(CHOOSE) == {name for name, stage in stages.items() if stage == "codes"}
    assert set(REFINE) == {name for name, stage in stages.items() if stage == "refine"}


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["search"], ""),
        (["before", "rtn", "after"], ""),
        (["rtn", "search"], "rtn and search each choose the codes: name one of them"),
        (["after"], "nothing chooses the codes: name one of rtn, search, gptq"),
        (["rtn", "after", "before"], "methods work in one order: write [before, rtn, after]"),
        (["rtn", "after", "after"], "after stands there twice"),
        (["rotate", "awq", "fisher", "gptq", "refine", "tune"], ""),
        (["fisher", "search"], "fisher weighs errors that one channel makes up for another: search makes up for none"),
        (["awq", "rotate", "gptq"], "methods work in one order: write [rotate, awq, gptq]"),
        (["fold", "rotate", "gptq"], "fold and rotate each fold the norms: name one of them"),
    ],
)
def test_a_list_that_does_not_compose_is_told_how_it_would(
    monkeypatch: pytest.MonkeyPatch, names: list[str], problem: str
) -> None:
    monkeypatch.setitem(METHODS, "before", Method(STAGES[0], "weights"))
    monkeypatch.setitem(METHODS, "after", Method(STAGES[-1], "weights"))
    problems = composition_problems(names)
    assert len(problems) == bool(problem) and problem in "".join(problems)


@pytest.mark.parametrize("zero", ["none", "integer", "float"])
def test_linears_that_read_the_same_are_quantised_together_as_each_would_be_alone(zero: ZeroKind) -> None:
    generator = torch.Generator().manual_seed(0)
    seen = Moments(full=True)
    seen.add(torch.randn(100, 64, generator=generator) @ torch.randn(64, 64, generator=generator))
    inputs, grid = seen.inputs(), Grid(32, zero)
    weights = [torch.randn(rows, 64, generator=generator) for rows in (24, 8, 8)]
    # Round to nearest for one of them: each is judged by itself.
    weights[1] = round_to_nearest(weights[1], grid).dequantize(torch.float32)
    found = choose_together(weights, grid, ["gptq", "refine"], inputs)
    for weight, together in zip(weights, found, strict=True):
        alone = choose(weight, grid, ["gptq", "refine"], inputs)
        # Larger products sum in another order, and a tie may fall otherwise.
        assert (together.quantized.codes != alone.quantized.codes).float().mean() < 0.01
        assert together.error == pytest.approx(alone.error, rel=0.01, abs=1e-6)
        assert bool(together.fallback) == bool(alone.fallback)


def test_a_result_worse_than_round_to_nearest_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(16, 64, generator=generator), torch.randn(100, 64, generator=generator)
    seen = Moments(full=True)
    seen.add(x)
    inputs, grid = seen.inputs(), Grid(32)
    bad = {"search": lambda weight, grid, _: round_to_nearest(weight * 1.5, grid)}
    monkeypatch.setattr(module, "CHOOSE", {**CHOOSE, **bad})
    found, plain = choose(weight, grid, ["search"], inputs), round_to_nearest(weight, grid)
    assert torch.equal(found.quantized.codes, plain.codes)
    y, lost = x @ weight.t(), x @ (weight - plain.dequantize(torch.float32)).t()
    assert found.error == error(weight, plain, inputs.hessian) == pytest.approx(float(lost.norm() / y.norm()), rel=1e-4)
    assert "search came to an error of 0.498" in found.fallback
    monkeypatch.undo()
    assert choose(weight, grid, ["search"], inputs).fallback == ""
