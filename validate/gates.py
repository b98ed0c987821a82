"""Gates: bounds that an artifact must hold, each with what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Gate -> (path to the measured value in a target's report, whether the bound is a maximum).
RULES: dict[str, tuple[str, bool]] = {
    "max_perplexity_increase": ("perplexity_increase", True),
    "max_kl": ("kl", True),
    "min_top1": ("top1", False),
    "min_greedy_identical": ("greedy_identical", False),
    "max_engine_gap": ("engine_gap", True),
    "min_snr_db": ("snr_db", False),
    "max_bits_per_weight": ("bits_per_weight", True),
}


@dataclass(frozen=True)
class GateResult:
    """One gate's outcome; ``measured`` is None when there is no finite number to judge, which fails."""

    gate: str
    bound: float
    measured: float | None
    passed: bool

    @property
    def text(self) -> str:
        """For people."""
        found = "not measured" if self.measured is None else f"{self.measured:.5g}"
        return f"{self.gate}: expected {self.bound:g}, found {found}"


def evaluate(gates: Mapping[str, float | None], measured: Mapping[str, Any]) -> list[GateResult]:
    """Judges the gates that have a bound. Raises KeyError for a gate that is not in RULES."""
    results = []
    for gate, bound in gates.items():
        if bound is None:
            continue
        name, is_maximum = RULES[gate]
        value = measured.get(name)
        if value is not None and not math.isfinite(value):
            value = None
        passed = value is not None and (value <= bound if is_maximum else value >= bound)
        results.append(GateResult(gate, bound, value, passed))
    return results
