"""Refinement: the error never rises, every step is the best one, and the grid stays the grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.gptq import gptq
from calibrate.grid import Grid, Quantized, ZeroKind
from calibrate.hessian import damped, factorise
from calibrate.refine import refine
from calibrate.search import energy, error, round_to_nearest
from tests.calibrate.test_gptq import KINDS, every_kind, problem


def lost(weight: torch.Tensor, q: Quantized, h: torch.Tensor) -> float:
    """What refinement lowers: the energy of the output's error over the damped moments."""
    return energy(weight - q.dequantize(torch.float32), damped(h).float())


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(KINDS), st.sampled_from([16, 32, 64]), st.integers(0, 1000), st.booleans(), st.integers(1, 3))
def test_the_error_never_rises(zero: ZeroKind, size: int, seed: int, compensated: bool, sweeps: int) -> None:
    weight, h = problem(seed)
    grid = Grid(size, zero)
    start = gptq(weight, grid, factorise(h)) if compensated else round_to_nearest(weight, grid)
    found = refine(weight, start, h, sweeps)
    assert found.grid == grid and int(found.codes.max()) <= 15
    assert lost(weight, found, h) <= lost(weight, start, h) * (1 + 1e-5)


@every_kind
def test_it_improves_on_gptq_and_far_on_round_to_nearest(zero: ZeroKind) -> None:
    weight, h = problem(1, rows=64)
    grid = Grid(32, zero)
    compensated, plain = gptq(weight, grid, factorise(h)), round_to_nearest(weight, grid)
    assert lost(weight, refine(weight, compensated, h), h) < 0.99 * lost(weight, compensated, h)
    assert lost(weight, refine(weight, plain, h), h) < 0.6 * lost(weight, plain, h)


@every_kind
def test_at_the_end_no_single_code_can_be_changed_for_the_better(zero: ZeroKind) -> None:
    weight, h = problem(2, rows=3, columns=32)
    found = refine(weight, round_to_nearest(weight, Grid(16, zero)), h, sweeps=100)
    before = lost(weight, found, h)
    for row in range(3):
        for column in range(32):
            for step in (-1, 1):
                codes = found.codes.clone()
                codes[row, column] = (int(codes[row, column]) + step) % 16
                other = Quantized(codes, found.scales, found.zeros, found.zero_points)
                # The last sweep may gain a little, so that a code which it passed has become the second best.
                assert lost(weight, other, h) > before * (1 - 0.003)


def test_scales_move_to_the_least_squares_fit() -> None:
    """Codes that are right for a scale that is not: the scale is found again."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (8, 64), generator=generator).to(torch.uint8)
    zeros = torch.randn(8, 2, generator=generator).bfloat16()
    right = Quantized(codes, torch.full((8, 2), 0.125).bfloat16(), zeros)
    _, h = problem(6)
    weight = right.dequantize(torch.float32)
    wrong = Quantized(codes, torch.full((8, 2), 0.1328125).bfloat16(), zeros + 0.03125)
    found = refine(weight, wrong, h, sweeps=50)
    assert error(weight, wrong, h) > 0.03 and error(weight, found, h) < 0.003


@pytest.mark.parametrize("change", [{"scales": 2.0**-120}, {"weight": 0.0}, {"hessian": 0.0}])
def test_degenerate_linears_stay_finite(change: dict[str, Any]) -> None:
    weight, h = problem(3)
    weight = weight * change.get("weight", 1.0)
    h = h * change.get("hessian", 1.0)
    for zero in KINDS:
        start = round_to_nearest(weight, Grid(32, zero))
        if "scales" in change:
            start.scales[:, 0] = change["scales"]
        found = refine(weight, start, h)
        assert torch.isfinite(found.dequantize()).all() and (found.scales != 0).all()
        assert lost(weight, found, h) <= lost(weight, start, h) * (1 + 1e-5)
