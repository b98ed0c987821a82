"""The engine's arithmetic: bit for bit against vLLM's kernel, exact where it claims to be, and refusing the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from calibrate.grid import Quantized, ZeroKind
from models.errors import BadInput
from validate import kernels
from validate.kernels import TinygemmLinear, W4A8Linear, add_product_double, bf16_products, quantize_rows, w4a8_linear

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "vllm_w4a8.safetensors")
CASES = sorted({key.rsplit(".", 1)[0] for key in GOLDEN})


def linear(rows: int = 64, columns: int = 256, size: int = 64, zero: ZeroKind = "none") -> Quantized:
    generator = torch.Generator().manual_seed(0)
    groups = columns // size
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(rows, groups, generator=generator) * 0.1 + 0.01).to(torch.bfloat16)
    if zero == "integer":
        points = torch.randint(0, 16, (rows, groups), dtype=torch.uint8, generator=generator)
        return Quantized(codes, scales, zero_points=points)
    if zero == "float":
        return Quantized(codes, scales, zeros=torch.randn(rows, groups, generator=generator).bfloat16())
    return Quantized(codes, scales)


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def by_definition(x: torch.Tensor, q: Quantized, bias: torch.Tensor | None) -> torch.Tensor:
    """The arithmetic as the specification writes it: int64 dot products, one block of all rows after the other."""
    amax = x.float().abs().amax(1, keepdim=True).clamp(min=1e-7)
    a = torch.round(x.float() * (torch.tensor(127.0) / amax)).long()
    sc = amax / torch.tensor(127.0)
    total = torch.zeros(x.shape[0], q.codes.shape[0]) if bias is None else bias.expand(x.shape[0], -1).clone()
    block = min(q.group_size, 128)
    for start in range(0, x.shape[1], block):
        group = start // q.group_size
        zero = 8 if q.zero_points is None else q.zero_points[:, group, None].long()
        dots = a[:, start : start + block] @ (q.codes[:, start : start + block].long() - zero).t()
        scaled = dots.float() * sc
        total = (scaled.double() * q.scales[:, group].double() + total.double()).float()
    return total.bfloat16()


def test_bf16_products_of_the_largest_numbers_are_exact_and_the_switch_is_put_back() -> None:
    # Large enough for the machine's bf16 instructions, where it has them; sums near 2**18.
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(100, 128, (256, 128), generator=generator)
    b = torch.randint(-15, 16, (128, 256), generator=generator)
    before = torch.backends.mkldnn.matmul.fp32_precision
    with pytest.raises(ZeroDivisionError), bf16_products():
        assert torch.equal((a.float() @ b.float()).long(), a @ b)
        raise ZeroDivisionError
    assert torch.backends.mkldnn.matmul.fp32_precision == before


@pytest.fixture(params=["addcmul", "double"])
def both_roundings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "double":
        monkeypatch.setattr(kernels, "addcmul_is_fused", lambda: False)
    yield


@pytest.mark.usefixtures("both_roundings")
@pytest.mark.parametrize("case", CASES)
def test_every_bit_equals_the_kernel_of_vllm(case: str) -> None:
    q = Quantized(GOLDEN[f"{case}.codes_nk"], GOLDEN[f"{case}.scales_ng"])
    y = w4a8_linear(GOLDEN[f"{case}.x"], q, GOLDEN.get(f"{case}.bias"))
    assert y.dtype == torch.bfloat16 and torch.equal(y, GOLDEN[f"{case}.y"])


@pytest.mark.usefixtures("both_roundings")
@pytest.mark.parametrize("zero", ["none", "integer"])
@pytest.mark.parametrize(("columns", "size"), [(256, 64), (256, 256), (96, 96), (64, 16)])
def test_tiles_and_row_parts_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, zero: ZeroKind, columns: int, size: int
) -> None:
    # Tiles that divide neither rows nor columns, and a second part of rows.
    monkeypatch.setattr(kernels, "TILE_COLUMNS", 48)
    monkeypatch.setattr(kernels, "TILE", 48 * 7)
    monkeypatch.setattr(kernels, "ROWS", 32)
    q, x = linear(columns=columns, size=size, zero=zero), inputs(37, columns)
    bias = inputs(64).float()
    assert torch.equal(w4a8_linear(x, q, bias), by_definition(x, q, bias))
    assert torch.equal(w4a8_linear(x, q, None), by_definition(x, q, None))


def test_the_largest_possible_dot_products_are_exact_in_every_matmul_precision() -> None:
    # All activations +-127 and all weights +-15 after the zero point; odd totals, so that a lost unit shows.
    x = torch.full((33, 256), 2.0).bfloat16()
    x[1::2, ::3] = -2.0
    codes = torch.full((64, 256), 15, dtype=torch.uint8)
    codes[:, 1::5] = 14
    q = Quantized(codes, torch.ones(64, 2).bfloat16(), zero_points=torch.zeros(64, 2, dtype=torch.uint8))
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            layer = W4A8Linear(q)
            a, _ = quantize_rows(x)
            dots = a[:, :128] @ layer.weight[0].float()
            exact = a[:, :128].long() @ codes[:, :128].t().long()
            assert exact.abs().max() > 200_000 and torch.equal(dots.long(), exact), precision
            assert torch.equal(layer(x), by_definition(x, q, None)), precision
    finally:
        torch.set_float32_matmul_precision(before)


def test_activation_scales_use_true_division_and_halves_round_to_even() -> None:
    x = torch.zeros(3, 32)
    x[0, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    x[1, 0] = 3.0
    a, sc = quantize_rows(x.bfloat16())
    assert a[0, :4].tolist() == [127, 0, 2, -2] and sc[0] == 1
    assert sc[1].item() == torch.tensor(3.0, dtype=torch.float64).div(127).float().item()
    assert not a[2].any() and sc[2].item() == (torch.tensor(1e-7) / torch.tensor(127.0)).item()


def test_products_are_added_with_a_single_rounding() -> None:
    # (1 + e)^2 - 1 with e = 2**-12: rounding the product first would lose the e^2.
    e = 2.0**-12
    factor = torch.tensor([1 + e])
    for add in (kernels.add_product, add_product_double):
        total = torch.full((1, 1), -1.0)
        add(total, factor[None], factor)
        assert total.item() == 2 * e + e * e
    assert (factor * factor - 1).item() != 2 * e + e * e


def test_w4a8_is_a_drop_in_for_a_linear_with_leading_dimensions() -> None:
    q, x, bias = linear(zero="integer"), inputs(2, 3, 256), inputs(64)
    y = W4A8Linear(q, bias)(x)
    assert y.shape == (2, 3, 64)
    assert torch.equal(y.view(6, 64), w4a8_linear(x.view(6, 256), q, bias.float()))
    close = torch.nn.functional.linear(x.float(), q.dequantize(torch.float32), bias.float())
    assert (y.float() - close).norm() / close.norm() < 0.02


@pytest.mark.parametrize(
    ("q", "bias", "message"),
    [
        (linear(zero="float"), None, "zero: expected one of none, integer, found float"),
        (
            replace(linear(), codes=torch.full((64, 256), 16, dtype=torch.uint8)),
            None,
            "codes: expected 0..15, found 16",
        ),
        (replace(linear(), scales=torch.ones(64, 3).bfloat16()), None, "group size 85 does not divide 256"),
        (replace(linear(), scales=torch.ones(32, 4).bfloat16()), None, r"scales: expected \[64, 4\]"),
        (replace(linear(), scales=torch.ones(64).bfloat16()), None, "group size 0"),
        (linear(columns=576, size=576), None, "group size 576: the kernel needs at most 128 or a multiple"),
        (linear(), torch.zeros(63), r"bias: expected \[64\]"),
    ],
)
def test_w4a8_refuses_what_the_kernel_cannot_compute(q: Quantized, bias: torch.Tensor | None, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        W4A8Linear(q, bias)


@pytest.mark.parametrize("module", [W4A8Linear, TinygemmLinear])
@pytest.mark.parametrize("x", [torch.zeros(2, 256), torch.zeros(2, 128).bfloat16()])
def test_inputs_of_another_dtype_or_width_are_refused(module: type[torch.nn.Module], x: torch.Tensor) -> None:
    with pytest.raises(BadInput, match="input: expected bfloat16"):
        module(linear())(x)


@pytest.mark.parametrize("zero", ["none", "integer", "float"])
@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_tinygemm_computes_the_dequantised_linear(zero: ZeroKind, size: int) -> None:
    q, x, bias = linear(80, 512, size, zero), inputs(2, 3, 512), inputs(80)
    y = TinygemmLinear(q, bias)(x)
    exact = torch.nn.functional.linear(x.float(), q.dequantize(torch.float32), bias.float())
    assert y.dtype == torch.bfloat16 and y.shape == (2, 3, 80)
    # 1.6e-3 is the operator's own error; a rounded integer zero adds its share.
    assert (y.float() - exact).norm() / exact.norm() < 6e-3


def test_tinygemm_takes_inputs_that_are_not_contiguous() -> None:
    layer, x = TinygemmLinear(linear()), inputs(256, 5).t()
    assert torch.equal(layer(x), layer(x.contiguous()))


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (replace(linear(), codes=torch.full((64, 256), 16, dtype=torch.uint8)), "codes: expected 0..15, found 16"),
        (linear(columns=512, size=512), "group size 512: the operator takes"),
        (linear(size=16), "group size 16: the operator takes"),
        (linear(rows=40), "40 out features"),
        (replace(linear(), scales=torch.ones(64, 3).bfloat16()), "group size 85"),
        (replace(linear(), scales=torch.ones(32, 4).bfloat16()), r"scales: expected \[64, 4\]"),
        (replace(linear(), scales=torch.ones(64, 4)), "scales: expected bfloat16"),
        (replace(linear(), scales=torch.full((64, 4), torch.nan).bfloat16()), "scales: not finite"),
    ],
)
def test_tinygemm_refuses_what_the_operator_would_not_check(q: Quantized, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        TinygemmLinear(q)
