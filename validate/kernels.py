"""Linears that compute what the engines' 4-bit kernels compute, to measure an artifact by its engine's arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from calibrate.grid import MIDDLE, Quantized
from export import tinygemm
from export.layout import describe, grid_problems, raise_problems
from models.errors import BadInput

# The kernel sums at most this many products before it scales.
BLOCK = 128
# An output tile and its accumulator, fp32, together about 1.5 MB: second-level cache of current machines.
TILE = 512 * 384
TILE_COLUMNS = 384
# Rows quantised at once: bounds memory when a caller passes a whole text.
ROWS = 2048


class W4A8Linear(torch.nn.Module):
    """``int4_scaled_mm_cpu`` of vLLM's CPU build, bit for bit: int8 activations per row, 4-bit weights per group.

    Per row, ``amax = max|x|`` floored at 1e-7, ``sc = amax / 127`` and ``a = round_half_even(x * (127 / amax))``, all
    fp32. The sum starts at the bias; each block of min(group size, 128) in features adds
    ``fma(fp32(dot(a, q - zero_point)) * sc, scale, sum)``; the result is rounded to bf16.

    The dot products are fp32 matrix products of small integers: exact in any order of summation, as no partial sum
    exceeds 127 * 15 * 128 < 2**24, and exact of bf16 factors, as 127 and 15 are bf16 numbers.

    It issues many small operations, so threads help only on cores that nothing else uses.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, q: Quantized, bias: torch.Tensor | None = None) -> None:
        """Prepares the weight.

        q: codes [N, K], symmetric or with integer zero points; scales are rounded to bf16, as the engine loads them.
        bias: [N] or None.

        Raises BadInput for a float zero, for numbers off the grid, and for a group that blocks of 128 do not divide.
        """
        super().__init__()
        size = _group_size(q)
        raise_problems(grid_problems(q, ("none", "integer"), size) + _bias_problems(q, bias))
        block = min(size, BLOCK)
        if size % block:
            raise BadInput(f"group size {size}: the kernel needs at most {BLOCK} or a multiple of it")
        rows, columns = q.codes.shape
        points = MIDDLE if q.zero_points is None else q.zero_points.to(torch.int8)[..., None]
        values = q.codes.to(torch.int8).view(rows, -1, size) - points
        # [blocks, block, N], the layout of the matrix products; int8, as fp32 would be four times the memory.
        self.register_buffer("weight", values.view(rows, -1, block).permute(1, 2, 0).contiguous())
        scales = q.scales.to(torch.bfloat16).float().t()
        self.register_buffer("scales", scales.repeat_interleave(size // block, dim=0).contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach().float())
        self.in_features, self.out_features = columns, rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: bf16 [..., K]; returns bf16 [..., N]. Raises BadInput for another dtype or K."""
        _check_input(x, self.in_features)
        flat = x.reshape(-1, self.in_features)
        y = torch.empty(flat.shape[0], self.out_features, dtype=torch.bfloat16)
        with bf16_products():
            for rows, out in zip(torch.split(flat, ROWS), torch.split(y, ROWS), strict=True):
                self._forward_rows(rows, out)
        return y.view(*x.shape[:-1], self.out_features)

    def _forward_rows(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Writes the product of x [M, K] into y [M, N], tile by tile so that an accumulator stays in cache."""
        a, sc = quantize_rows(x)
        blocks, block, columns = self.weight.shape
        a = a.view(-1, blocks, block).transpose(0, 1).contiguous()
        width = min(columns, TILE_COLUMNS)
        height = max(1, TILE // width)
        for left in range(0, columns, width):
            weight = self.weight[..., left : left + width].float()
            scales = self.scales[:, left : left + width]
            for top in range(0, x.shape[0], height):
                tile = y[top : top + height, left : left + width]
                total = torch.zeros(tile.shape)
                if self.bias is not None:
                    total += self.bias[left : left + width]
                dots = torch.empty(tile.shape)
                for index in range(blocks):
                    torch.mm(a[index, top : top + height], weight[index], out=dots)
                    dots *= sc[top : top + height]
                    add_product(total, dots, scales[index])
                tile.copy_(total)


class TinygemmLinear(torch.nn.Module):
    """torch's CPU int4 operator on bytes that the operator packs for this machine.

    The operator checks none of: codes, number of groups, group size, scale dtype. The constructor does.
    """

    packed: torch.Tensor
    scales_and_zeros: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, q: Quantized, bias: torch.Tensor | None = None) -> None:
        """Packs the weight.

        q: codes [N, K], N a multiple of 16; bf16 scales, any kind of zero (stored as a bf16 number).
        bias: [N] or None; added in bf16.

        Raises BadInput for what the operator would compute wrongly or crash on.
        """
        super().__init__()
        size = _group_size(q)
        raise_problems(tinygemm.quantized_problems(q, size) + _bias_problems(q, bias))
        convert = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        self.register_buffer("packed", convert(q.codes.to(torch.int32), tinygemm.INNER_K_TILES))
        self.register_buffer("scales_and_zeros", tinygemm.scales_and_zeros(q))
        self.register_buffer("bias", None if bias is None else bias.detach().to(torch.bfloat16))
        self.group_size = size
        self.out_features, self.in_features = q.codes.shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: bf16 [..., K]; returns bf16 [..., N]. Raises BadInput for another dtype or K."""
        _check_input(x, self.in_features)
        flat = x.reshape(-1, self.in_features).contiguous()
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        y: torch.Tensor = multiply(flat, self.packed, self.group_size, self.scales_and_zeros)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)


def w4a8_linear(x: torch.Tensor, q: Quantized, bias: torch.Tensor | None) -> torch.Tensor:
    """``W4A8Linear`` for a single call: x bf16 [M, K], bias fp32 [N] or None; returns bf16 [M, N]."""
    y: torch.Tensor = W4A8Linear(q, bias)(x)
    return y


@contextmanager
def bf16_products() -> Iterator[None]:
    """fp32 matrix products of bf16 factors with fp32 sums, where the machine has instructions for them."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's int8 activations of x [M, K]: whole numbers -127..127 as fp32 [M, K], and fp32 scales [M, 1]."""
    values = x.float()
    amax = values.abs().amax(dim=1, keepdim=True).clamp_min(1e-7)
    # A Python number divided by a tensor is a product with the reciprocal, which rounds differently.
    inverse = torch.true_divide(torch.tensor(127.0), amax)
    return (values * inverse).round_(), torch.true_divide(amax, torch.tensor(127.0))


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a * b in fp32, rounded once. total, a: [M, N]; b: [N]."""
    if addcmul_is_fused():
        total.addcmul_(a, b)
    else:
        add_product_double(total, a, b)


def add_product_double(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``add_product`` through fp64, where the product of fp32 numbers is exact.

    The sum is rounded to fp64 and then to fp32. The two differ from one rounding only if the fp64 sum lies exactly
    between two fp32 numbers without being exact, about once in 2**29 sums, and the result is rounded to bf16 anyway.
    """
    total.copy_(torch.addcmul(total.double(), a.double(), b.double()))


@cache
def addcmul_is_fused() -> bool:
    """Whether torch's fp32 ``addcmul`` rounds once on this machine, vectorised body and scalar tail alike.

    Compilers fuse it where the instruction set has fma, but torch promises nothing, so it is tried.
    """
    generator = torch.Generator().manual_seed(0)
    # An odd width leaves a tail after any vector length; large enough to be split among threads.
    total, a = torch.randn(2, 333, 333, generator=generator)
    b = torch.randn(333, generator=generator)
    expected = total.clone()
    add_product_double(expected, a, b)
    return torch.equal(total.addcmul(a, b), expected)


def _group_size(q: Quantized) -> int:
    """The group size, or 0, which no check accepts, where the shapes define none."""
    return q.group_size if q.codes.dim() == 2 and q.scales.dim() == 2 and q.scales.shape[1] else 0


def _bias_problems(q: Quantized, bias: torch.Tensor | None) -> list[str]:
    if bias is None or tuple(bias.shape) == (q.codes.shape[0],):
        return []
    return [f"bias: expected [{q.codes.shape[0]}], found {describe(bias)}"]


def _check_input(x: torch.Tensor, columns: int) -> None:
    if x.dtype != torch.bfloat16 or x.shape[-1] != columns:
        raise BadInput(f"input: expected bfloat16 [..., {columns}], found {describe(x)}")
