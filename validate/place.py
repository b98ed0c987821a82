"""A report's place in the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from validate.baseline import NAMES, find_baseline
from validate.entry import Entry, entries_of
from validate.gates import NO_WORSE_THAN, failures, no_worse_than


def compare_with_history(report: dict[str, Any], earlier: Sequence[Entry], wanted: str | None) -> dict[str, Any]:
    """The report with each target's place in the history, and with the gate `no_worse_than` judged.

    Args:
        wanted: what the gate names, if there is one.
    """
    places: dict[str, Any] = {}
    for entry in entries_of(report):
        baselines = {
            name: find_baseline(name, entry.target, entry.subject, entry.nll, earlier)
            for name in (*NAMES, *([wanted] if wanted else []))
        }
        places[entry.target] = {name: baselines[name].to_dict() for name in NAMES}
        target = next(target for target in report["targets"] if target["name"] == entry.target)
        for gate in target["gates"]:
            if gate["gate"] == NO_WORSE_THAN:
                gate.update(asdict(no_worse_than(str(wanted), baselines[str(wanted)])))
        target["passed"] = not failures(target)
    return {**report, "history": places}


def lines(report: Mapping[str, Any]) -> list[str]:
    """Each target's place beside the last run and the best, for people."""
    return [
        f"{target}: beside the {name} run: {place.get('text') or place['reason']}"
        for target, places in report["history"].items()
        for name, place in places.items()
    ]
