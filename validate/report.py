"""The report: ``report.json`` (schema 1) and the table at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from export.ledger import versions
from models.files import replace_file, to_json

SCHEMA = 1


@dataclass(frozen=True)
class ReferenceReport:
    """The reference's own figures and how text became tokens.

    Attributes:
        tokens: predictions scored.
        bos: the policy for special tokens.
    """

    source: str
    dtype: str
    perplexity: float
    perplexity_se: float
    windows: int
    sequence_length: int
    tokens: int
    text_sha256: str
    bos: str = "none: the text is tokenised whole without special tokens and cut into windows"

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def to_report(reference: ReferenceReport, targets: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """The whole report as JSON values; ``targets`` are `TargetReport.to_dict` entries."""
    return {
        "schema": SCHEMA,
        "reference": reference.to_dict(),
        "targets": list(targets),
        "versions": versions(),
        "seconds": round(seconds, 1),
    }


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Replaces ``report.json`` whole."""
    replace_file(path, to_json(report))


def print_table(report: Mapping[str, Any], console: Console) -> None:
    """The summary: a row a target, then everything that was kept, downgraded or not measured, then the gates."""
    reference = report["reference"]
    table = Table(title=f"{reference['source']}: {reference['tokens']} tokens in {reference['windows']} windows")
    columns = ("target", "format", "bits/weight", "perplexity", "ratio", "as the engine computes it", "KL", "top-1")
    for column in (*columns, "SNR dB", "greedy", "gates"):
        table.add_column(column, justify="left" if column in ("target", "format") else "right")
    table.add_row(
        "reference", reference["dtype"], "", _with_error(reference["perplexity"], reference["perplexity_se"], 3)
    )
    for target in report["targets"]:
        table.add_row(*_row(target))
    console.print(table)
    for target in report["targets"]:
        for line in _remarks(target):
            console.print(f"{target['name']}: {line}", highlight=False, soft_wrap=True)


def _with_error(value: float, error: float, digits: int) -> str:
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def _row(target: Mapping[str, Any]) -> list[str]:
    engine, gates = target["engine"], target["gates"]
    failed = sum(not gate["passed"] for gate in gates)
    return [
        target["name"],
        target["format"],
        f"{target['bits_per_weight']:.4g}",
        _with_error(target["perplexity"], target["perplexity_se"], 3),
        _with_error(target["perplexity_ratio"], target["perplexity_ratio_se"], 4),
        f"{engine['perplexity_ratio']:.4f}" if "perplexity_ratio" in engine else "not measured",
        f"{target['kl']:.4f}",
        f"{target['top1']:.3f}",
        f"{target['snr_db']:.1f}",
        f"{target['greedy']['identical']}/{target['greedy']['of']}",
        "none" if not gates else f"{failed} failed" if failed else "passed",
    ]


def _remarks(target: Mapping[str, Any]) -> list[str]:
    lines = [f"note: {note}" for note in target["notes"]]
    engine = target["engine"]
    if "skipped" in engine:
        lines.append(f"engine not measured: {engine['name']}: {engine['skipped']}")
    else:
        lines.append(f"engine: {engine['name']}, {engine['gap']:.2%} from the expanded weights' perplexity")
    by_reason: dict[str, int] = {}
    for reason in target["kept"].values():
        by_reason[reason] = by_reason.get(reason, 0) + 1
    lines += [f"kept: {count} tensors: {reason}" for reason, count in by_reason.items()]
    for gate in target["gates"]:
        if not gate["passed"]:
            found = "not measured" if gate["measured"] is None else f"{gate['measured']:.5g}"
            lines.append(f"gate failed: {gate['gate']}: expected {gate['bound']:g}, found {found}")
    return lines
