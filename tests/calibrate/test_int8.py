"""The 8-bit grid of phones: symmetric, one scale per output channel, int8 without its lowest number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.gptq import gptq
from calibrate.grid import Grid, Quantized, concatenate, encode
from calibrate.hessian import factorise
from calibrate.refine import refine
from calibrate.results import QuantizedLayer, Results
from calibrate.search import error, round_to_nearest, search


def grid(columns: int) -> Grid:
    """One scale an output channel."""
    return Grid(columns, dtype=torch.float32, bits=8)


def weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=generator)
    # Heavy tails, where a shorter range pays.
    return w * torch.exp(torch.randn(rows, columns, generator=generator))


def hessian(columns: int, seed: int = 0) -> torch.Tensor:
    """Of inputs whose channels go together."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * columns, columns // 4, generator=generator) @ torch.randn(
        columns // 4, columns, generator=generator
    )
    x += 0.3 * torch.randn(x.shape, generator=generator)
    return x.t() @ x / len(x)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 9), st.integers(1, 70), st.integers(0, 9), st.booleans())
def test_a_searched_scale_is_never_worse_than_the_plain_one(rows: int, columns: int, seed: int, weighted: bool) -> None:
    w = weight(rows, columns, seed)
    moments = torch.rand(columns, generator=torch.Generator().manual_seed(seed)) if weighted else None
    plain, searched = round_to_nearest(w, grid(columns)), search(w, grid(columns), moments)
    assert error(w, searched, moments) <= error(w, plain, moments) + 1e-7


def test_the_search_lowers_the_weighted_error_of_heavy_tailed_rows() -> None:
    w, moments = weight(32, 256), torch.ones(256)
    # The largest weight of each row meets an input that is almost always zero.
    moments[w.abs().argmax(1)] = 1e-6
    plain, searched = (error(w, method(w, grid(256), moments), moments) for method in (round_to_nearest, search))
    assert searched < 0.75 * plain


def test_compensation_and_descent_lower_the_output_error_as_they_do_with_4_bits() -> None:
    w, h = weight(32, 64), hessian(64)
    searched = search(w, grid(64), h.diagonal())
    compensated = gptq(w, grid(64), factorise(h))
    refined = refine(w, compensated, h)
    errors = [error(w, quantized, h) for quantized in (searched, compensated, refined)]
    assert errors[1] < 0.85 * errors[0] and errors[2] <= errors[1]
    for quantized in (searched, compensated, refined):
        assert quantized.bits == 8 and quantized.grid == grid(64)
        assert int(quantized.codes.min()) >= 1 and bool((quantized.scales > 0).all())


def test_the_largest_weight_of_a_row_keeps_its_size_and_its_sign() -> None:
    w = weight(50, 30)
    quantized = round_to_nearest(w, grid(30))
    largest = w.abs().argmax(1, keepdim=True)
    assert torch.allclose(quantized.dequantize(torch.float32).gather(1, largest), w.gather(1, largest), rtol=1e-6)
    assert set(quantized.codes.gather(1, largest).flatten().tolist()) == {1, 255}


def test_opposite_weights_get_opposite_codes() -> None:
    w = weight(20, 30)
    one, other = search(w, grid(30)), search(-w, grid(30))
    assert torch.equal(one.codes.int() - 128, 128 - other.codes.int()) and torch.equal(one.scales, other.scales)


def test_rows_of_zeros_and_of_tiny_numbers_stay_finite() -> None:
    w = torch.zeros(3, 8)
    w[1], w[2, 0] = 1e-42, -5.0
    for quantized in (round_to_nearest(w, grid(8)), search(w, grid(8))):
        assert bool(quantized.scales.isfinite().all() & (quantized.scales > 0).all())
        assert bool((quantized.codes[:2] == 128).all()) and quantized.codes[2].tolist() == [1] + [128] * 7
        assert abs(float(quantized.dequantize(torch.float32)[2, 0]) + 5) < 1e-6


def test_encoding_what_was_dequantised_gives_the_same_codes() -> None:
    quantized = search(weight(64, 96), grid(96))
    assert torch.equal(encode(quantized.dequantize(torch.float32), quantized, 96), quantized.codes)


def test_rows_parts_and_results_on_disk_keep_their_bits(tmp_path: Path) -> None:
    eight = search(weight(8, 32), grid(32))
    four = search(weight(8, 32), Grid(16))
    again = concatenate([eight.rows(0, 3), eight.rows(3, 8)])
    assert again.bits == 8 and torch.equal(again.codes, eight.codes)
    results = Results(tmp_path)
    results.save(0, QuantizedLayer({"a": eight, "b": four}, {"a": 0.1, "b": 0.2}))
    loaded = results.load(0).linears
    assert (loaded["a"].bits, loaded["b"].bits) == (8, 4)
    assert torch.equal(loaded["a"].dequantize(), eight.dequantize())
    assert isinstance(loaded["b"], Quantized) and torch.equal(loaded["b"].dequantize(), four.dequantize())


@pytest.mark.parametrize(("bits", "zero"), [(8, "float"), (8, "integer"), (3, "none")])
def test_there_are_no_other_grids(bits: int, zero: str) -> None:
    with pytest.raises(ValueError, match=f"no grid of {bits} bits"):
        Grid(32, zero, bits=bits)  # type: ignore[arg-type]
