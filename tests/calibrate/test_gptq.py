"""GPTQ: the codes are those of the published algorithm, and the error of the output falls."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.gptq import compensate, gptq
from calibrate.grid import MIDDLE, Grid, Quantized, ZeroKind
from calibrate.hessian import damped, factorise
from calibrate.search import error, round_to_nearest, search

KINDS: tuple[ZeroKind, ...] = ("none", "float", "integer")
every_kind = pytest.mark.parametrize("zero", KINDS)


def problem(seed: int = 0, rows: int = 12, columns: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [N, K] and the second moments of correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 0.05
    x = torch.randn(4 * columns, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    x *= torch.randn(columns, generator=generator).exp()
    return weight, x.t() @ x / len(x)


def published(weight: torch.Tensor, parameters: Quantized, hessian: torch.Tensor) -> torch.Tensor:
    """GPTQ as its paper writes it, one column after another with the inverse's Cholesky factor, in fp64."""
    h, size = damped(hessian), weight.shape[1] // parameters.scales.shape[1]
    order = torch.argsort(h.diagonal(), descending=True, stable=True)
    upper = torch.linalg.cholesky(torch.linalg.inv(h[order][:, order]), upper=True)
    w, codes = weight.double()[:, order], torch.empty(weight.shape, dtype=torch.uint8)
    for i, column in enumerate(order.tolist()):
        group = column // size
        scale = parameters.scales[:, group].double()
        zero = 0.0 if parameters.zeros is None else parameters.zeros[:, group].double()
        middle = MIDDLE if parameters.zero_points is None else parameters.zero_points[:, group].double()
        code = (((w[:, i] - zero) / scale).round() + middle).clamp(0, 15)
        wrong = (w[:, i] - ((code - middle) * scale + zero)) / upper[i, i]
        w[:, i + 1 :] -= wrong[:, None] * upper[i, i + 1 :]
        codes[:, column] = code.to(torch.uint8)
    return codes


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(KINDS), st.sampled_from([16, 32, 64]), st.integers(0, 1000))
def test_the_codes_are_those_of_the_published_algorithm(zero: ZeroKind, size: int, seed: int) -> None:
    weight, h = problem(seed)
    parameters = search(weight, Grid(size, zero))
    found = compensate(weight, parameters, factorise(h))
    # A value half way between two codes may go either way in fp32, and others follow it.
    assert (found != published(weight, parameters, h)).any(1).sum() <= 1


@every_kind
def test_blocked_is_unblocked(zero: ZeroKind) -> None:
    weight, h = problem(1)
    parameters, factor = search(weight, Grid(32, zero)), factorise(h)
    whole = compensate(weight, parameters, factor, block=64)
    for block in (1, 7, 32):
        assert (compensate(weight, parameters, factor, block) != whole).any(1).sum() <= 1, block


@every_kind
@pytest.mark.parametrize("size", [16, 64])
def test_the_output_error_falls_well_below_the_searchs(zero: ZeroKind, size: int) -> None:
    weight, h = problem(2)
    grid = Grid(size, zero)
    found = error(weight, gptq(weight, grid, factorise(h)), h)
    assert found < 0.9 * error(weight, search(weight, grid, h.diagonal()), h)
    assert found < 0.7 * error(weight, round_to_nearest(weight, grid), h)


@every_kind
def test_independent_channels_are_rounded_to_the_nearest_code(zero: ZeroKind) -> None:
    weight, _ = problem(3)
    parameters = search(weight, Grid(32, zero))
    codes = compensate(weight, parameters, factorise(torch.diag(torch.rand(64) + 0.1)))
    assert torch.equal(codes, parameters.codes)


def test_one_group_a_row_and_bf16_weights() -> None:
    weight, h = problem(4)
    grid = Grid(64, "none")
    a, b = (gptq(w, grid, factorise(h)) for w in (weight.bfloat16(), weight.bfloat16().float()))
    assert torch.equal(a.codes, b.codes) and a.grid == grid


def test_the_result_does_not_depend_on_the_number_of_threads() -> None:
    weight, h = problem(5, rows=256, columns=512)
    grid, errors = Grid(64), []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            errors.append(error(weight, gptq(weight, grid, factorise(h)), h))
    finally:
        torch.set_num_threads(threads)
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)
