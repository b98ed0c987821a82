"""One target of one run, as the history keeps it and as a report holds it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.errors import BadInput

# Of a report; see README. Schema 1 had no runs, losses of windows, warnings or engines that failed.
SCHEMA = 2
FIGURES = ("perplexity", "perplexity_se", "perplexity_ratio", "perplexity_ratio_se", "kl", "top1", "top5_overlap")
MORE_FIGURES = ("snr_db", "max_logit_difference", "bits_per_weight", "file_bytes", "tokens", "windows")


@dataclass(frozen=True)
class Subject:
    """What losses are of; those of another subject do not compare. The attributes are an entry's."""

    model_sha256: str
    text_sha256: str
    windows_sha256: str
    dtype: str

    def differs(self, other: Subject) -> list[str]:
        """Why losses of the other cannot be compared with these; empty when they can."""
        pairs = [
            ("another model", self.model_sha256, other.model_sha256),
            ("another text", self.text_sha256, other.text_sha256),
            ("other windows of the text", self.windows_sha256, other.windows_sha256),
            ("another compute dtype", self.dtype, other.dtype),
        ]
        if self.text_sha256 != other.text_sha256:
            # Another text has other windows.
            del pairs[2]
        return [f"it is of {what} ({b[:12]}, this one {a[:12]})" for what, a, b in pairs if a != b]


@dataclass(frozen=True)
class Entry:
    """What a run found of one target.

    Attributes:
        run: the run's id; all of its targets share it.
        time: UTC, ISO 8601.
        source: the reference as the user named it.
        model_sha256: over the hashes of the reference's files; empty when it is not known.
        text_sha256, windows_sha256: of the evaluation text, and of the token windows that were cut from it.
        dtype: compute dtype.
        artifact_sha256: over the hashes of the artifact's files.
        versions: of the packages that decide the numbers.
        figures: the report's figures; those that are not finite are None.
        nll: mean negative log-likelihood of each window, in nats; NaN where it was not finite.
        reference_perplexity: of the unquantised model.
        gates: as in the report.
        passed: whether the gates held and every engine ran.
        accepted: whether somebody has said since that later runs may be compared with it all the same.
    """

    run: str
    time: str
    target: str
    format: str
    source: str
    model_sha256: str
    text_sha256: str
    windows_sha256: str
    dtype: str
    artifact_sha256: str
    versions: dict[str, str]
    figures: dict[str, float | None]
    nll: tuple[float, ...]
    reference_perplexity: float | None
    gates: list[dict[str, Any]]
    passed: bool
    accepted: bool = False

    @property
    def measures_others(self) -> bool:
        """Whether `last` and `best` may mean this run: it held its gates, or is accepted, or failed only for want of
        an earlier run to compare with, as every first one does."""
        failed = [gate for gate in self.gates if not gate["passed"]]
        alone = bool(failed) and all(gate["gate"] == "no_worse_than" and gate["bound"] is None for gate in failed)
        return self.passed or self.accepted or alone

    @property
    def loss(self) -> float:
        """Mean of the windows; infinite when it is not finite."""
        mean = sum(self.nll) / len(self.nll) if self.nll else math.inf
        return mean if math.isfinite(mean) else math.inf

    @property
    def subject(self) -> Subject:
        """What its losses are of."""
        return Subject(self.model_sha256, self.text_sha256, self.windows_sha256, self.dtype)


def digest(hashes: Mapping[str, str]) -> str:
    """One SHA-256 for many files, whatever their order; empty for no files."""
    lines = "".join(f"{value}  {name}\n" for name, value in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest() if hashes else ""


def entries_of(report: Mapping[str, Any]) -> list[Entry]:
    """A report's targets as entries."""
    reference, run = report["reference"], report["run"]
    return [
        Entry(
            run=run["id"],
            time=run["time"],
            target=target["name"],
            format=target["format"],
            source=reference["source"],
            model_sha256=reference["model_sha256"],
            text_sha256=reference["text_sha256"],
            windows_sha256=reference["windows_sha256"],
            dtype=reference["dtype"],
            artifact_sha256=target["artifact_sha256"],
            versions=dict(report["versions"]),
            figures={name: target[name] for name in (*FIGURES, *MORE_FIGURES)},
            nll=numbers(report["nll"][target["name"]]),
            reference_perplexity=reference["perplexity"],
            gates=[dict(gate) for gate in target["gates"]],
            passed=target["passed"],
        )
        for target in report["targets"]
    ]


def numbers(values: Any) -> tuple[float, ...]:
    """JSON's numbers, where null stands for one that is not finite."""
    return tuple(math.nan if value is None else float(value) for value in values)


def read_report(path: Path) -> dict[str, Any]:
    """A ``report.json`` of this schema.

    Raises:
        BadInput: when there is none, or it is of another schema or damaged.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        schema = report["schema"]
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(f"{path}: not a report: {error!r}") from error
    if not isinstance(schema, int) or schema > SCHEMA:
        raise BadInput(f"{path}: schema: expected {SCHEMA} at most, found {schema!r}: a newer edge-convert wrote it")
    if schema < SCHEMA:
        raise BadInput(f"{path}: schema: expected {SCHEMA}, found {schema}: run it again with this edge-convert")
    try:
        entries_of(report)
    except (TypeError, KeyError, AttributeError) as error:
        raise BadInput(f"{path}: a damaged report: {error!r}") from error
    found: dict[str, Any] = report
    return found
