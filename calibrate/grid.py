"""The group grids: what a scale, a zero and a code mean, and nothing about how any file stores them.

A linear's weight [N, K] (N out features, K in features) is cut along K into groups of ``group_size``:

* symmetric: ``w = (q - 8) * scale``
* asymmetric, float zero: ``w = (q - 8) * scale + zero``
* asymmetric, integer zero point: ``w = (q - zero_point) * scale``

with q in 0..15. Phones take 8 bits, symmetric: ``w = (q - 128) * scale`` with q in 1..255, which is int8 without its
lowest number. Scales and zeros are rounded to their stored dtype *before* codes are chosen, so the codes are the
best ones for the numbers that an engine will read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from models.errors import BadInput

BITS = 4
LEVELS = 2**BITS
MIDDLE = LEVELS // 2
# Int8, as phones read it: every code less the middle is in -LARGEST..LARGEST.
PHONE_BITS = 8
LARGEST = 127
ZeroKind = Literal["none", "float", "integer"]


@dataclass(frozen=True)
class Grid:
    """One linear's grid.

    Attributes:
        group_size: weights per group along K; divides K.
        zero: ``none`` (symmetric), ``float`` or ``integer``.
        dtype: stored dtype of scales and float zeros.
        bits: 4; or 8, symmetric only.
    """

    group_size: int
    zero: ZeroKind = "none"
    dtype: torch.dtype = torch.bfloat16
    bits: int = BITS

    def __post_init__(self) -> None:
        if self.bits != BITS and (self.bits != PHONE_BITS or self.zero != "none"):
            raise ValueError(f"no grid of {self.bits} bits with a zero of kind {self.zero}")

    @property
    def symmetric(self) -> bool:
        return self.zero == "none"

    @property
    def bits_per_weight(self) -> float:
        """Bits of codes, scales and zeros per weight (what the grid holds, without a file's padding)."""
        scale_bits = torch.finfo(self.dtype).bits
        zero_bits = {"none": 0, "float": scale_bits, "integer": self.bits}[self.zero]
        return self.bits + (scale_bits + zero_bits) / self.group_size


@dataclass
class Quantized:
    """A linear on its grid.

    Attributes:
        codes: uint8 [N, K], ``lowest`` to ``highest``.
        scales: [N, K / group_size] in the grid's dtype.
        zeros: like scales, for a float zero; else None.
        zero_points: uint8 [N, K / group_size], 0..15, for an integer zero point; else None.
        bits: of a code.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    zero_points: torch.Tensor | None = None
    bits: int = BITS

    def __post_init__(self) -> None:
        if self.zeros is not None and self.zero_points is not None:
            raise ValueError("a linear has a float zero or an integer zero point, not both")

    @property
    def middle(self) -> int:
        """The code that stands for zero where the grid has no zero point."""
        return 1 << (self.bits - 1)

    @property
    def lowest(self) -> int:
        """The smallest code: with 8 bits 1, so that codes less the middle are -127..127."""
        return 1 if self.bits == PHONE_BITS else 0

    @property
    def highest(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def grid(self) -> Grid:
        zero: ZeroKind = "float" if self.zeros is not None else "integer" if self.zero_points is not None else "none"
        return Grid(self.group_size, zero, self.scales.dtype, self.bits)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """The weight [N, K] that these numbers stand for, computed in fp32 and rounded once to ``dtype``."""
        middle: float | torch.Tensor = self.middle if self.zero_points is None else self.zero_points.float()[..., None]
        # In place: a tensor for each step takes three times as long.
        weight = grouped(self.codes, self.group_size).float().sub_(middle).mul_(self.scales.float()[..., None])
        if self.zeros is not None:
            weight += self.zeros.float()[..., None]
        return weight.reshape(self.codes.shape).to(dtype)

    def rows(self, start: int, stop: int) -> Quantized:
        """Output channels start..stop: every grid is per row, so rows of a fused linear quantise independently."""
        parts = (None if t is None else t[start:stop] for t in self._tensors())
        return Quantized(*parts, bits=self.bits)  # type: ignore[arg-type, misc]

    def _tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.codes, self.scales, self.zeros, self.zero_points


def concatenate(parts: list[Quantized]) -> Quantized:
    """Stacks linears of one input along N, as a fused projection holds them (q, k, v; gate, up)."""
    columns = zip(*(part._tensors() for part in parts), strict=True)
    joined = (None if c[0] is None else torch.cat(c) for c in columns)
    return Quantized(*joined, bits=parts[0].bits)  # type: ignore[arg-type, misc]


def grouped(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """[N, K] as [N, K / group_size, group_size]."""
    return weight.reshape(weight.shape[0], -1, group_size)


def check_finite(name: str, weight: torch.Tensor) -> None:
    """Raises BadInput naming the tensor, the first bad index and how many there are."""
    bad = ~torch.isfinite(weight)
    if bad.any():
        index = [int(i) for i in bad.nonzero()[0]]
        value = weight[tuple(index)].item()
        raise BadInput(f"{name}: expected finite weights, found {value} at {index} ({int(bad.sum())} in all)")


def stored_scales(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds positive scales to the stored dtype and at most to its largest number.

    A scale that would vanish there, or that fp32 does not hold as a normal number, becomes 1: its group is all zero
    to the grid.
    """
    rounded = scales.clamp(max=torch.finfo(dtype).max).to(dtype)
    usable = rounded.float() >= torch.finfo(torch.float32).smallest_normal
    return torch.where(usable, rounded, torch.ones_like(rounded))


def range_parameters(low: torch.Tensor, high: torch.Tensor, grid: Grid) -> Quantized:
    """Scales and zeros of the grid that spans low..high per group; codes are left empty.

    low, high: fp32 [N, groups]. Symmetric grids span 15 levels over twice the larger magnitude (max-abs / 7.5, as
    GPTQ does), with 8 bits 255 (max-abs / 127); an integer zero point needs zero inside the range.
    """
    empty = low.new_empty((low.shape[0], 0), dtype=torch.uint8)
    if grid.zero == "none":
        largest = torch.maximum(high.abs(), low.abs())
        reach = LARGEST if grid.bits == PHONE_BITS else (LEVELS - 1) / 2
        return Quantized(empty, stored_scales(largest / reach, grid.dtype), bits=grid.bits)
    if grid.zero == "integer":
        low, high = low.clamp(max=0), high.clamp(min=0)
    # Divided before the difference: high - low may overflow fp32.
    spread = high / (LEVELS - 1) - low / (LEVELS - 1)
    scales = stored_scales(spread, grid.dtype)
    if grid.zero == "integer":
        points = (-low / scales.float()).round().clamp(0, LEVELS - 1)
        # A group of zeros has no spread; the middle code stands for zero there as in the other grids.
        points = torch.where(high == low, torch.full_like(points, MIDDLE), points)
        return Quantized(empty, scales, zero_points=points.to(torch.uint8))
    # A constant group: the zero itself carries the value.
    zeros = torch.where(high == low, low, low + MIDDLE * scales.float())
    return Quantized(empty, scales, zeros=zeros.to(grid.dtype))


def encode(weight: torch.Tensor, parameters: Quantized, group_size: int) -> torch.Tensor:
    """The nearest codes, uint8 [N, K], of a weight [N, K] for given scales and zeros."""
    w = grouped(weight.float(), group_size)
    scales = parameters.scales.float()[..., None]
    if parameters.zeros is not None:
        w = w - parameters.zeros.float()[..., None]
    middle: float | torch.Tensor = parameters.middle
    if parameters.zero_points is not None:
        middle = parameters.zero_points.float()[..., None]
    codes = (torch.round(w / scales) + middle).clamp_(parameters.lowest, parameters.highest)
    return codes.to(torch.uint8).reshape(weight.shape)


def with_codes(weight: torch.Tensor, parameters: Quantized, group_size: int) -> Quantized:
    """The parameters with the weight's nearest codes."""
    return replace(parameters, codes=encode(weight, parameters, group_size))
