"""The search over scales: never worse than round to nearest in its own metric, and guided by the inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate import search as module
from calibrate.grid import Grid, Quantized, ZeroKind, grouped
from calibrate.methods import CHOOSE
from calibrate.search import error, round_to_nearest, search
from calibrate.statistics import Inputs

KINDS: tuple[ZeroKind, ...] = ("none", "float", "integer")
every_kind = pytest.mark.parametrize("zero", KINDS)


def weights(seed: int, rows: int = 16, columns: int = 128) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 0.05
    weight[:, ::17] *= 5
    return weight


def moments(seed: int, columns: int = 128) -> torch.Tensor:
    """As of real activations: a few channels carry most."""
    return torch.randn(columns, generator=torch.Generator().manual_seed(seed)).mul(2).exp()


def losses(weight: torch.Tensor, q: Quantized, h: torch.Tensor | None) -> torch.Tensor:
    """Per group, [N, groups]."""
    squared = (weight - q.dequantize(torch.float32)).double().square()
    return grouped(squared if h is None else squared * h, q.group_size).sum(-1)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(KINDS), st.sampled_from([16, 32, 128]), st.integers(0, 1000), st.booleans())
def test_no_group_is_worse_than_with_round_to_nearest_in_the_searched_metric(
    zero: ZeroKind, size: int, seed: int, weighted: bool
) -> None:
    weight, h = weights(seed), moments(seed) if weighted else None
    found = losses(weight, search(weight, Grid(size, zero), h), h)
    plain = losses(weight, round_to_nearest(weight, Grid(size, zero)), h)
    assert (found <= plain * (1 + 1e-5)).all()
    assert found.sum() < 0.98 * plain.sum()


@every_kind
def test_moments_lower_the_weighted_error_and_cost_the_plain_one(zero: ZeroKind) -> None:
    weight, h, grid = weights(0), moments(0), Grid(64, zero)
    guided, blind = search(weight, grid, h), search(weight, grid)
    assert error(weight, guided, h) < 0.9 * error(weight, blind, h)
    assert error(weight, guided) > error(weight, blind)


@every_kind
@pytest.mark.parametrize("weighted", [False, True])
def test_cutting_rows_into_chunks_changes_nothing(
    zero: ZeroKind, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, h = weights(1, rows=21), moments(1) if weighted else None
    whole = search(weight, Grid(32, zero), h)
    monkeypatch.setattr(module, "CHUNK", 128 * 4)
    parts = search(weight, Grid(32, zero), h)
    for found, expected in zip(parts._tensors(), whole._tensors(), strict=True):
        assert (found is None) == (expected is None) and (found is None or torch.equal(found, expected))  # type: ignore[arg-type]


@every_kind
def test_at_least_80_grids_are_tried_for_a_group(zero: ZeroKind) -> None:
    low, high = torch.tensor([[-0.9]]), torch.tensor([[1.1]])
    candidates = module._candidates(low, high, Grid(32, zero, torch.float32), module.SIZES)
    different = {tuple(float(t) for t in q._tensors()[1:] if t is not None) for q in candidates}
    # Rounding makes some integer zero points alike, and with them their grids.
    assert len(candidates) >= 80 and len(different) >= (60 if zero == "integer" else 80)


def test_an_outlier_is_clipped_where_that_lowers_the_error() -> None:
    weight = torch.linspace(-1, 1, 127).repeat(4, 1)
    weight = torch.cat((weight, torch.full((4, 1), 3.0)), dim=1)
    grid = Grid(128)
    found, plain = search(weight, grid), round_to_nearest(weight, grid)
    assert (found.scales < 0.85 * plain.scales).all()


def test_the_search_reaches_a_scale_beyond_max_abs_over_7_5() -> None:
    """A group whose largest value is positive gains from a step of max / 7."""
    weight = torch.cat((torch.full((1, 15), 0.0), torch.ones(1, 1)), dim=1)
    assert error(weight, search(weight, Grid(16))) < 0.02 < error(weight, round_to_nearest(weight, Grid(16)))


@every_kind
def test_weights_on_a_grid_come_back_exactly(zero: ZeroKind) -> None:
    codes = torch.randint(0, 16, (8, 64), generator=torch.Generator().manual_seed(0))
    codes[:, 0::32], codes[:, 1::32] = 0, 15
    weight = (codes - 8) * 0.125
    assert error(weight, search(weight, Grid(32, zero))) < 1e-6


@every_kind
def test_channels_without_input_do_not_spoil_the_search(zero: ZeroKind) -> None:
    weight, h = weights(2), moments(2)
    h[32:64] = 0
    q = search(weight, Grid(32, zero), h)
    assert torch.isfinite(q.dequantize()).all() and error(weight, q, h) < 0.12
    # A whole group without input is still quantised as well as it can be read.
    assert error(weight[:, 32:64], Quantized(*(None if t is None else slice_(t) for t in q._tensors()))) < 0.2  # type: ignore[arg-type]


def slice_(t: torch.Tensor) -> torch.Tensor:
    return t[:, 32:64] if t.shape[1] == 128 else t[:, 1:2]


def test_the_error_is_relative_and_weighted() -> None:
    weight = torch.tensor([[3.0, 4.0]])
    q = Quantized(torch.tensor([[11, 11]], dtype=torch.uint8), torch.ones(1, 1, dtype=torch.bfloat16))
    assert error(weight, q) == pytest.approx(1 / 5)
    assert error(weight, q, torch.tensor([1.0, 0.0])) == 0
    assert error(weight, q, torch.tensor([0.0, 9.0])) == pytest.approx(1 / 4)
    assert error(torch.zeros(2, 2), Quantized(torch.full((2, 2), 8, dtype=torch.uint8), torch.ones(2, 1))) == 0


def test_the_error_sums_over_all_rows() -> None:
    weight = weights(4, rows=1100)
    q = round_to_nearest(weight, Grid(64))
    expected = (weight - q.dequantize(torch.float32)).double().norm() / weight.double().norm()
    assert error(weight, q) == pytest.approx(float(expected), rel=1e-6)


@every_kind
def test_bf16_weights_give_what_their_fp32_copies_give(zero: ZeroKind) -> None:
    weight = weights(5).bfloat16()
    for name, choose in CHOOSE.items():
        inputs = Inputs(moments(5))
        found, expected = choose(weight, Grid(32, zero), inputs), choose(weight.float(), Grid(32, zero), inputs)
        assert torch.equal(found.codes, expected.codes) and torch.equal(found.scales, expected.scales), name


def test_a_symmetric_grid_turns_its_longer_side_to_the_larger_extreme() -> None:
    """-8 .. 7 steps of a tenth, the whole group mirrored: only a negative scale reaches 0.8."""
    weight = -(torch.arange(16).float() - 8).view(1, 16) * 0.1
    q = search(weight, Grid(16))
    assert q.scales.item() < 0 and error(weight, q) < 0.005 < 0.03 < error(weight, round_to_nearest(weight, Grid(16)))


def test_fits_find_a_float_zero_between_the_candidates() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (8, 64), generator=generator).to(torch.uint8)
    codes[:, 0::32], codes[:, 1::32] = 0, 15
    right = Quantized(codes, torch.full((8, 2), 0.11).bfloat16(), torch.full((8, 2), 0.3).bfloat16())
    assert error(right.dequantize(torch.float32), search(right.dequantize(torch.float32), Grid(32, "float"))) < 0.002
