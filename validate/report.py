"""The report: ``report.json`` and the table at the end of a run."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from export.ledger import versions
from export.opened import AnyArtifact
from validate.divergence import summary
from validate.engines.compare import worst_gap
from validate.entry import SCHEMA, digest
from validate.gates import GateResult, evaluate, failures
from validate.measure import Measurement, Settings

# Outcomes of the ledger that a reader of the report must see.
UNQUANTIZED = ("kept", "tied", "dropped")


@dataclass(frozen=True)
class Run:
    """Which run a report is of.

    Attributes:
        id: names it in the history.
        time: UTC, ISO 8601.
        files: SHA-256 of the reference's files, by name.
        warnings: what makes the figures worth less than they look.
    """

    id: str
    time: str
    files: Mapping[str, str]
    warnings: tuple[str, ...] = ()

    @staticmethod
    def begin(files: Mapping[str, str], warnings: Sequence[str] = ()) -> Run:
        """A new run, now. Its id is no number in any yaml."""
        now = datetime.now(UTC)
        return Run(f"{now:%Y-%m-%d}-{secrets.token_hex(4)}", f"{now:%Y-%m-%dT%H:%M:%SZ}", files, tuple(warnings))


def to_report(
    source: str, settings: Settings, targets: Sequence[tuple[AnyArtifact, Measurement]], seconds: float, run: Run
) -> dict[str, Any]:
    """The whole report as JSON values. A figure that is not finite (a broken build's) is null there.

    Args:
        source: the reference, as the user names it.
        targets: at least one.
    """
    first = targets[0][1]
    scores = first.scores
    reference = {
        "source": source,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "perplexity": scores.reference_perplexity,
        "perplexity_se": scores.reference_perplexity_se,
        "windows": scores.windows,
        "sequence_length": settings.windows.ids.shape[1],
        "tokens": scores.tokens,
        "text_sha256": settings.windows.text_sha256,
        "bos": settings.windows.bos,
        "windows_sha256": settings.windows.digest(),
        "model_sha256": digest(run.files),
        "files": dict(run.files),
    }
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "run": {"id": run.id, "time": run.time},
        "reference": plain(reference),
        "targets": [target_report(artifact, measured, settings.gates) for artifact, measured in targets],
        "warnings": list(run.warnings),
        "nll": {artifact.ledger.target["name"]: plain(measured.scores.nll) for artifact, measured in targets},
        "continuations": {
            "prompts": first.texts.get("prompts", []),
            "reference": first.texts.get("reference", []),
            **{"targets": {a.ledger.target["name"]: measured.texts.get("artifact", []) for a, measured in targets}},
        },
        "versions": versions(),
        "seconds": round(seconds, 1),
    }
    return report


def target_report(artifact: AnyArtifact, measured: Measurement, gates: Mapping[str, float | None]) -> dict[str, Any]:
    """One target's entry, judged by ``gates`` (see README: how to read the report)."""
    scores = asdict(measured.scores)
    judged = {
        "perplexity_increase": measured.scores.perplexity_ratio - 1,
        "kl": measured.scores.kl,
        "top1": measured.scores.top1,
        "greedy_identical": measured.greedy["identical"],
        "engine_gap": _engine_gap(measured),
        "snr_db": measured.scores.snr_db,
        **_engine_figures(measured),
        "bits_per_weight": artifact.bits_per_weight,
    }
    entry: dict[str, Any] = plain(
        {
            "name": artifact.ledger.target["name"],
            "format": artifact.format,
            "bits_per_weight": artifact.bits_per_weight,
            "file_bytes": sum(file.stat().st_size for file in artifact.weight_files),
            **{k: v for k, v in scores.items() if not k.startswith("reference_") and k != "nll"},
            "artifact_sha256": digest(artifact.ledger.files),
            "greedy": measured.greedy,
            "engine": measured.engine,
            "engines": measured.engines,
            "long_context": measured.long,
            "gates": [asdict(gate) for gate in evaluate(gates, judged)],
            "notes": artifact.ledger.notes,
            "kept": {
                row.tensor: row.reason for row in artifact.ledger.tensors if row.outcome in ("kept", "tied", "dropped")
            },
        }
    )
    return {**entry, "passed": not failures(entry)}


def _engine_figures(measured: Measurement) -> dict[str, float]:
    """What gates judge of an engine that rounds activations, as a phone does: the expanded weights alone flatter it."""
    engine = measured.engine
    if "snr_db" not in engine:
        return {}
    scores = measured.scores
    return {
        "perplexity_increase": _worse(max, scores.perplexity_ratio, engine["perplexity_ratio"]) - 1,
        "kl": _worse(max, scores.kl, engine["kl"]),
        "top1": _worse(min, scores.top1, engine["top1"]),
        "snr_db": _worse(min, scores.snr_db, engine["snr_db"]),
        "greedy_identical": min(measured.greedy["identical"], engine["greedy"]["identical"]),
    }


def _worse(which: Callable[[float, float], float], first: float | None, second: float | None) -> float:
    """Of two figures; a figure that is not a number is worse than any, and JSON has none for it."""
    known = [math.nan if value is None else value for value in (first, second)]
    return math.nan if any(math.isnan(value) for value in known) else which(*known)


def _engine_gap(measured: Measurement) -> float | None:
    """Of the engine's arithmetic and of every engine that ran; where none ran, unmeasured arithmetic is no gap."""
    gaps: list[float | None] = [engine["gap"] for engine in measured.engines]
    if not measured.engines or "skipped" not in measured.engine:
        gaps.append(measured.engine.get("gap"))
    return worst_gap(gaps)


def plain(value: Any) -> Any:
    """The value as JSON knows it: tuples as lists, and None for a number that is not finite."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
    for peer in report.get("positioning", ()):
        table.add_row(*_peer(peer))
    console.print(table)
    lines = [f"{target['name']}: {line}" for target in report["targets"] for line in _remarks(target)]
    lines += [
        f"{row['name']}: not measured: {row['skipped']}" for row in report.get("positioning", ()) if "skipped" in row
    ]
    for line in [*lines, *(f"warning: {warning}" for warning in report["warnings"])]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def figure(value: float | None, digits: int) -> str:
    """For people, also where there is no number."""
    return "not finite" if value is None else f"{value:.{digits}f}"


def _with_error(value: float | None, error: float | None, digits: int) -> str:
    return f"{figure(value, digits)} ± {figure(error, digits)}"


def _row(target: Mapping[str, Any]) -> list[str]:
    engine, gates = target["engine"], target["gates"]
    failed = len(failures(target))
    ratio = engine_ratio(engine)
    computed = _with_error(*ratio, 4) if ratio else "not measured"
    judged = f"{failed} failed" if failed else "passed" if gates else "none"
    return _figures(target, target["name"], target["format"], computed, judged)


def _figures(row: Mapping[str, Any], name: str, format: str, computed: str, judged: str) -> list[str]:
    return [
        name,
        format,
        f"{row['bits_per_weight']:.4g}",
        _with_error(row["perplexity"], row["perplexity_se"], 3),
        _with_error(row["perplexity_ratio"], row["perplexity_ratio_se"], 4),
        computed,
        figure(row["kl"], 4),
        figure(row["top1"], 3),
        figure(row["snr_db"], 1),
        f"{row['greedy']['identical']}/{row['greedy']['of']}",
        judged,
    ]


def _peer(row: Mapping[str, Any]) -> list[str]:
    if "skipped" in row:
        return [row["name"], "not measured"]
    return _figures(row, row["name"], "", "", "")


def _remarks(target: Mapping[str, Any]) -> list[str]:
    lines = [f"note: {note}" for note in target["notes"]]
    engine = target["engine"]
    if "skipped" in engine:
        lines.append(f"engine not measured: {engine['name']}: {engine['skipped']}")
    else:
        lines.append(
            f"engine: {engine['name']}, {gap_text(engine)} from the expanded weights' perplexity, on"
            f" {engine['tokens']} of the tokens"
        )
        if "snr_db" in engine:
            greedy = engine["greedy"]
            figures = f"SNR {figure(engine['snr_db'], 1)} dB, top-1 {figure(engine['top1'], 3)}"
            figures += f", KL {figure(engine['kl'], 4)} against {engine['against']}"
            lines.append(f"engine: {figures}; greedy {greedy['identical']}/{greedy['of']}")
    lines += [_ran(engine) for engine in target.get("engines", ())]
    if target["greedy"]["divergences"]:
        lines.append(f"greedy: {summary(target['greedy']['divergences'])}")
    if target["long_context"] is not None:
        lines.append(_long(target["long_context"]))
    by_reason: dict[str, int] = {}
    for reason in target["kept"].values():
        by_reason[reason] = by_reason.get(reason, 0) + 1
    lines += [f"kept: {count} tensors: {reason}" for reason, count in by_reason.items()]
    for gate in target["gates"]:
        if not gate["passed"]:
            lines.append(f"gate failed: {GateResult(**gate).text}")
        elif gate["note"]:
            lines.append(f"gate held: {GateResult(**gate).text}")
    return lines


def _long(found: Mapping[str, Any]) -> str:
    quarters = ", ".join(figure(ratio, 4) for ratio in found["quarters"])
    needle = found["needle"]
    return (
        f"{found['length']} tokens beyond a sliding window of {found['sliding_window']}: ratio by quarter {quarters};"
        f" a needle {needle['distance']} tokens back is worth {figure(needle['gain'], 3)} nats a token,"
        f" {figure(needle['reference_gain'], 3)} to the reference"
    )


def engine_ratio(engine: Mapping[str, Any]) -> tuple[float | None, float | None] | None:
    """The perplexity ratio to show beside the expanded weights', with its error: on all tokens, where that is known."""
    key = "ratio_on_all" if "ratio_on_all" in engine else "perplexity_ratio"
    return (engine[key], engine[f"{key}_se"]) if key in engine else None


def gap_text(engine: Mapping[str, Any]) -> str:
    """An engine's gap with its standard error, for people."""
    if engine["gap"] is None:
        return "not finite"
    return f"{engine['gap']:.2%} ± {100 * engine['gap_se']:.2f}"


def _ran(engine: Mapping[str, Any]) -> str:
    """One line for an engine that ran the artifact, or did not."""
    if "failed" in engine:
        return f"did not run in {engine['name']} {engine['version']}: {engine['failed']}"
    top1 = "" if engine["top1"] is None else f", top-1 {engine['top1']:.3f} of {engine['top1_of']} clear positions"
    greedy = engine.get("greedy")
    same = "" if greedy is None else f", greedy {greedy['identical']}/{greedy['of']}"
    if "cpu_snr_db" in engine:
        same += f", SNR {figure(engine['snr_db'], 1)} dB where the CPU has {figure(engine['cpu_snr_db'], 1)}"
    return (
        f"ran in {engine['name']} {engine['version']}: perplexity {figure(engine['perplexity'], 3)},"
        f" {gap_text(engine)} from {engine['against']}{top1}, log-probabilities differ by"
        f" {figure(engine['logprob_gap'], 4)}{same}"
    )
