"""What the methods of `calibrate.composition` do to a single linear, one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from calibrate.grid import Grid, Quantized
from calibrate.search import error, round_to_nearest, search
from calibrate.statistics import Inputs

Choose = Callable[[torch.Tensor, Grid, Inputs | None], Quantized]
Refine = Callable[[torch.Tensor, Quantized, Inputs | None], Quantized]


def _moments(inputs: Inputs | None) -> torch.Tensor | None:
    return None if inputs is None else inputs.moments


# (weight [N, K], grid, inputs or None) -> Quantized
CHOOSE: Mapping[str, Choose] = {
    "rtn": lambda weight, grid, _: round_to_nearest(weight, grid),
    "search": lambda weight, grid, inputs: search(weight, grid, _moments(inputs)),
}
# (weight [N, K], quantized, inputs or None) -> Quantized
REFINE: Mapping[str, Refine] = {}


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


def choose(weight: torch.Tensor, grid: Grid, names: Sequence[str], inputs: Inputs | None) -> Chosen:
    """Quantises a linear [N, K] by those methods of a list that work on a single one.

    The result is never worse than round to nearest in the error that the inputs define.
    """
    (first,) = (name for name in names if name in CHOOSE)
    quantized = CHOOSE[first](weight, grid, inputs)
    for name in names:
        if name in REFINE:
            quantized = REFINE[name](weight, quantized, inputs)
    second = None if inputs is None else inputs.second
    found = error(weight, quantized, second)
    plain = round_to_nearest(weight, grid)
    bound = error(weight, plain, second)
    if found <= bound:
        return Chosen(quantized, found)
    return Chosen(plain, bound, f"{'+'.join(names)} came to an error of {found:.4g}, round to nearest to {bound:.4g}")
