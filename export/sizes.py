"""Sizes of planned linears, whatever their format."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from calibrate.grid import Grid
from models.family import Linear


def weights_of(linears: Sequence[Linear]) -> int:
    """How many numbers linears have."""
    return sum(linear.weights for linear in linears)


def bits_per_weight(linears: Sequence[Linear], grid: Callable[[int], Grid]) -> float:
    """Of the grids (codes, scales, zeros), over all linears.

    Args:
        grid: of a linear, by its columns.
    """
    bits = sum(grid(linear.columns).bits_per_weight * linear.weights for linear in linears)
    return bits / max(1, weights_of(linears))
