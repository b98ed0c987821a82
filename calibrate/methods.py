"""What the methods of `calibrate.composition` do to a single linear, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from calibrate.gptq import gptq
from calibrate.grid import Grid, Quantized
from calibrate.head import Part
from calibrate.outputs import by_outputs, ordered, stacked
from calibrate.refine import SWEEPS, refine
from calibrate.search import error, round_to_nearest, search
from calibrate.statistics import Inputs

Choose = Callable[[torch.Tensor, Grid, Inputs], Quantized]
Refine = Callable[[torch.Tensor, Quantized, Inputs, int], Quantized]


# (weight [N, K], grid, inputs) -> Quantized
CHOOSE: Mapping[str, Choose] = {
    "rtn": lambda weight, grid, _: round_to_nearest(weight, grid),
    "search": lambda weight, grid, inputs: search(weight, grid, inputs.moments),
    "gptq": lambda weight, grid, inputs: gptq(weight, grid, inputs.factor),
}
# (weight [N, K], quantized, inputs, sweeps) -> Quantized
REFINE: Mapping[str, Refine] = {
    "refine": lambda weight, quantized, inputs, sweeps: refine(weight, quantized, inputs.full, sweeps),
}
# Sweeps of a refinement within a block of output channels, where there are many blocks: more find next to nothing.
BLOCK_SWEEPS = 2


@dataclass(frozen=True)
class Chosen:
    """One linear, quantised.

    Attributes:
        quantized: codes, scales and zeros.
        error: relative output error, see `calibrate.search.error`.
        fallback: why it was rounded to nearest instead of by its methods; empty when it was not.
    """

    quantized: Quantized
    error: float
    fallback: str = ""


def choose(
    weight: torch.Tensor,
    grid: Grid,
    names: Sequence[str],
    inputs: Inputs | None,
    outputs: Sequence[torch.Tensor] = (),
    parts: Iterable[Part] | None = None,
) -> Chosen:
    """Quantises a linear [N, K] by those methods of a list that work on a single one.

    The result is never worse than round to nearest in the error that the inputs define; None makes all channels alike.

    Args:
        outputs: what errors of the outputs cost, see `calibrate.outputs`; empty weighs all alike.
        parts: output channels that see the inputs in ways of their own, all of them; None where none do.
    """
    known = inputs or Inputs.alike(weight.shape[1])
    plain = round_to_nearest(weight, grid)
    weight = known.target(weight)
    (first,) = (name for name in names if name in CHOOSE)

    def quantise(rows: torch.Tensor, seen: Inputs = known) -> Quantized:
        found = CHOOSE[first](rows, grid, seen)
        for name in names:
            if name in REFINE:
                found = REFINE[name](rows, found, seen, BLOCK_SWEEPS if outputs else SWEEPS)
        return found

    if outputs:
        quantized = by_outputs(weight, outputs, quantise)
    elif parts is not None:
        found = [(part.channels, quantise(weight[part.channels], part.inputs)) for part in parts]
        order = torch.argsort(torch.cat([channels for channels, _ in found]))
        quantized = ordered(stacked([q for _, q in found]), order)
    else:
        quantized = quantise(weight)
    lost = error(weight, quantized, known.second)
    bound = error(weight, plain, known.second)
    if lost <= bound:
        return Chosen(quantized, lost)
    return Chosen(plain, bound, f"{'+'.join(names)} came to an error of {lost:.4g}, round to nearest to {bound:.4g}")
