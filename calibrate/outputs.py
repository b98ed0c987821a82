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
from calibrate.hessian import Factor, factorise

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
        block: output channels of a span that are quantised together; by BLOCKS unless given.
    """
    parts = weight.split([len(moments) for moments in outputs])
    spans = [_Span(part.float(), factorise(moments), block) for part, moments in zip(parts, outputs, strict=True)]
    # Each span's blocks follow one another, and those of different spans go together: few large steps are faster.
    while going := [span for span in spans if span.left]:
        targets = [span.target() for span in going]
        found = quantise(torch.cat(targets))
        for span, part in zip(going, split(found, [len(target) for target in targets]), strict=True):
            span.take(part)
    return stacked([span.quantized() for span in spans])


class _Span:
    """Output channels on their way: the first ``done`` of them, in their order, are quantised."""

    def __init__(self, weight: torch.Tensor, factor: Factor, block: int | None) -> None:
        self.factor, self.weight = factor, weight[factor.order]
        self.block = block or max(SMALLEST, -(-len(weight) // BLOCKS))
        self.errors = torch.zeros_like(self.weight)
        self.parts: list[Quantized] = []
        self.done = 0

    @property
    def left(self) -> bool:
        return self.done < len(self.weight)

    @property
    def _next(self) -> slice:
        return slice(self.done, min(self.done + self.block, len(self.weight)))

    def target(self) -> torch.Tensor:
        """What the next block should be, to make up for the errors of those before it."""
        return self.weight[self._next] + self.factor.feedback[: self.done, self._next].t() @ self.errors[: self.done]

    def take(self, part: Quantized) -> None:
        """The next block, quantised."""
        self.errors[self._next] = self.weight[self._next] - part.dequantize(torch.float32)
        self.done = self._next.stop
        self.parts.append(part)

    def quantized(self) -> Quantized:
        return ordered(stacked(self.parts), torch.argsort(self.factor.order))


def stacked(parts: Sequence[Quantized]) -> Quantized:
    """Consecutive rows of one linear, put together."""

    def stack(field: str) -> torch.Tensor | None:
        found = [getattr(part, field) for part in parts]
        return None if found[0] is None else torch.cat(found)

    codes, scales = (torch.cat([getattr(part, field) for part in parts]) for field in ("codes", "scales"))
    return replace(parts[0], codes=codes, scales=scales, zeros=stack("zeros"), zero_points=stack("zero_points"))


def split(q: Quantized, sizes: Sequence[int]) -> list[Quantized]:
    """The rows of a linear in consecutive parts."""
    return [ordered(q, rows) for rows in torch.arange(len(q.codes)).split(list(sizes))]


def ordered(q: Quantized, order: torch.Tensor) -> Quantized:
    """Rows of a linear, by their numbers."""
    zeros, points = (None if t is None else t[order] for t in (q.zeros, q.zero_points))
    return replace(q, codes=q.codes[order], scales=q.scales[order], zeros=zeros, zero_points=points)
