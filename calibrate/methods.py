"""What the methods of `calibrate.composition` do to a single linear, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from calibrate.gptq import gptq
from calibrate.grid import Grid, Quantized
from calibrate.head import Part
from calibrate.outputs import by_outputs, ordered, split, stacked
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
    """Quantises a single linear, as `choose_together` does several."""
    (chosen,) = choose_together([weight], grid, names, inputs, outputs, parts)
    return chosen


def choose_together(
    weights: Sequence[torch.Tensor],
    grid: Grid,
    names: Sequence[str],
    inputs: Inputs | None,
    outputs: Sequence[torch.Tensor] = (),
    parts: Iterable[Part] | None = None,
) -> list[Chosen]:
    """Quantises linears [N, K] that read the same inputs by those methods of a list that work on single linears.

    None of them is worse than round to nearest in the error that the inputs define; None makes all channels alike.

    Args:
        outputs: what errors of their outputs cost, one linear behind the other, see `calibrate.outputs`; empty weighs
            all alike.
        parts: output channels that see the inputs in ways of their own, all of them; None where none do.
    """
    known = inputs or Inputs.alike(weights[0].shape[1])
    targets = [known.target(weight) for weight in weights]
    weight = torch.cat(targets) if len(targets) > 1 else targets[0]
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
        apart = [(part.channels, quantise(weight[part.channels], part.inputs)) for part in parts]
        order = torch.argsort(torch.cat([channels for channels, _ in apart]))
        quantized = ordered(stacked([q for _, q in apart]), order)
    else:
        quantized = quantise(weight)
    each = split(quantized, [len(target) for target in targets])
    return [
        _never_worse(original, target, found, grid, names, known)
        for original, target, found in zip(weights, targets, each, strict=True)
    ]


def _never_worse(
    weight: torch.Tensor, target: torch.Tensor, found: Quantized, grid: Grid, names: Sequence[str], known: Inputs
) -> Chosen:
    plain = round_to_nearest(weight, grid)
    lost, bound = (error(target, quantized, known.second) for quantized in (found, plain))
    if lost <= bound:
        return Chosen(found, lost)
    return Chosen(plain, bound, f"{'+'.join(names)} came to an error of {lost:.4g}, round to nearest to {bound:.4g}")
