"""The second half of a run: artifacts are measured and judged, and everything that is reported is written."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from convert.config import Pipeline
from convert.prepare import Prepared
from convert.report_files import write_reports
from convert.store import Store
from convert.terminal import Reporter
from convert.yaml_lines import resolve_path, suggestion
from export.opened import AnyArtifact
from models.errors import BadInput, EnvironmentProblem, GateFailed
from models.files import replace_file, to_json
from validate.baseline import NAMES
from validate.entry import Entry, Subject, digest, entries_of, read_report
from validate.gates import failures
from validate.history import History
from validate.measure import Measurement, Reference, Settings, measure, measure_reference
from validate.place import compare_with_history
from validate.positioning import not_measured, position, version
from validate.report import Run, plain, to_report


@dataclasses.dataclass(frozen=True)
class Job:
    """What every stage of a run shares; ``source`` is the ledger's entry."""

    prepared: Prepared
    source: dict[str, Any]
    store: Store
    force: bool
    show: Reporter


@dataclasses.dataclass(frozen=True)
class Past:
    """Earlier runs.

    Attributes:
        entries: of the history, oldest first, and of the report that a gate names.
        wanted: `last`, `best` or the id of a run among them, where a gate names one.
    """

    entries: tuple[Entry, ...] = ()
    wanted: str | None = None


def read_past(pipeline: Pipeline) -> Past:
    """What a run is compared with, read before any work.

    Raises:
        BadInput: when the history, or the report that `no_worse_than` names, is none of ours or of a newer schema, or
            when there is no such run.
        EnvironmentProblem: when the history cannot be read.
    """
    config = pipeline.validation
    if config is None:
        return Past()
    history = History(pipeline.history_file)
    history.check()
    entries, wanted = history.entries(), config.gates.no_worse_than
    if wanted is None or wanted in NAMES:
        return Past(tuple(entries), wanted)
    if wanted.endswith(".json"):
        named = entries_of(read_report(resolve_path(wanted, pipeline.folder)))
        return Past((*entries, *named), named[0].run)
    runs = list(dict.fromkeys(entry.run for entry in entries))
    if wanted not in runs:
        # Of a long history the newest runs are the likely ones.
        known = [*NAMES, *runs[-10:]]
        where = f"{pipeline.path}: validation.gates.no_worse_than: {wanted}"
        raise BadInput(f"{where}: no such run in {history.path}{suggestion(wanted, known)}")
    return Past(tuple(entries), wanted)


def check_named_run(past: Past, subject: Subject) -> None:
    """Raises BadInput when a run that a gate names by id or file is of another model or text: no work can change it."""
    if past.wanted is None or past.wanted in NAMES:
        return
    entries = [entry for entry in past.entries if entry.run == past.wanted]
    reasons = [subject.differs(entry.subject) for entry in entries]
    if all(reasons):
        raise BadInput(
            f"validation.gates.no_worse_than: {past.wanted} cannot be compared: {reason}" for reason in reasons[-1]
        )


def subject_of(source: Mapping[str, Any], settings: Settings) -> Subject:
    """What a run's losses will be of."""
    dtype = str(settings.dtype).removeprefix("torch.")
    return Subject(digest(source["files"]), settings.windows.text_sha256, settings.windows.digest(), dtype)


def judge(
    job: Job,
    artifacts: Sequence[AnyArtifact],
    settings: Settings,
    past: Past,
    began: float,
    warnings: Sequence[str] = (),
    again: bool = False,
) -> dict[str, Any]:
    """Measures, compares with the gates and the past, and writes the ledgers, the report's files and the history.

    Args:
        began: `time.monotonic()` of the run's start.
        again: measure also what was measured before.

    Returns:
        The report.
    """
    pipeline = job.prepared.pipeline
    measured = _measure_all(job, artifacts, settings, again)
    run = Run.begin(job.source["files"], warnings)
    report = to_report(job.prepared.model.checkpoint.name, settings, measured, time.monotonic() - began, run)
    report = compare_with_history(report, past.entries, past.wanted)
    report["positioning"] = _positions(job, settings)
    for (artifact, _), entry in zip(measured, report["targets"], strict=True):
        _record(artifact, entry, pipeline)
    write_reports(pipeline.output_folder, report, [artifact for artifact, _ in measured], past.entries)
    # At the end: a run that is killed before it is done again, and counts once.
    History(pipeline.history_file).append(entries_of(report))
    return report


def raise_failures(report: Mapping[str, Any]) -> None:
    """Raises GateFailed naming every gate that did not hold and every engine that refused an artifact.

    Raises:
        EnvironmentProblem: when nothing failed but engines that the machine could not run.
    """
    targets = report.get("targets", ())
    lines = [f"target {target['name']}: {line}" for target in targets for line in failures(target)]
    engines = [engine for target in targets for engine in target["engines"] if "failed" in engine]
    only_lacking = bool(engines) and all(engine["lacking"] for engine in engines)
    if only_lacking and not any(_judged_and_failed(target) for target in targets):
        raise EnvironmentProblem(lines)
    if lines:
        raise GateFailed(lines)


def _judged_and_failed(target: Mapping[str, Any]) -> bool:
    """Whether a gate failed for another reason than that an engine is lacking."""
    return any(not gate["passed"] and gate["gate"] != "max_engine_gap" for gate in target["gates"]) or any(
        "failed" in engine and not engine["lacking"] for engine in target["engines"]
    )


def reference_key(job: Job, settings: Settings) -> dict[str, Any]:
    """What decides the reference's figures."""
    return {"source": job.source["files"], **settings.key()}


def measurement_key(job: Job, settings: Settings, artifact: AnyArtifact) -> dict[str, Any]:
    """What decides an artifact's figures."""
    content = {"reference": reference_key(job, settings), "artifact": artifact.ledger.files}
    return content | {"engine": settings.engine_windows, "engines": [spec.key() for spec in settings.engines]}


def position_key(job: Job, settings: Settings, peer: str) -> dict[str, Any]:
    """What decides a peer's figures. Raises EnvironmentProblem when it is not installed."""
    return {"reference": reference_key(job, settings), "peer": version(peer)}


def _measure_all(
    job: Job, artifacts: Sequence[AnyArtifact], settings: Settings, again: bool
) -> list[tuple[AnyArtifact, Measurement]]:
    """Measures every artifact, or takes the measurement of the same bytes from an earlier run."""
    checkpoint, store, show = job.prepared.model.checkpoint, job.store, job.show
    cache = store.stage("reference", reference_key(job, settings))
    reference: Reference | None = None
    measured = []
    for artifact in artifacts:
        file = store.stage("measure", measurement_key(job, settings, artifact)) / "measurement.json"
        kept = None if again or not file.is_file() else _read(file)
        if kept is None or not kept.whole:
            reference = reference or measure_reference(checkpoint, settings, cache, show)
            found = measure(artifact, checkpoint, reference, settings, show)
            replace_file(file, to_json(found.to_dict()))
        # Read back in either case: a first run and a second one report the same.
        measured.append((artifact, _read(file)))
    return measured


def _positions(job: Job, settings: Settings) -> list[dict[str, Any]]:
    """A row for each peer that the pipeline names, measured once for a source, a text and a version of the peer."""
    config, store = job.prepared.pipeline.validation, job.store
    rows = []
    for name in config.positioning if config is not None else ():
        try:
            stage = store.stage("position", position_key(job, settings, name))
        except EnvironmentProblem as error:
            rows.append(not_measured(name, error))
            continue
        file = stage / "position.json"
        if not file.is_file():
            model, cache = job.prepared.model, store.stage("reference", reference_key(job, settings))
            reference = measure_reference(model.checkpoint, settings, cache, job.show)
            replace_file(file, to_json(plain(position(name, model, reference, settings, stage, job.show))))
        rows.append(json.loads(file.read_text(encoding="utf-8")))
    return rows


def _read(file: Any) -> Measurement:
    return Measurement.from_dict(json.loads(file.read_text(encoding="utf-8")))


def _record(artifact: AnyArtifact, entry: dict[str, Any], pipeline: Pipeline) -> None:
    """Puts a target's entry of the report into its ledger, with the text that it was measured on."""
    config = pipeline.validation
    assert config is not None
    settings = config.model_dump(mode="json", exclude={"gates", "history", "strict", "positioning"})
    # Relative to the artifact, so that `convert validate` finds the text while both lie where they lie.
    settings["dataset"] = pipeline.portable(config.dataset, artifact.folder)
    validation = {"settings": settings, "report": entry}
    if artifact.ledger.validation != validation:
        artifact.ledger.validation = validation
        artifact.ledger.write(artifact.folder)
