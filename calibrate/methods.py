"""The methods that a target's ``method`` may name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from calibrate.grid import Grid, Quantized
from calibrate.search import round_to_nearest, search

Choose = Callable[[torch.Tensor, Grid, torch.Tensor | None], Quantized]


@dataclass(frozen=True)
class Method:
    """A way to choose codes and scales.

    Attributes:
        choose: (weight [N, K], grid, second moments [K] or None) -> Quantized.
        uses_moments: whether it gains from calibration.
    """

    choose: Choose
    uses_moments: bool


METHODS: dict[str, Method] = {
    "rtn": Method(round_to_nearest, uses_moments=False),
    "search": Method(search, uses_moments=True),
}
