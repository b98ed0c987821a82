"""The 4-bit grids: nearest codes, bounded errors, and the groups that break naive formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.grid import (
    Grid,
    Quantized,
    ZeroKind,
    check_finite,
    concatenate,
    encode,
    grouped,
    range_parameters,
    stored_scales,
)
from calibrate.search import round_to_nearest, search
from models.errors import BadInput

KINDS: tuple[ZeroKind, ...] = ("none", "float", "integer")
METHODS: tuple[Callable[[torch.Tensor, Grid], Quantized], ...] = (round_to_nearest, search)
every_kind = pytest.mark.parametrize("zero", KINDS)
every_method = pytest.mark.parametrize("method", METHODS)
grids = st.builds(
    Grid, st.sampled_from([8, 16, 32, 64]), st.sampled_from(KINDS), st.sampled_from([torch.bfloat16, torch.float16])
)


def weights(
    seed: int, grid: Grid, rows: int = 5, groups: int = 3, shift: float = 0.0, size: float = 0.1
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, groups * grid.group_size, generator=generator)
    # Outliers, as real rows have.
    weight[:, ::11] *= 4
    return (weight + shift) * size


def every_value(q: Quantized) -> torch.Tensor:
    """What each of the 16 codes stands for, written out from the definition in float64: [N, groups, 16]."""
    codes = torch.arange(16, dtype=torch.float64)
    scales = q.scales.double()[..., None]
    if q.zeros is not None:
        return (codes - 8) * scales + q.zeros.double()[..., None]
    return (codes - (8 if q.zero_points is None else q.zero_points.double()[..., None])) * scales


@settings(max_examples=60, deadline=None)
@given(grids, st.integers(0, 10_000), st.floats(-3, 3), st.sampled_from([1e-3, 0.1, 10]))
def test_dequantised_weights_are_the_values_of_their_codes(grid: Grid, seed: int, shift: float, size: float) -> None:
    q = round_to_nearest(weights(seed, grid, shift=shift, size=size), grid)
    codes = grouped(q.codes, grid.group_size).long()
    expected = every_value(q).gather(-1, codes).view(q.codes.shape)
    assert torch.allclose(q.dequantize(torch.float32).double(), expected, rtol=1e-6, atol=1e-6 * size)
    assert torch.equal(q.dequantize(), q.dequantize(torch.float32).bfloat16())
    assert q.grid == grid and q.codes.dtype == torch.uint8 and q.scales.dtype == grid.dtype


@settings(max_examples=60, deadline=None)
@given(grids, st.integers(0, 10_000), st.floats(-3, 3))
def test_encode_picks_the_nearest_of_all_16_codes(grid: Grid, seed: int, shift: float) -> None:
    weight = weights(seed, grid, shift=shift)
    low, high = grouped(weight, grid.group_size).aminmax(dim=-1)
    # A range that is too small, so that codes at the ends are clipped.
    parameters = range_parameters(low * 0.7, high * 0.7, grid)
    codes = encode(weight, parameters, grid.group_size)
    distances = (grouped(weight, grid.group_size).double()[..., None] - every_value(parameters)[..., None, :]).abs()
    chosen = distances.gather(-1, grouped(codes, grid.group_size).long()[..., None])[..., 0]
    # fp32 division may take the other one of two codes that are equally near up to its rounding.
    assert (chosen <= distances.amin(-1) + 1e-6 * parameters.scales.double()[..., None] * 16).all()


@settings(max_examples=60, deadline=None)
@given(grids, st.integers(0, 10_000), st.floats(-3, 3))
def test_inside_the_range_the_error_is_at_most_half_a_step_and_the_rounding(
    grid: Grid, seed: int, shift: float
) -> None:
    weight = weights(seed, grid, shift=shift)
    q = round_to_nearest(weight, grid)
    error = grouped(weight - q.dequantize(torch.float32), grid.group_size).abs().amax(-1)
    step = q.scales.float()
    rounding = torch.finfo(grid.dtype).eps
    # A rounded scale reaches less far at the ends, by up to 8 steps of its rounding; a rounded zero shifts all codes.
    allowed = step * (0.5 + 8 * rounding)
    if grid.zero == "none":
        # 15 levels over twice the largest magnitude: the positive end lacks half a step.
        allowed = allowed + step * rounding
    if q.zeros is not None:
        allowed = allowed + q.zeros.float().abs() * rounding
    if q.zero_points is not None:
        # A rounded zero point shifts the range by up to half a step.
        allowed = allowed + step * 0.5
    assert (error <= allowed * (1 + 1e-5)).all()


@every_kind
def test_scales_are_rounded_before_codes_are_chosen(zero: ZeroKind) -> None:
    """Codes that were chosen with the exact scale differ: 3 bits of mantissa would change most of them."""
    grid = Grid(32, zero)
    weight = weights(3, grid)
    q = round_to_nearest(weight, grid)
    assert torch.equal(encode(weight, q, 32), q.codes)
    low, high = grouped(weight, 32).aminmax(dim=-1)
    assert torch.equal(range_parameters(low, high, grid).scales, q.scales)
    exact = range_parameters(low, high, Grid(32, zero, torch.float32))
    assert not torch.equal(exact.scales, q.scales.float()) and torch.equal(exact.scales.bfloat16(), q.scales)


@every_kind
@every_method
def test_an_all_zero_group_is_code_8_with_a_positive_scale_and_dequantises_to_zero(
    zero: ZeroKind, method: Callable[[torch.Tensor, Grid], Quantized]
) -> None:
    weight = weights(0, Grid(16, zero))
    weight[1, 16:32] = 0
    q = method(weight, Grid(16, zero))
    assert (q.codes[1, 16:32] == 8).all()
    assert q.zero_points is None or q.zero_points[1, 1] == 8
    assert q.scales[1, 1] > 0 and torch.isfinite(q.scales).all()
    assert (q.dequantize()[1, 16:32] == 0).all() and (q.dequantize()[1, :16] != 0).any()


@every_kind
@every_method
@pytest.mark.parametrize("value", [0.75, -0.75, 1e-3, 300.0])
def test_a_constant_group_keeps_its_value(
    zero: ZeroKind, method: Callable[[torch.Tensor, Grid], Quantized], value: float
) -> None:
    weight = torch.full((2, 32), value)
    found = method(weight, Grid(16, zero)).dequantize(torch.float32)
    # Symmetric round to nearest spans 15 levels over twice the value: half a step of 7.5 is 1/15 of it.
    tolerance = 1 / 14 if zero == "none" and method is round_to_nearest else 2**-8
    assert torch.allclose(found, weight, rtol=tolerance)


@every_kind
@every_method
@pytest.mark.parametrize("size", [3e38, 1e-38, 1e-40, 1e-45], ids=str)
def test_huge_and_subnormal_weights_stay_finite(
    zero: ZeroKind, method: Callable[[torch.Tensor, Grid], Quantized], size: float
) -> None:
    weight = torch.tensor([[1.0, -1.0, 0.5, -0.25], [1.0, 0.9, 0.5, 0.25], [-1.0, -0.9, 0.0, -0.5]]) * size
    q = method(weight, Grid(4, zero))
    found = q.dequantize(torch.float32)
    assert torch.isfinite(found).all() and torch.isfinite(q.dequantize()).all()
    assert torch.isfinite(q.scales).all() and (q.scales > 0).all()
    assert ((found - weight).abs() <= size * 1.01).all()
    if size > 1:
        assert ((found - weight).abs() < 0.15 * size).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_stored_scales_are_positive_finite_and_of_their_dtype(dtype: torch.dtype) -> None:
    scales = torch.tensor([0.0, 1e-45, 1e-5, 0.1, 1.0, 6e4, 1e6, 3.4e38])
    found = stored_scales(scales, dtype)
    assert found.dtype == dtype and torch.isfinite(found).all() and (found > 0).all()
    assert found[0] == 1 and found[1] == 1
    assert torch.allclose(found[2].float(), scales[2], rtol=5e-3)
    # What is too large for the dtype becomes its largest number: 1 would quantise the group to nothing like it.
    assert torch.allclose(found[3:].double(), scales[3:].double().clamp(max=torch.finfo(dtype).max), rtol=4e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_named_with_its_index(value: float) -> None:
    weight = torch.zeros(4, 6)
    weight[2, 5] = weight[3, 1] = value
    with pytest.raises(BadInput, match=rf"^m.weight: expected finite weights, found {value} at \[2, 5\] \(2 in all\)$"):
        check_finite("m.weight", weight)
    check_finite("m.weight", torch.zeros(4, 6))


@every_kind
def test_parts_stack_and_rows_come_back(zero: ZeroKind) -> None:
    grid = Grid(16, zero)
    parts = [round_to_nearest(weights(seed, grid, rows=rows), grid) for seed, rows in enumerate((4, 1, 3))]
    whole = concatenate(parts)
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))
    for part, (start, stop) in zip(parts, ((0, 4), (4, 5), (5, 8)), strict=True):
        again = whole.rows(start, stop)
        assert again.grid == grid
        for found, expected in zip(again._tensors(), part._tensors(), strict=True):
            assert (found is None) == (expected is None) and (found is None or torch.equal(found, expected))  # type: ignore[arg-type]


@every_kind
def test_a_fused_linear_quantises_as_its_parts_do(zero: ZeroKind) -> None:
    grid = Grid(16, zero)
    parts = [weights(seed, grid, rows=3) for seed in range(3)]
    whole, joined = search(torch.cat(parts), grid), concatenate([search(part, grid) for part in parts])
    assert torch.equal(whole.dequantize(), joined.dequantize()) and torch.equal(whole.codes, joined.codes)


def test_a_linear_has_one_kind_of_zero() -> None:
    q = round_to_nearest(weights(0, Grid(16, "float")), Grid(16, "float"))
    with pytest.raises(ValueError, match="not both"):
        Quantized(q.codes, q.scales, q.zeros, torch.zeros_like(q.scales, dtype=torch.uint8))


@pytest.mark.parametrize(("zero", "bits"), [("none", 4.25), ("float", 4.5), ("integer", 4.3125)])
def test_bits_per_weight_count_codes_scales_and_zeros(zero: ZeroKind, bits: float) -> None:
    assert Grid(64, zero).bits_per_weight == bits
