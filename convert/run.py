"""A whole run: open, split, calibrate, export and validate every target, each stage once and resumable."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calibrate.quantize import quantize
from calibrate.results import Results
from calibrate.text import Windows
from convert.config import Pipeline
from convert.estimate import check_room, estimate
from convert.prepare import Prepared, prepare
from convert.store import Store
from convert.terminal import Reporter
from export.artifact import Artifact, is_artifact, write
from export.ledger import Ledger
from export.plan import TargetPlan
from models.errors import BadInput, GateFailed
from models.files import replace_file, to_json
from validate.gates import GateResult
from validate.measure import Reference, Settings, TargetReport, measure, measure_reference
from validate.report import ReferenceReport, to_report, write_report
from validate.score import Comparison

RUN_FILE = "run.json"


def run(pipeline: Pipeline, only: tuple[str, ...], force: bool, show: Reporter) -> dict[str, Any]:
    """Runs a pipeline and writes its artifacts and ``report.json``.

    Args:
        only: names of targets; empty for all.
        force: do every stage again, and take over an output folder of another run.

    Returns:
        The report.

    Raises:
        BadInput, EnvironmentProblem: before the first weight is read, where they can be known then.
    """
    began = time.monotonic()
    _check_output(pipeline, force)
    prepared = prepare(pipeline, only)
    check_room(estimate(prepared), (pipeline.output_folder, pipeline.work_folder))
    store = Store(pipeline.work_folder)
    with store.locked():
        calibration, settings = prepared.calibration(), prepared.settings()
        source = {"name": prepared.model.checkpoint.name, "files": prepared.model.checkpoint.hashes()}
        _claim_output(pipeline)
        for line in prepared.reasons.values():
            show.say(line)
        artifacts = [_build(prepared, plan, calibration, source, store, force, show) for plan in prepared.plans]
        if settings is None:
            show.say("no validation section: nothing was measured")
            return {}
        report = _validate(prepared, artifacts, settings, source, store, force, show, began)
        write_report(pipeline.output_folder / "report.json", report)
        return report


def raise_failed_gates(report: Mapping[str, Any]) -> None:
    """Raises GateFailed naming every gate that did not hold."""
    failed = [
        f"target {target['name']}: {GateResult(**gate).text}"
        for target in report.get("targets", ())
        for gate in target["gates"]
        if not gate["passed"]
    ]
    if failed:
        raise GateFailed(failed)


def _identity(pipeline: Pipeline) -> dict[str, str]:
    """What makes a run the same one as before; no path of the machine, so that a folder may move."""
    return {"pipeline": pipeline.path.name, "source": pipeline.model.source}


def _check_output(pipeline: Pipeline, force: bool) -> None:
    folder = pipeline.output_folder
    if force or not folder.exists():
        return
    if not folder.is_dir():
        raise BadInput(f"{folder}: expected an output folder, found a file")
    if not any(folder.iterdir()):
        return
    file = folder / RUN_FILE
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    if found != _identity(pipeline):
        holder = "files that no run wrote" if found is None else f"the run of {found['pipeline']} on {found['source']}"
        raise BadInput(
            f"{folder}: the output folder holds {holder}; name another `output:`, or pass --force to write into it"
        )


def _claim_output(pipeline: Pipeline) -> None:
    pipeline.output_folder.mkdir(parents=True, exist_ok=True)
    replace_file(pipeline.output_folder / RUN_FILE, to_json(_identity(pipeline)))


def _build(
    prepared: Prepared,
    plan: TargetPlan,
    calibration: Windows | None,
    source: dict[str, Any],
    store: Store,
    force: bool,
    show: Reporter,
) -> Artifact:
    """Calibrates and writes one target, or takes the artifact that is already there."""
    windows = calibration if plan.recipe.uses_moments else None
    content = {
        "source": source["files"],
        "recipe": repr(plan.recipe),
        "windows": None if windows is None else windows.digest(),
    }
    name, pipeline = plan.spec.name, prepared.pipeline
    folder = pipeline.output_folder / name
    export = {
        "calibrate": store.key("calibrate", content),
        "options": dataclasses.asdict(plan.options),
        "fused": plan.spec.fused,
        "shard_bytes": pipeline.output.shard_bytes,
    }
    key = store.key("export", export)
    if not force and is_artifact(folder) and Ledger.read(folder).target.get("key") == key:
        show.say(f"{name}: up to date")
        return Artifact(folder)
    model = prepared.model
    results = Results(store.stage("calibrate", content, force))
    quantize(
        model.checkpoint,
        model.linears,
        plan.recipe,
        None if windows is None else windows.ids,
        results,
        lambda what, done, total: show(f"{name}: {what}", done, total),
    )
    target = dataclasses.asdict(plan.spec) | {"key": key, "bits_per_weight": plan.bits_per_weight}
    ledger = Ledger(
        source=source,
        target=target,
        notes=_notes(prepared, plan),
        tensors=[],
        skipped_files=model.checkpoint.skipped_files(),
        source_config=model.checkpoint.config,
        dtype=pipeline.model.dtype,
        calibration=_calibration_record(prepared, windows),
        device=prepared.device,
    )
    write(plan, model.checkpoint, results, model.dimensions.layers, folder, ledger, pipeline.output.shard_bytes)
    show.say(f"{name}: written to {os.path.relpath(folder)}")
    return Artifact(folder)


def _notes(prepared: Prepared, plan: TargetPlan) -> tuple[str, ...]:
    notes = list(plan.notes)
    if plan.spec.name in prepared.reasons:
        notes.append(prepared.reasons[plan.spec.name])
    if plan.recipe.uses_moments and prepared.pipeline.calibration is None:
        notes.append("no calibration text: every input channel weighs the same")
    return tuple(notes)


def _calibration_record(prepared: Prepared, windows: Windows | None) -> dict[str, Any] | None:
    config = prepared.pipeline.calibration
    if config is None or windows is None:
        return None
    return config.model_dump(mode="json") | {"text_sha256": windows.text_sha256, "windows_sha256": windows.digest()}


def _validate(
    prepared: Prepared,
    artifacts: list[Artifact],
    settings: Settings,
    source: dict[str, Any],
    store: Store,
    force: bool,
    show: Reporter,
    began: float,
) -> dict[str, Any]:
    checkpoint = prepared.model.checkpoint
    reference_key = {"source": source["files"], **settings.key()}
    cache = store.stage("reference", reference_key, force)
    reference: Reference | None = None
    reports = []
    for artifact in artifacts:
        content = {"reference": reference_key, "artifact": artifact.ledger.files, "engine": settings.engine_windows}
        stage = store.stage("measure", content, force)
        file = stage / "report.json"
        if not file.is_file():
            reference = reference or measure_reference(checkpoint, settings, cache, show)
            replace_file(file, to_json(_stored(measure(artifact, checkpoint, reference, settings, show))))
        report = _restored(json.loads(file.read_text(encoding="utf-8")))
        report.judge(settings.gates)
        artifact.check()
        _record(artifact, report, prepared)
        reports.append(report)
    first = reports[0].scores
    reference_report = ReferenceReport(
        source=checkpoint.name,
        dtype=prepared.pipeline.model.dtype,
        perplexity=first.reference_perplexity,
        perplexity_se=first.reference_perplexity_se,
        windows=first.windows,
        sequence_length=settings.windows.ids.shape[1],
        tokens=first.tokens,
        text_sha256=settings.windows.text_sha256,
    )
    return to_report(reference_report, [report.to_dict() for report in reports], time.monotonic() - began)


def _stored(report: TargetReport) -> dict[str, Any]:
    return dataclasses.asdict(report)


def _restored(data: dict[str, Any]) -> TargetReport:
    scores = data.pop("scores")
    scores["nll"] = tuple(scores["nll"])
    return TargetReport(**{**data, "scores": Comparison(**scores), "gates": [], "notes": tuple(data["notes"])})


def _record(artifact: Artifact, report: TargetReport, prepared: Prepared) -> None:
    """Puts the measurement into the artifact's ledger, with the text that it was taken on."""
    config = prepared.pipeline.validation
    assert config is not None
    text = config.model_dump(mode="json", exclude={"gates"})
    files = prepared.pipeline.dataset_arguments(config.dataset).get("data_files")
    if files:
        # Relative to the artifact, so that `convert validate` finds the text while both lie where they lie.
        text["dataset"]["data_files"] = [_relative(file, artifact.folder) for file in files]
    artifact.ledger.validation = {"settings": text, "report": report.to_dict()}
    artifact.ledger.write(artifact.folder)


def _relative(file: str, folder: Path) -> str:
    return file if "://" in file else os.path.relpath(file, folder)
