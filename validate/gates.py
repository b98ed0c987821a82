"""Gates: bounds that an artifact must hold, each with what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from validate.baseline import Baseline

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
NO_WORSE_THAN = "no_worse_than"


@dataclass(frozen=True)
class GateResult:
    """One gate's outcome.

    Attributes:
        bound: None when there is nothing to take it from, which fails.
        measured: None when there is no finite number to judge, which fails.
        note: what else a reader must know to understand the outcome.
    """

    gate: str
    bound: float | None
    measured: float | None
    passed: bool
    note: str = ""

    @property
    def text(self) -> str:
        """For people."""
        if self.bound is None:
            return f"{self.gate}: not evaluated: {self.note}"
        found = "not measured" if self.measured is None else f"{self.measured:.5g}"
        return f"{self.gate}: expected {self.bound:.5g}, found {found}" + (f" ({self.note})" if self.note else "")


def evaluate(
    gates: Mapping[str, Any], measured: Mapping[str, Any], baseline: Baseline | None = None
) -> list[GateResult]:
    """Judges the gates that have a bound.

    Args:
        measured: figures by the names that RULES gives them.
        baseline: the earlier run that `no_worse_than` names, as far as it was found.

    Raises:
        KeyError: for a gate that is neither in RULES nor `no_worse_than`.
    """
    results = []
    for gate, bound in gates.items():
        if bound is None:
            continue
        if gate == NO_WORSE_THAN:
            results.append(no_worse_than(bound, baseline))
            continue
        name, is_maximum = RULES[gate]
        value = _finite(measured.get(name))
        passed = value is not None and (value <= bound if is_maximum else value >= bound)
        results.append(GateResult(gate, bound, value, passed))
    return results


def no_worse_than(wanted: str, baseline: Baseline | None) -> GateResult:
    """Perplexity above an earlier run's, relative; the bound is what their paired noise may explain."""
    if baseline is None or baseline.difference is None:
        reason = "no history was at hand" if baseline is None else baseline.reason
        return GateResult(NO_WORSE_THAN, None, None, False, f"{wanted}: {reason}")
    increase, noise = _finite(baseline.difference.increase), _finite(baseline.difference.noise)
    passed = increase is not None and noise is not None and increase <= noise
    note = f"{wanted}: {baseline.difference.text}"
    return GateResult(NO_WORSE_THAN, noise, increase, passed, note)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def failures(target: Mapping[str, Any]) -> list[str]:
    """Why a target of a report did not pass: gates that did not hold, and engines that did not run it."""
    lines = [GateResult(**gate).text for gate in target["gates"] if not gate["passed"]]
    for engine in target.get("engines", ()):
        if "failed" in engine:
            lines.append(f"engine {engine['name']}: {engine['failed']}")
    return lines
