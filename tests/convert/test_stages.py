"""Which stages a target has, and what each one's key rests on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

from calibrate.generated import Generation
from convert.config import load
from convert.judge import Job
from convert.prepare import prepare
from convert.run import source_of
from convert.stages import Stages
from convert.store import STAGE_VERSIONS, Store
from convert.terminal import Reporter
from tests.runs import project

SMALL = {"group_size": 32, "lm_head": "keep"}
TARGETS: list[dict[str, Any]] = [
    {"name": "rtn", "format": "gptq", "method": "rtn", **SMALL},
    {"name": "gptq", "format": "gptq", "method": "gptq", **SMALL},
    {"name": "weighed", "format": "gptq", "method": ["fisher", "gptq"], **SMALL},
    {"name": "trained", "format": "gptq", "method": ["fisher", "gptq", "tune"], **SMALL},
    {"name": "budget", "format": "tinygemm", "method": "search", "bits_per_weight": 7.5, **SMALL},
    {"name": "phone", "format": "phone", "method": "gptq"},
]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stages]:
    """Of every target, by name."""
    calibration = {"dataset": {"path": "text", "data_files": "text.txt"}, "samples": 4, "sequence_length": 144}
    file = project(tmp_path_factory.mktemp("stages") / "p", targets=TARGETS, calibration=calibration)
    prepared = prepare(load(file))
    show = Reporter(Progress(disable=True), Console(quiet=True))
    job = Job(prepared, source_of(prepared), Store(prepared.pipeline.work_folder), False, show)
    texts = prepared.texts()
    return {plan.spec.name: Stages(job, plan, texts) for plan in prepared.plans}


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("rtn", {"calibrate"}),
        ("gptq", {"calibrate"}),
        ("weighed", {"calibrate", "fisher"}),
        ("trained", {"calibrate", "fisher"}),
        ("budget", {"calibrate", "sensitivity"}),
        ("phone", {"calibrate", "observe"}),
    ],
)
def test_a_target_has_the_stages_of_its_methods(stages: dict[str, Stages], target: str, expected: set[str]) -> None:
    assert set(stages[target].named()) == expected


def test_a_method_without_use_for_text_does_not_rest_on_it(stages: dict[str, Stages]) -> None:
    none = replace(stages["rtn"].texts, calibration=None)
    assert stages["rtn"].export == replace(stages["rtn"], texts=none).export
    assert stages["gptq"].export != replace(stages["gptq"], texts=none).export


def test_a_training_hides_its_judges_from_the_methods_and_from_fisher(stages: dict[str, Stages]) -> None:
    ids, shown = stages["trained"].ids, stages["trained"].shown
    assert ids is not None and shown is not None and 0 < len(shown) < len(ids)
    assert stages["weighed"].shown is stages["weighed"].ids
    assert stages["trained"].fisher != stages["weighed"].fisher


def test_codes_rest_on_the_version_of_what_weighs_them_and_others_do_not(
    stages: dict[str, Stages], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: stages[name].calibrate for name in ("gptq", "weighed")}
    monkeypatch.setitem(STAGE_VERSIONS, "fisher", STAGE_VERSIONS["fisher"] + 1)
    assert stages["gptq"].calibrate == before["gptq"]
    assert stages["weighed"].calibrate != before["weighed"]


def test_the_models_own_windows_are_part_of_the_keys_before_they_are_written(stages: dict[str, Stages]) -> None:
    generation = Generation(count=2, length=144, first=(1,), keeps_first=False, seed=0, dtype="bfloat16")
    other = {name: replace(each, texts=replace(each.texts, generation=generation)) for name, each in stages.items()}
    assert set(other["rtn"].named()) == {"calibrate"} and other["rtn"].export == stages["rtn"].export
    for name in ("gptq", "weighed", "trained", "budget", "phone"):
        plain, own = stages[name].named(), other[name].named()
        assert set(own) == {*plain, "generated"}
        assert all(own[stage] != plain[stage] for stage in plain)
    written = replace(other["trained"], own=torch.zeros(2, 144, dtype=torch.int64))
    assert written.named() == other["trained"].named() and written.export == other["trained"].export
    assert written.ids is not None and len(written.ids) == 6
    # Nothing is quantised on the text alone where the model's own was asked for.
    with pytest.raises(ValueError, match="own windows"):
        _ = other["gptq"].ids


def test_a_training_that_holds_out_other_own_windows_has_another_fisher(stages: dict[str, Stages]) -> None:
    """Of 63 and of 64 windows of a text the same ones are shown; which of the model's own are depends on their place
    behind the text's."""
    generation = Generation(count=8, length=144, first=(1,), keeps_first=False, seed=0, dtype="bfloat16")
    trained, text = stages["trained"], stages["trained"].texts.calibration
    assert text is not None
    ids, own = (torch.arange(count * 144).view(count, 144) for count in (64, 8))
    each = [
        replace(trained, texts=replace(trained.texts, calibration=replace(text, ids=ids[:count]), generation=given))
        for given in (None, generation)
        for count in (63, 64)
    ]
    plain, written = each[:2], [replace(stage, own=-own) for stage in each[2:]]
    assert plain[0].fisher == plain[1].fisher
    assert written[0].fisher != written[1].fisher
    shown = [stage.shown for stage in written]
    assert all(ids is not None for ids in shown) and not torch.equal(*(ids[-7:] for ids in shown if ids is not None))
