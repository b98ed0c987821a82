"""``convert validate``: one artifact against a source, or every artifact of a pipeline."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convert.against import TextChoice, opened_against
from convert.config import Pipeline, load
from convert.engines import find_engines
from convert.judge import Job, check_named_run, judge, read_past, subject_of
from convert.prepare import prepare
from convert.report_files import write_reports
from convert.run import output_locked, source_of
from convert.stages import Stages
from convert.store import Store
from convert.terminal import Reporter
from export.artifact import is_artifact
from export.opened import AnyArtifact, open_artifact
from models.errors import BadInput
from models.files import recover_folder
from validate.engines.check import EngineSpec
from validate.measure import measure, measure_reference
from validate.report import Run, to_report


def validate_artifact(
    folder: Path,
    reference: str,
    text: TextChoice,
    show: Reporter,
    engines: Sequence[str] = (),
    engine_python: Path | None = None,
    pipeline: Path | None = None,
    files: Path | None = None,
) -> dict[str, Any]:
    """Measures an artifact as `convert run` does, and returns the same report with this one target.

    Args:
        engines: that run the artifact too.
        engine_python: the interpreter of the one engine.
        pipeline: a pipeline.yaml whose ``engines`` say where they are.
        files: a folder for the report's files.

    Raises:
        EnvironmentProblem: when an engine is not installed.
        BadInput: when the artifact or the reference is damaged, or no text can be found.
    """
    began = time.monotonic()
    artifact = open_artifact(folder)
    show(f"{folder.name}: hashes", 0, 1)
    artifact.check()
    show(f"{folder.name}: hashes", 1, 1)
    specs = _engines(artifact, engines, engine_python, pipeline)
    with opened_against(artifact, reference, text, specs) as found:
        checkpoint, settings = found.model.checkpoint, found.settings
        hashes = checkpoint.hashes()
        scored = measure_reference(checkpoint, settings, found.work, show)
        measured = measure(artifact, checkpoint, scored, settings, show)
    run = Run.begin(hashes, _warnings(artifact, hashes, settings.windows.text_sha256))
    report = to_report(reference, settings, [(artifact, measured)], time.monotonic() - began, run)
    if files is not None:
        write_reports(files, report, [artifact])
    return report


def validate_pipeline(pipeline: Pipeline, only: tuple[str, ...], show: Reporter) -> dict[str, Any]:
    """Measures the artifacts that a pipeline has written, each anew from its bytes, and judges them as `convert run`.

    Returns:
        The report, which is also written, with the run's entries in the history.

    Raises:
        BadInput: when there is no validation section, or artifacts are missing or not as they were written; all of
            them are named.
    """
    began = time.monotonic()
    if pipeline.validation is None:
        raise BadInput(f"{pipeline.path}: validation: this key is required to validate, and missing")
    if not pipeline.output_folder.is_dir():
        raise BadInput(f"{pipeline.output_folder}: no artifacts there; `convert run` writes them")
    past = read_past(pipeline)
    prepared = prepare(pipeline, only)
    store = Store(pipeline.work_folder)
    with store.locked(), output_locked(pipeline):
        texts = prepared.texts()
        assert texts.settings is not None
        job = Job(prepared, source_of(prepared), store, False, show)
        check_named_run(past, subject_of(job.source, texts.settings))
        artifacts = _written(job)
        warnings = [*texts.warnings]
        for artifact, plan in zip(artifacts, prepared.plans, strict=True):
            if artifact.ledger.target.get("key") != Stages(job, plan, texts).export:
                warnings.append(f"{plan.spec.name}: the pipeline or its source has changed since this was written")
        return judge(job, artifacts, texts.settings, past, began, warnings, again=True)


def _written(job: Job) -> list[AnyArtifact]:
    """The artifacts of a pipeline's targets, each checked."""
    problems: list[str] = []
    found = []
    for plan in job.prepared.plans:
        folder = job.prepared.pipeline.output_folder / plan.spec.name
        recover_folder(folder)
        try:
            if not is_artifact(folder):
                raise BadInput(f"{folder}: no artifact there; `convert run` writes it")
            artifact = open_artifact(folder)
            job.show(f"{folder.name}: hashes", 0, 1)
            artifact.check()
            job.show(f"{folder.name}: hashes", 1, 1)
            found.append(artifact)
        except BadInput as error:
            problems += error.problems
    if problems:
        raise BadInput(problems)
    return found


def _warnings(artifact: AnyArtifact, files: Mapping[str, str], text_sha256: str) -> list[str]:
    """What makes a measurement worth less than it looks."""
    ledger, found = artifact.ledger, []
    changed = sorted(name for name, value in ledger.source["files"].items() if files.get(name) != value)
    if changed:
        found.append(f"the reference is not the source that this was made from: {', '.join(changed)} differ")
    if ledger.calibration is not None and ledger.calibration.get("text_sha256") == text_sha256:
        found.append("the validation text is the calibration text")
    return found


def _engines(
    artifact: AnyArtifact, names: Sequence[str], python: Path | None, pipeline: Path | None
) -> tuple[EngineSpec, ...]:
    loaded = load(pipeline) if pipeline is not None else None
    return find_engines(
        list(names),
        [artifact.format],
        python,
        loaded.engines if loaded else None,
        loaded.folder if loaded else None,
    )
