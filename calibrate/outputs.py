"""Output channels that make up for each other's errors, as `calibrate.gptq` does with input channels.

Where the loss weighs a linear's output errors by O (`calibrate.fisher`), an error E of its weight costs
tr(O E H E^T). With O = R R^T, R upper triangular, row r of R^T E depends on the errors of the output channels up to r
alone: a block of channels is quantised to make up for those before it, in the quantised sense of Babai's nearest plane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from calibrate.grid import Quantized
from calibrate.hessian import factorise

# Blocks of a span's output channels, which are quantised one after another; the channels of one go without regard to
# each other. Twice as many cost twice the time and find a little more (docs/fidelity.md).
BLOCKS = 16
# Fewer channels than these are no block of their own: a step of the arithmetic costs the same for one as for eight.
SMALLEST = 8

Quantise = Callable[[torch.Tensor], Quantized]


def by_outputs(
    weight: torch.Tensor, outputs: Sequence[torch.Tensor], quantise: Quantise, block: int | None = None
) -> Quantized:
    """A weight quantised block by block of its output channels, the costly ones first.

    Args:
        weight: [N, K], any float dtype.
        outputs: fp32 [rows, rows] of consecutive spans of output channels, N rows in all.
        quantise: what quantises some output channels, [rows, K], for the error that the inputs define.
        block: output channels that are quantised together; by BLOCKS unless given.
    """
    parts, start = [], 0
    for moments in outputs:
        parts.append(_span(weight[start : start + len(moments)].float(), moments, quantise, block))
        start += len(moments)
    return stacked(parts)


def _span(weight: torch.Tensor, moments: torch.Tensor, quantise: Quantise, block: int | None) -> Quantized:
    factor = factorise(moments)
    block = block or max(SMALLEST, -(-len(weight) // BLOCKS))
    w = weight[factor.order]
    errors = torch.zeros_like(w)
    parts = []
    for start in range(0, len(w), block):
        rows = slice(start, start + block)
        target = w[rows] + factor.feedback[:start, rows].t() @ errors[:start]
        parts.append(quantise(target))
        errors[rows] = w[rows] - parts[-1].dequantize(torch.float32)
    return ordered(stacked(parts), torch.argsort(factor.order))


def stacked(parts: Sequence[Quantized]) -> Quantized:
    """Consecutive rows of one linear, put together."""

    def stack(field: str) -> torch.Tensor | None:
        found = [getattr(part, field) for part in parts]
        return None if found[0] is None else torch.cat(found)

    codes, scales = (torch.cat([getattr(part, field) for part in parts]) for field in ("codes", "scales"))
    return replace(parts[0], codes=codes, scales=scales, zeros=stack("zeros"), zero_points=stack("zero_points"))


def ordered(q: Quantized, order: torch.Tensor) -> Quantized:
    """The rows of a linear in another order."""
    zeros, points = (None if t is None else t[order] for t in (q.zeros, q.zero_points))
    return replace(q, codes=q.codes[order], scales=q.scales[order], zeros=zeros, zero_points=points)
