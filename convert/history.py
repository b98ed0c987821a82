"""`convert history`: what the runs of a pipeline found, one beside another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from convert.yaml_lines import suggestion
from models.errors import BadInput
from validate.baseline import Baseline, difference
from validate.entry import Entry
from validate.history import History
from validate.report import figure

SHOWN = ("perplexity_ratio", "kl", "top1", "bits_per_weight")


def open_history(path: Path) -> History:
    """The history of a pipeline.yaml, or a history file.

    Raises:
        BadInput: when there is none, or it is something else.
    """
    if path.suffix in (".yaml", ".yml"):
        from convert.config import load

        path = load(path).history_file
    if not path.exists():
        raise BadInput(f"{path}: no history there yet; `convert run` begins it")
    history = History(path)
    history.check()
    return history


def list_runs(history: History, targets: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each entry of the named targets, or of all, oldest first."""
    return [
        {
            "run": entry.run,
            "time": entry.time,
            "target": entry.target,
            "format": entry.format,
            **entry.figures,
            "passed": entry.passed,
            "accepted": entry.accepted,
            "source": entry.source,
            "model_sha256": entry.model_sha256,
            "text_sha256": entry.text_sha256,
            "windows_sha256": entry.windows_sha256,
            "artifact_sha256": entry.artifact_sha256,
            "versions": entry.versions,
        }
        for entry in _entries(history, targets)
    ]


def _entries(history: History, targets: Sequence[str]) -> list[Entry]:
    """Raises BadInput for a target that the history does not know."""
    entries = history.entries()
    known = list(dict.fromkeys(entry.target for entry in entries))
    unknown = [target for target in targets if target not in known]
    if unknown:
        raise BadInput(f"{history.path}: no runs of target {name}{suggestion(name, known)}" for name in unknown)
    return [entry for entry in entries if not targets or entry.target in targets]


def print_runs(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """The list as tables, one for each stretch of runs on one model and text."""
    for subject, stretch in groupby(rows, key=lambda row: (row["source"], row["model_sha256"], row["windows_sha256"])):
        source, model, windows = subject
        table = Table(title=f"{source}: model {model[:12]}, windows {windows[:12]}", title_justify="left")
        for column in ("run", "time", "target", "bits/weight", "perplexity", "ratio", "KL", "top-1", "gates"):
            table.add_column(column, justify="left" if column in ("run", "time", "target", "gates") else "right")
        for row in stretch:
            table.add_row(
                row["run"],
                row["time"],
                row["target"],
                figure(row["bits_per_weight"], 3),
                figure(row["perplexity"], 3),
                f"{figure(row['perplexity_ratio'], 4)} ± {figure(row['perplexity_ratio_se'], 4)}",
                figure(row["kl"], 4),
                figure(row["top1"], 3),
                ("held" if row["passed"] else "failed") + (", accepted" if row["accepted"] else ""),
            )
        console.print(table)


def find_run(history: History, given: str) -> str:
    """A run's id by its beginning. Raises BadInput when none has it, or several have."""
    runs = list(dict.fromkeys(entry.run for entry in history.entries()))
    found = [run for run in runs if run == given] or [run for run in runs if run.startswith(given)]
    if len(found) != 1:
        what = f"several runs begin so: {', '.join(found)}" if found else "no such run" + suggestion(given, runs[-10:])
        raise BadInput(f"{history.path}: {given}: {what}")
    return found[0]


def compare_runs(history: History, first: str, second: str, targets: Sequence[str]) -> dict[str, Any]:
    """What changed from the first run to the second, for each target that both have.

    Raises:
        BadInput: when no target of the two can be compared, with the reasons.
    """
    ids = find_run(history, first), find_run(history, second)
    entries = _entries(history, targets)
    a, b = ({entry.target: entry for entry in entries if entry.run == run} for run in ids)
    shared = [target for target in a if target in b]
    if not shared:
        raise BadInput(f"{history.path}: {ids[0]} and {ids[1]} have no target in common")
    found = {target: _compare(a[target], b[target]) for target in shared}
    if all("reason" in place["perplexity"] for place in found.values()):
        raise BadInput(
            f"{history.path}: {target}: {ids[0]} is not compared with {ids[1]}: {place['perplexity']['reason']}"
            for target, place in found.items()
        )
    return {"first": ids[0], "second": ids[1], "targets": found}


def _compare(a: Entry, b: Entry) -> dict[str, Any]:
    reasons = b.subject.differs(a.subject)
    place = Baseline(reason="; ".join(reasons)) if reasons else Baseline(difference(a, b.nll))
    versions = {name: [a.versions.get(name), b.versions.get(name)] for name in {**a.versions, **b.versions}}
    return {
        "perplexity": place.to_dict(),
        "figures": {name: [a.figures[name], b.figures[name]] for name in SHOWN},
        "same_bytes": a.artifact_sha256 == b.artifact_sha256,
        "versions": {name: pair for name, pair in versions.items() if pair[0] != pair[1]},
    }


def print_comparison(found: Mapping[str, Any], console: Console) -> None:
    """The comparison, a few lines a target."""
    lines = [f"from {found['first']} to {found['second']}:"]
    for target, place in found["targets"].items():
        perplexity = place["perplexity"]
        lines.append(f"{target}: {perplexity.get('text') or 'not compared: ' + perplexity['reason']}")
        lines += [f"  {name}: {figure(a, 4)} -> {figure(b, 4)}" for name, (a, b) in place["figures"].items()]
        lines.append(f"  the artifact's bytes are {'the same' if place['same_bytes'] else 'others'}")
        lines += [f"  {name}: {a} -> {b}" for name, (a, b) in place["versions"].items()]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def accept_run(history: History, given: str) -> str:
    """Notes that a run may be compared with; returns what to say."""
    run = find_run(history, given)
    history.accept(run, f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")
    return f"{run}: later runs may be compared with it"


def plot_trend(history: History, targets: Sequence[str], file: Path) -> None:
    """Draws the ratio to the reference over all runs on the newest run's model and text.

    Raises:
        BadInput: when there are no runs to draw, or the file's name is not a PNG's.
    """
    from validate.pictures import save_png, trend

    if file.suffix != ".png":
        raise BadInput(f"--plot {file}: expected a name that ends with .png")
    entries = _entries(history, targets)
    if not entries:
        raise BadInput(f"{history.path}: no runs to draw")
    save_png(trend([entry for entry in entries if not entries[-1].subject.differs(entry.subject)]), file)
