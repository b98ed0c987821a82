"""Factors of channels: they take error from where it costs most, also that of inputs rounded to int8."""

from __future__ import annotations

import pytest
import torch

from calibrate.awq import LARGEST, rounding, smoothing
from calibrate.grid import Grid
from calibrate.methods import choose
from calibrate.statistics import Inputs, Moments
from validate.kernels import quantize_rows

TOKENS, N, K = 400, 48, 128


def inputs(outliers: float = 1.0, keeps: int = 0) -> tuple[torch.Tensor, Inputs]:
    """Inputs whose every eighth channel is larger, and what calibration sees of them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, K, generator=generator)
    x[:, ::8] *= outliers
    seen = Moments(full=True, keeps=keeps)
    seen.add(x)
    return x, seen.inputs()


def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(N, K, generator=generator), torch.randn(N // 2, K, generator=generator)]


def measured(method: str, grid: Grid, weight: torch.Tensor, known: Inputs) -> float:
    return choose(weight, grid, [method], known).error


@pytest.mark.parametrize("method", ["rtn", "search", "gptq"])
def test_channels_that_carry_more_get_the_larger_factors_and_the_measured_error_falls(method: str) -> None:
    x, known = inputs(outliers=8)
    grid = Grid(64)
    found = smoothing(
        weights(), grid, known, lambda w, i: measured(method, grid, w, i), torch.arange(K), method == "gptq"
    )
    assert found.better and found.after < 0.97 * found.before
    large = torch.arange(K) % 8 == 0
    assert float(found.factors[large].min()) > float(found.factors[~large].max())
    # What was measured is what comes of it: on all rows, and through the real inputs.
    weight = torch.cat(weights())
    scaled = choose(weight * found.factors, grid, [method], known.scaled(found.factors))
    y = x @ weight.t()
    lost = y - (x / found.factors) @ scaled.quantized.dequantize(torch.float32).t()
    assert float(lost.norm() / y.norm()) == pytest.approx(found.after, rel=0.03)


def test_inputs_that_share_a_channel_of_the_writer_share_its_factor() -> None:
    _, known = inputs(outliers=8)
    channel_of = torch.arange(K // 2).repeat(2)
    found = smoothing(weights(), Grid(32), known, lambda w, i: measured("rtn", Grid(32), w, i), channel_of, False)
    assert found.factors.shape == (K // 2,) and found.better


def test_channels_that_were_never_seen_are_bounded_and_change_nothing() -> None:
    known = Inputs(torch.zeros(K))
    found = smoothing(weights(), Grid(32), known, lambda w, i: measured("rtn", Grid(32), w, i), torch.arange(K), False)
    assert not found.better and found.before == 0
    one = torch.zeros(K)
    one[3] = 1e20
    found = smoothing(
        weights(), Grid(32), Inputs(one), lambda w, i: measured("rtn", Grid(32), w, i), torch.arange(K), False
    )
    assert bool(found.factors.isfinite().all()) and float(found.factors.max()) <= LARGEST


@pytest.mark.parametrize("outliers", [1.0, 30.0])
def test_the_expected_error_of_int8_inputs_is_the_kernels(outliers: float) -> None:
    x, known = inputs(outliers, keeps=TOKENS)
    weight = weights()[0]
    codes, steps = quantize_rows(x)
    lost = (x - codes * steps) @ weight.t()
    assert rounding(weight, known) == pytest.approx(float(lost.square().sum(1).mean()), rel=0.1)
    assert rounding(weight, inputs(outliers)[1]) == 0


def test_outliers_of_inputs_that_are_rounded_go_into_the_weights() -> None:
    x, known = inputs(outliers=100, keeps=TOKENS)
    grid = Grid(64)
    weight = weights()[0]
    found = smoothing([weight], grid, known, lambda w, i: measured("gptq", grid, w, i), torch.arange(K), True)

    def lost(factors: torch.Tensor) -> float:
        """Of the engine's arithmetic: both roundings."""
        scaled = choose(weight * factors, grid, ["gptq"], known.scaled(factors)).quantized.dequantize(torch.float32)
        codes, steps = quantize_rows(x / factors)
        y = x @ weight.t()
        return float((y - codes * steps @ scaled.t()).norm() / y.norm())

    assert found.better and found.after == pytest.approx(lost(found.factors), rel=0.1)
    assert lost(found.factors) < 0.97 * lost(torch.ones(K))
