"""Ranges of activations: what a static grid of a tensor must span, gathered over every step that a phone would run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from models.errors import BadInput


@dataclass(frozen=True)
class Range:
    """The smallest and largest value that a tensor took, in the tensor's unit."""

    low: float
    high: float

    def joined(self, other: Range) -> Range:
        """The range that spans both."""
        return Range(min(self.low, other.low), max(self.high, other.high))


@dataclass
class Ranges:
    """The ranges of a graph's tensors by name, over all steps that were seen."""

    by_name: dict[str, Range] = field(default_factory=dict)

    def add(self, name: str, low: float, high: float) -> None:
        """Takes a step's smallest and largest value. Raises BadInput when they are not finite."""
        if not (math.isfinite(low) and math.isfinite(high)):
            raise BadInput(f"activation {name}: expected finite values, found {low} to {high} on the calibration text")
        found = Range(low, high)
        known = self.by_name.get(name)
        self.by_name[name] = found if known is None else known.joined(found)

    def merge(self, other: Ranges) -> None:
        """Takes everything that another collection saw."""
        for name, found in other.by_name.items():
            self.add(name, found.low, found.high)

    def tie(self, groups: Iterable[Iterable[str]]) -> None:
        """Gives the tensors of each group one range that spans all of theirs; the same grid then holds all of them.

        Raises KeyError for a tensor that was never seen.
        """
        for group in groups:
            names = list(group)
            spanned = self.by_name[names[0]]
            for name in names[1:]:
                spanned = spanned.joined(self.by_name[name])
            self.by_name |= dict.fromkeys(names, spanned)

    def widened(self, factor: float) -> Ranges:
        """Every bound times ``factor``, where that is further from zero than the other: other texts go beyond."""
        spans = {
            name: Range(min(found.low, factor * found.low), max(found.high, factor * found.high))
            for name, found in self.by_name.items()
        }
        return Ranges(spans)

    def to_dict(self) -> dict[str, list[float]]:
        """As JSON values: [low, high] by name, names sorted."""
        return {name: [found.low, found.high] for name, found in sorted(self.by_name.items())}

    @staticmethod
    def from_dict(values: Mapping[str, Any], where: str) -> Ranges:
        """Reads what `to_dict` gave. Raises BadInput naming every range that is none."""
        ranges, problems = Ranges(), []
        for name, value in values.items():
            try:
                low, high = (float(bound) for bound in value)
            except (TypeError, ValueError):
                problems.append(f"{where}: {name}: expected [low, high], found {value!r}")
                continue
            if not (math.isfinite(low) and math.isfinite(high) and low <= high):
                problems.append(f"{where}: {name}: expected finite bounds in order, found {low} to {high}")
            ranges.by_name[name] = Range(low, high)
        if problems:
            raise BadInput(problems)
        return ranges
