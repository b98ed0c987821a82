"""Output channels that make up for each other's errors."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.gptq import gptq
from calibrate.grid import Grid, Quantized, ZeroKind
from calibrate.hessian import factorise
from calibrate.methods import choose
from calibrate.outputs import by_outputs
from calibrate.search import round_to_nearest
from calibrate.statistics import Inputs, Moments


def correlated(rows: int, seed: int, tokens: int = 4096) -> torch.Tensor:
    """Products of gradients that lie in few directions, as those of a real model do."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randn(tokens, 6, generator=generator) @ torch.randn(6, rows, generator=generator)
    g = few + 0.3 * torch.randn(tokens, rows, generator=generator)
    return g.t() @ g / tokens


def cost(weight: torch.Tensor, q: Quantized, outputs: torch.Tensor, hessian: torch.Tensor) -> float:
    """tr(O E H E^T)"""
    errors = (weight - q.dequantize(torch.float32)).double()
    return float(((outputs.double() @ errors) * (errors @ hessian.double())).sum())


@pytest.mark.parametrize("zero", ["none", "integer", "float"])
def test_errors_cost_less_where_output_channels_make_up_for_each_other(zero: ZeroKind) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 64, generator=generator)
    x = torch.randn(512, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    hessian, outputs, grid = x.t() @ x / 512, correlated(96, 2), Grid(32, zero)
    factor = factorise(hessian)
    alone = gptq(weight, grid, factor)
    together = by_outputs(weight, [outputs], lambda rows: gptq(rows, grid, factor))
    # A third of it is left on such gradients; half is far from both.
    assert cost(weight, together, outputs, hessian) < 0.5 * cost(weight, alone, outputs, hessian)


def test_a_single_block_is_the_method_itself() -> None:
    weight = torch.randn(24, 32, generator=torch.Generator().manual_seed(0))
    grid = Grid(16, "float")
    one = by_outputs(weight, [correlated(24, 0)], lambda rows: round_to_nearest(rows, grid), block=24)
    plain = round_to_nearest(weight, grid)
    assert torch.equal(one.codes, plain.codes) and torch.equal(one.scales, plain.scales)
    assert one.zeros is not None and plain.zeros is not None and torch.equal(one.zeros, plain.zeros)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 20), spans=st.integers(1, 3), block=st.integers(1, 7), zero=st.sampled_from(["none", "integer"])
)
def test_channels_whose_errors_are_unrelated_are_quantised_each_for_itself(
    rows: int, spans: int, block: int, zero: ZeroKind
) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows * spans, 32, generator=generator)
    outputs = [torch.diag(torch.rand(rows, generator=generator) + 0.1) for _ in range(spans)]
    grid = Grid(16, zero)
    found = by_outputs(weight, outputs, lambda part: round_to_nearest(part, grid), block)
    plain = round_to_nearest(weight, grid)
    assert torch.equal(found.codes, plain.codes)
    assert torch.equal(found.dequantize(torch.float32), plain.dequantize(torch.float32))


def test_a_linear_is_still_never_worse_than_round_to_nearest() -> None:
    """Here all that output channels make up for is worth more than the linear's own error."""
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(3))
    inputs = replace(Inputs.alike(32), hessian=torch.eye(32))
    outputs = 1e-3 * torch.eye(32) + torch.ones(32, 32)
    chosen = choose(weight, Grid(32), ["gptq"], inputs, [outputs])
    assert chosen.fallback.startswith("gptq came to an error of")


def test_tokens_count_as_often_as_they_are_said_to() -> None:
    generator = torch.Generator().manual_seed(0)
    x, reference = (torch.randn(2, 3, 8, generator=generator).bfloat16() for _ in range(2))
    weights = torch.tensor([[1.0, 0.0, 4.0], [0.0, 1.0, 0.0]])
    counted, repeated = Moments(True), Moments(True)
    counted.add(x, reference, weights)
    chosen = [(0, 0), (0, 2), (0, 2), (0, 2), (0, 2), (1, 1)]
    repeated.add(torch.stack([x[i] for i in chosen]), torch.stack([reference[i] for i in chosen]))
    for a, b in (
        (counted.products, repeated.products),
        (counted.drift, repeated.drift),
        (counted.total, repeated.total),
    ):
        assert a is not None and b is not None
        torch.testing.assert_close(a, b)
