"""``report.html``: a report as one page that needs nothing else, neither files nor a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from export.ledger import Ledger
from export.opened import AnyArtifact
from validate.entry import Entry, entries_of
from validate.gates import GateResult, failures
from validate.pictures import Point, layer_errors, pareto, to_svg, trend
from validate.report import engine_ratio, gap_text

TEMPLATES = Path(__file__).with_name("templates")
# What a row of another program's build may lack.
OTHERS = (
    *("name", "format", "skipped", "bits_per_weight", "file_bytes", "perplexity", "perplexity_se", "perplexity_ratio"),
    *("perplexity_ratio_se", "kl", "top1", "snr_db", "greedy"),
)
# More would make a line of dots.
TREND_RUNS = 60


def to_page(report: Mapping[str, Any], artifacts: Sequence[AnyArtifact], earlier: Sequence[Entry] = ()) -> str:
    """The page.

    Args:
        artifacts: of the report's targets, for their ledgers.
        earlier: the history before this run.
    """
    ledgers = {str(artifact.ledger.target["name"]): artifact.ledger for artifact in artifacts}
    targets = [_target(target, report) for target in report["targets"]]
    return _template().render(
        report=report,
        reference=report["reference"],
        positioning=[{**dict.fromkeys(OTHERS), **row} for row in report.get("positioning", [])],
        targets=targets,
        failed=[f"{target['name']}: {line}" for target in report["targets"] for line in failures(target)],
        pictures=[{"title": title, "svg": Markup(svg)} for title, svg in _pictures(report, ledgers, earlier)],
        rows=[row for name, ledger in ledgers.items() for row in _ledger_rows(name, ledger)],
        ledgers=ledgers,
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "figure": _figure,
        "bytes": _bytes,
        "visible": _visible,
        "gap": gap_text,
        "engine_ratio": engine_ratio,
    }
    return environment.get_template("report.html.j2")


def _figure(value: float | None, digits: int = 4) -> str:
    return "not finite" if value is None else f"{value:.{digits}f}"


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _visible(piece: str) -> str:
    """A token whose mark can be seen: line breaks have a sign of their own."""
    return piece.replace("\n", "\N{RETURN SYMBOL}\n") or "\N{OPEN BOX}"


def _target(target: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    """A target of the report with what the page shows beside it."""
    past = report.get("history", {}).get(target["name"], {})
    return {
        **target,
        "failed": failures(target),
        "gates": [{**gate, "text": GateResult(**gate).text} for gate in target["gates"]],
        "prompts": list(_continuations(target, report["continuations"])),
        "past": {name: place.get("text") or place["reason"] for name, place in past.items()},
    }


def _continuations(target: Mapping[str, Any], texts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Each prompt with both continuations, token by token, and what is known of their parting."""
    parted = {divergence["prompt"]: divergence for divergence in target["greedy"]["divergences"]}
    ours = texts["targets"].get(target["name"], [])
    for index, (prompt, reference, own) in enumerate(zip(texts["prompts"], texts["reference"], ours, strict=True)):
        divergence = parted.get(index)
        step, margin, kind = (None if divergence is None else divergence.get(key) for key in ("step", "margin", "kind"))
        yield {"prompt": prompt, "reference": reference, "own": own, "step": step, "margin": margin, "kind": kind}


def _pictures(
    report: Mapping[str, Any], ledgers: Mapping[str, Ledger], earlier: Sequence[Entry]
) -> Iterator[tuple[str, str]]:
    points = list(_points(report))
    if points:
        title = "Bits per weight against perplexity"
        yield title, to_svg(pareto(points), title)
    if any(row.linears for ledger in ledgers.values() for row in ledger.tensors):
        title = "Error of each linear by layer"
        yield title, to_svg(layer_errors(ledgers), title)
    entries = entries_of(report)
    same = [entry for entry in earlier if not entries[0].subject.differs(entry.subject)]
    runs = list(dict.fromkeys(entry.run for entry in same))[-TREND_RUNS:]
    if runs:
        title = "Trend over the runs on this model and text"
        yield title, to_svg(trend([entry for entry in same if entry.run in runs] + entries), title)


def _points(report: Mapping[str, Any]) -> Iterator[Point]:
    for row, ours in [*((t, True) for t in report["targets"]), *((p, False) for p in report.get("positioning", []))]:
        bits, ratio, se = (row.get(key) for key in ("bits_per_weight", "perplexity_ratio", "perplexity_ratio_se"))
        if None not in (bits, ratio, se):
            yield Point(row["name"], bits, ratio, se, ours)


def _ledger_rows(name: str, ledger: Ledger) -> Iterator[dict[str, Any]]:
    """A row for each quantised linear, and one for each tensor that was not quantised; where it is stored only if that
    is under another name."""
    for row in ledger.tensors:
        common = {"target": name, "tensor": row.tensor, "outcome": row.outcome, "reason": row.reason}
        for linear in row.linears:
            yield {**common, **asdict(linear), "stored": linear.module if linear.module != linear.linear else ""}
        if not row.linears:
            nothing = {"linear": "", "method": (), "group_size": "", "zero": "", "error": None}
            yield {**common, **nothing, "stored": ", ".join(name for name in row.stored_as if name != row.tensor)}
