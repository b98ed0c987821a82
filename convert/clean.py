"""``convert clean``: the stages in a work folder that the pipelines which share it would not use as they are now."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from convert.config import Pipeline
from convert.judge import Job, measurement_key, position_key, reference_key
from convert.precision import PARTS, with_precision
from convert.prepare import prepare
from convert.run import source_of
from convert.stages import Stages
from convert.store import Store
from convert.terminal import Reporter
from export.artifact import is_artifact
from export.opened import open_artifact
from export.plan import Plan
from models.errors import BadInput, EnvironmentProblem
from validate.measure import Settings


def clean(pipelines: Sequence[Pipeline], remove: bool, show: Reporter) -> list[dict[str, Any]]:
    """Finds the stages that no run of these pipelines would look at, as they and what they name are now.

    What a run would look at is kept also where its artifact is up to date, so that a change of the export alone costs
    no calibration.

    Args:
        pipelines: every one that works in the folder, at least one.
        remove: removes them too.

    Returns:
        Of each its ``folder``, ``stage`` and ``bytes``.

    Raises:
        BadInput: when the pipelines have different work folders, one of them is wrong, or a run is using the folder.
    """
    first = pipelines[0]
    problems = [
        f"{other.path}: expected the work folder of {first.path} ({first.work_folder}), found {other.work_folder}"
        for other in pipelines[1:]
        if other.work_folder != first.work_folder
    ]
    if problems:
        raise BadInput(problems)
    store = Store(first.work_folder)
    if not store.present():
        return []
    with store.locked():
        used = {path for pipeline in pipelines for path in _used(pipeline, store, show)}
        unused = [path for path in store.present() if path not in used]
        found = [{"folder": str(path), "stage": path.name.rpartition("-")[0], "bytes": _size(path)} for path in unused]
        if remove:
            for path in unused:
                shutil.rmtree(path)
    return found


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _used(pipeline: Pipeline, store: Store, show: Reporter) -> list[Path]:
    """The stages that a run of the pipeline would look at."""
    prepared = prepare(pipeline)
    texts = prepared.texts()
    job = Job(prepared, source_of(prepared), store, False, show)
    found: list[Path] = []
    for plan in prepared.plans:
        stages = Stages(job, plan, texts)
        if stages.sensitivity is not None:
            if stages.generated is not None:
                found.append(store.path("generated", stages.generated))
            found.append(store.path("sensitivity", stages.sensitivity))
            # What stays unquantised, and so the rest, is known when that is done.
            if not (found[-1] / PARTS).is_file():
                continue
            chosen = with_precision(stages, show)
            assert chosen is not None
            stages = replace(stages, plan=chosen.plan)
        found += [store.path(name, content) for name, content in stages.named().items()]
    return found if texts.settings is None else found + _measured(job, prepared.plans, texts.settings)


def _measured(job: Job, plans: Sequence[Plan], settings: Settings) -> list[Path]:
    """The stages of the validation."""
    pipeline, store = job.prepared.pipeline, job.store
    found = [store.path("reference", reference_key(job, settings))]
    for plan in plans:
        folder = pipeline.output_folder / plan.spec.name
        try:
            artifact = open_artifact(folder) if is_artifact(folder) else None
        except BadInput as error:
            # A run writes it again, and measures it then.
            job.show.say(f"{plan.spec.name}: {error.problems[0]}")
            continue
        if artifact is not None:
            found.append(store.path("measure", measurement_key(job, settings, artifact)))
    for name in pipeline.validation.positioning if pipeline.validation else ():
        try:
            found.append(store.path("position", position_key(job, settings, name)))
        except EnvironmentProblem:
            # Of what version is not known without the package, so all that was measured stays.
            found += [path for path in store.present() if path.name.startswith("position-")]
    return found
