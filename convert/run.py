"""A whole run: open, split, calibrate, export and validate every target, each stage once and resumable."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch

from calibrate.fisher import Fisher, Progress, measure
from calibrate.generated import generate
from calibrate.quantize import quantize
from calibrate.results import Results
from calibrate.text import digest_of
from calibrate.tune import tune
from convert.config import Pipeline
from convert.estimate import check_room, estimate
from convert.judge import Job, check_named_run, judge, read_past, subject_of
from convert.precision import with_precision
from convert.prepare import Prepared, Texts, prepare
from convert.stages import Stages
from convert.store import LOCK, Store, locked
from convert.terminal import Reporter
from export.artifact import is_artifact, write
from export.ledger import Ledger
from export.opened import AnyArtifact, open_artifact
from export.phone.plan import PhonePlan
from export.phone.write import write as write_phone
from export.plan import Plan, TargetPlan
from models.checkpoint import Checkpoint
from models.errors import BadInput
from models.files import recover_folder, replace_file, to_json
from validate.engines.workers.phone_host import PartDriver

RUN_FILE = "run.json"


def run(pipeline: Pipeline, only: tuple[str, ...], force: bool, show: Reporter, again: bool = False) -> dict[str, Any]:
    """Runs a pipeline and writes its artifacts, the files of its report, and its entries in the history.

    Args:
        only: names of targets; empty for all.
        force: do every stage again, and take over an output folder of another run.
        again: measure artifacts from their bytes also where they were measured before.

    Returns:
        The report.

    Raises:
        BadInput, EnvironmentProblem: before the first weight is read, where they can be known then.
    """
    began = time.monotonic()
    _check_folders(pipeline)
    _check_output(pipeline, force)
    past = read_past(pipeline)
    prepared = prepare(pipeline, only)
    check_room(estimate(prepared), pipeline.output_folder, pipeline.work_folder)
    store = Store(pipeline.work_folder, force)
    with ExitStack() as held:
        held.enter_context(store.locked())
        texts = prepared.texts()
        show("source: hashes", 0, 1)
        source = source_of(prepared)
        show("source: hashes", 1, 1)
        if texts.settings is not None:
            check_named_run(past, subject_of(source, texts.settings))
        held.enter_context(output_locked(pipeline))
        _claim_output(pipeline)
        for line in (*prepared.reasons.values(), *texts.warnings):
            show.say(line)
        job = Job(prepared, source, store, force, show)
        artifacts = [_build(job, plan, texts) for plan in prepared.plans]
        if texts.settings is None:
            show.say("no validation section: nothing was measured")
            return {}
        return judge(job, artifacts, texts.settings, past, began, texts.warnings, again)


def output_locked(pipeline: Pipeline) -> AbstractContextManager[None]:
    """Keeps other runs out of the output folder. Raises BadInput when one is in it."""
    taken = "another run is writing into this output folder; wait for it or name another `output:`"
    return locked(pipeline.output_folder, taken)


def source_of(prepared: Prepared) -> dict[str, Any]:
    model, checkpoint = prepared.pipeline.model, prepared.model.checkpoint
    # The folder above an absolute path is this machine's business.
    name = Path(model.source).name if Path(model.source).expanduser().is_absolute() else model.source
    stated = {"revision": model.revision, "hub": prepared.pipeline.from_hub, "license": checkpoint.license}
    return {"name": name, **stated, "files": checkpoint.hashes()}


def _identity(pipeline: Pipeline) -> dict[str, str]:
    """What makes a run the same one as before; no path of the machine, so that a folder may move."""
    return {"pipeline": pipeline.path.name, "source": pipeline.model.source}


def _check_folders(pipeline: Pipeline) -> None:
    """Raises BadInput where a file stands in the way of a folder."""
    problems = []
    for key, folder in (("output", pipeline.output_folder), ("work", pipeline.work_folder)):
        blocking = next(path for path in (folder, *folder.parents) if path.exists())
        if not blocking.is_dir():
            problems.append(f"{key}: {folder}: expected a folder, found the file {blocking}")
    if problems:
        raise BadInput(problems)


def _check_output(pipeline: Pipeline, force: bool) -> None:
    """Raises BadInput when the output folder holds what another run wrote, unless it may be taken over."""
    folder = pipeline.output_folder
    if force or not folder.exists() or not any(entry.name != LOCK for entry in folder.iterdir()):
        return
    found = _read_identity(folder / RUN_FILE)
    if found != _identity(pipeline):
        holder = "files that no run wrote" if not found else f"the run of {found['pipeline']} on {found['source']}"
        raise BadInput(
            f"{folder}: the output folder holds {holder}; name another `output:`, or pass --force to write into it"
        )


def _read_identity(file: Path) -> dict[str, str]:
    """The content of a run file; empty when there is none, or it is something else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) and {"pipeline", "source"} <= found.keys() else {}


def _claim_output(pipeline: Pipeline) -> None:
    pipeline.output_folder.mkdir(parents=True, exist_ok=True)
    _replace_changed(pipeline.output_folder / RUN_FILE, to_json(_identity(pipeline)))


def _replace_changed(file: Path, content: bytes) -> None:
    """Writes a file unless it has that content: a run that changes nothing touches nothing."""
    if not file.is_file() or file.read_bytes() != content:
        replace_file(file, content)


def _build(job: Job, plan: Plan, texts: Texts) -> AnyArtifact:
    """Calibrates and writes one target, or takes the artifact that is already there; checks its bytes either way."""
    prepared, pipeline, store, show = job.prepared, job.prepared.pipeline, job.store, job.show
    stages = Stages(job, plan, texts)
    name, key = plan.spec.name, stages.export
    folder = pipeline.output_folder / name
    recover_folder(folder)
    present = None if job.force else _up_to_date(folder, key, show)
    if present is not None:
        show.say(f"{name}: up to date")
        return present
    model = prepared.model
    bits: tuple[str, ...] = ()
    precision: list[dict[str, Any]] = []

    def progress(what: str, done: int, total: int) -> None:
        show(f"{name}: {what}", done, total)

    stages = dataclasses.replace(stages, own=_own_windows(stages, progress))
    chosen = with_precision(stages, progress)
    if chosen is not None:
        plan, bits, precision = chosen.plan, (chosen.note,), chosen.table
        stages = dataclasses.replace(stages, plan=plan)
    ids = stages.ids
    results = Results(store.stage("calibrate", stages.calibrate))
    # What is quantised may be the same function in other weights.
    view = plan.rewritten(model)
    fisher = _fisher(stages, view.checkpoint, progress)
    quantize(view.checkpoint, view.linears, plan.recipe, stages.shown, results, progress, fisher)
    notes = (*_notes(prepared, plan), *bits)
    if plan.recipe.trains and ids is not None:
        tuned = tune(model.checkpoint, view.checkpoint, view.linears, plan.recipe.dtype, ids, results, progress)
        results, notes = tuned.results, (*notes, tuned.note)
    ledger = Ledger(
        source=job.source,
        target=dataclasses.asdict(plan.spec) | {"key": key, "bits_per_weight": plan.bits_per_weight},
        notes=notes,
        tensors=[],
        skipped_files=model.checkpoint.skipped_files(),
        source_config=model.checkpoint.config,
        dtype=pipeline.model.dtype,
        calibration=_calibration_record(stages, folder),
        device=prepared.device,
        precision=precision,
    )
    if isinstance(plan, PhonePlan):
        assert stages.observe is not None
        observed = store.stage("observe", stages.observe)
        write_phone(plan, model, results, ids, folder, ledger, observed, PartDriver, progress=progress)
    else:
        assert isinstance(plan, TargetPlan)
        write(plan, view.checkpoint, results, model.dimensions.layers, folder, ledger, pipeline.output.shard_bytes)
    artifact = open_artifact(folder)
    artifact.check()
    show.say(f"{name}: written to {os.path.relpath(folder)}")
    return artifact


def _own_windows(stages: Stages, progress: Progress) -> torch.Tensor | None:
    """What the model writes to be calibrated on, once for all targets."""
    wanted, content = stages.texts.generation, stages.generated
    if wanted is None or content is None:
        return None
    checkpoint, folder = stages.job.prepared.model.checkpoint, stages.job.store.stage("generated", content)
    return generate(checkpoint, wanted, folder, lambda done, total: progress("own text", done, total))


def _fisher(stages: Stages, weights: Checkpoint, progress: Progress) -> Fisher | None:
    """What the loss says of the errors, measured once for all targets that quantise the same weights."""
    if stages.fisher is None or stages.shown is None:
        return None
    folder, linears = stages.job.store.stage("fisher", stages.fisher), stages.job.prepared.model.linears
    return measure(weights, linears, stages.plan.recipe.dtype, stages.shown, folder, progress)


def _up_to_date(folder: Path, key: str, show: Reporter) -> AnyArtifact | None:
    """The artifact that is already there, when it is what this run would write, and whole."""
    if not is_artifact(folder):
        return None
    try:
        artifact = open_artifact(folder)
        if artifact.ledger.target.get("key") != key:
            return None
        show(f"{folder.name}: hashes", 0, 1)
        artifact.check()
        show(f"{folder.name}: hashes", 1, 1)
    except BadInput as error:
        more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
        show.say(f"{folder.name}: damaged, so it is written again: {error.problems[0]}{more}")
        return None
    return artifact


def _notes(prepared: Prepared, plan: Plan) -> tuple[str, ...]:
    notes = list(plan.notes)
    if plan.spec.name in prepared.reasons:
        notes.append(prepared.reasons[plan.spec.name])
    if plan.uses_text and prepared.pipeline.calibration is None:
        notes.append("no calibration text: every input channel weighs the same")
    return tuple(notes)


def _calibration_record(stages: Stages, folder: Path) -> dict[str, Any] | None:
    pipeline, windows = stages.job.prepared.pipeline, stages.windows
    config = pipeline.calibration
    if config is None or windows is None:
        return None
    record = config.model_dump(mode="json") | {"dataset": pipeline.portable(config.dataset, folder)}
    record |= {"text_sha256": windows.text_sha256, "windows_sha256": windows.digest(), "bos": windows.bos}
    return record if stages.own is None else record | {"generated_sha256": digest_of(stages.own)}
