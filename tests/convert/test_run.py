"""Runs: each stage is done once, again only where something that concerns it changed, and never over another's work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from convert.store import LOCK
from export.ledger import Ledger
from tests.runs import (
    LENGTH,
    TARGETS,
    VOLATILE,
    Zygote,
    content,
    invoke,
    project,
    same_report,
    settings,
    times,
    write_yaml,
)

Copy = Callable[[], Path]
NAMES = ("gptq", "awq", "tiny")


def run(folder: Path, *options: Any, code: int = 0) -> str:
    """Runs a project's pipeline and returns everything it said."""
    result = invoke("run", folder / "pipeline.yaml", *options)
    assert result.exit_code == code, result.output
    return result.output


def weights(folder: Path) -> dict[str, int]:
    """When each artifact's weights were written."""
    return {name: (folder / "output" / name / "model.safetensors").stat().st_mtime_ns for name in NAMES}


def stages(folder: Path) -> dict[str, int]:
    """When each file of the work folder was written, what `datasets` keeps there aside."""
    return {name: time for name, time in times(folder / "work").items() if "datasets" not in name and name != ".lock"}


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "output" / "report.json").read_text())
    return found


def test_a_second_run_is_up_to_date_and_changes_nothing(copy: Copy) -> None:
    folder = copy()
    first = report(folder)
    output, work = times(folder / "output"), stages(folder)
    text = run(folder)
    assert all(f"{name}: up to date" in text for name in NAMES)
    assert {k: v for k, v in times(folder / "output").items() if k not in VOLATILE} == {
        k: v for k, v in output.items() if k not in VOLATILE
    }
    assert stages(folder) == work
    assert same_report(report(folder)) == same_report(first)


def test_a_moved_project_is_still_up_to_date(copy: Copy, tmp_path: Path) -> None:
    folder = copy().rename(tmp_path / "elsewhere")
    before = times(folder / "output" / "gptq")
    assert "gptq: up to date" in run(folder, "--only", "gptq")
    assert times(folder / "output" / "gptq") == before


def test_a_changed_target_redoes_that_target_only(copy: Copy) -> None:
    folder = copy()
    before, done = weights(folder), stages(folder)
    targets = [dict(target) for target in TARGETS]
    targets[1]["group_size"] = 64
    write_yaml(folder, settings(targets=targets))
    text = run(folder)
    assert "gptq: up to date" in text and "tiny: up to date" in text and "awq: written" in text
    after = weights(folder)
    assert [name for name in NAMES if after[name] != before[name]] == ["awq"]
    assert done.items() <= stages(folder).items()
    assert Ledger.read(folder / "output" / "awq").target["group_size"] == 64


def test_changed_gates_judge_again_and_measure_nothing(copy: Copy) -> None:
    folder = copy()
    before, done = weights(folder), stages(folder)
    validation = settings()["validation"] | {"gates": {"max_kl": 1e-6, "min_top1": 0.0}}
    write_yaml(folder, settings(validation=validation))
    text = run(folder, code=1)
    for name in NAMES:
        assert f"error: target {name}: max_kl: expected 1e-06, found " in text
    assert (weights(folder), stages(folder)) == (before, done)
    (kl, top1) = report(folder)["targets"][0]["gates"]
    assert (kl["passed"], top1["passed"]) == (False, True)
    recorded = Ledger.read(folder / "output" / "gptq").validation
    assert recorded is not None and recorded["report"]["gates"] == [kl, top1]


def test_changed_validation_measures_again_and_converts_nothing(copy: Copy) -> None:
    folder = copy()
    before, done = weights(folder), stages(folder)
    validation = settings()["validation"] | {"tokens": 96}
    write_yaml(folder, settings(validation=validation))
    run(folder)
    assert weights(folder) == before
    assert report(folder)["reference"]["windows"] == 3
    new = stages(folder).keys() - done.keys()
    assert {name.partition("-")[0] for name in new} == {"reference", "measure"}


def test_changed_calibration_converts_again(copy: Copy) -> None:
    folder = copy()
    before = weights(folder)
    calibration = settings()["calibration"] | {"seed": 7}
    write_yaml(folder, settings(calibration=calibration))
    text = run(folder)
    assert "up to date" not in text
    assert all(weights(folder)[name] != before[name] for name in NAMES)


def test_changed_weights_of_the_source_convert_again(copy: Copy) -> None:
    folder = copy()
    other = project(folder.parent / "other", config={"seed": 1}).parent / "model"
    (folder / "model" / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    assert "up to date" not in run(folder, "--only", "gptq")


def test_another_layout_of_the_same_numbers_calibrates_nothing(copy: Copy) -> None:
    folder = copy()
    done = stages(folder)
    write_yaml(folder, settings(output={"path": "output", "shard_size": "100KB"}))
    text = run(folder, "--only", "gptq")
    assert "gptq: written" in text
    assert {name for name in stages(folder).keys() - done.keys() if "calibrate" in name} == set()
    assert len(list((folder / "output" / "gptq").glob("model-*.safetensors"))) > 1


def test_only_makes_and_reports_the_named_targets(tmp_path: Path) -> None:
    folder = project(tmp_path / "p").parent
    run(folder, "--only", "awq")
    assert {path.name for path in (folder / "output").iterdir()} == {"awq", "run.json", LOCK, *VOLATILE}
    assert [target["name"] for target in report(folder)["targets"]] == ["awq"]


def test_an_unknown_target_is_refused_before_any_work(tmp_path: Path) -> None:
    folder = project(tmp_path / "p").parent
    text = run(folder, "--only", "gptqq", "--only", "x", code=2)
    assert "--only gptqq: no such target; did you mean 'gptq'?" in text
    assert "--only x: no such target; known: gptq, awq, tiny" in text
    assert not (folder / "output").exists() and not (folder / "work").exists()


def test_force_does_everything_again_with_the_same_result(copy: Copy) -> None:
    folder = copy()
    before, done, written = content(folder / "output"), stages(folder), weights(folder)
    text = run(folder, "--force")
    assert "up to date" not in text
    assert all(weights(folder)[name] != written[name] for name in NAMES)
    assert all(time != done[name] for name, time in stages(folder).items())
    after = content(folder / "output")
    assert {k: v for k, v in after.items() if k not in VOLATILE} == {
        k: v for k, v in before.items() if k not in VOLATILE
    }


def test_work_may_lie_elsewhere_and_decides_nothing(copy: Copy, finished: Path, tmp_path: Path) -> None:
    folder = project(tmp_path / "fresh").parent
    run(folder, "--only", "gptq", "--work", tmp_path / "elsewhere")
    assert not (folder / "work").exists() and any((tmp_path / "elsewhere").glob("calibrate-*"))
    assert content(folder / "output" / "gptq") == content(finished / "output" / "gptq")


def test_work_in_the_output_folder_is_refused(copy: Copy) -> None:
    folder = copy()
    assert "expected a folder other than output" in run(folder, "--work", folder / "output", code=2)


def test_the_output_of_another_run_is_refused_then_taken_with_force(copy: Copy) -> None:
    folder = copy()
    before = content(folder / "output")
    (folder / "model").rename(folder / "renamed")
    write_yaml(folder, settings(model={"source": "renamed"}))
    text = run(folder, "--only", "gptq", code=2)
    assert "the output folder holds the run of pipeline.yaml on model" in text and "--force" in text
    assert content(folder / "output") == before
    run(folder, "--only", "gptq", "--force")
    assert Ledger.read(folder / "output" / "gptq").source["name"] == "renamed"
    run(folder, "--only", "gptq")


@pytest.mark.parametrize("run_file", [None, "{", '{"other": 1}', "[]"])
def test_a_folder_that_no_run_wrote_is_refused(tmp_path: Path, run_file: str | None) -> None:
    folder = project(tmp_path / "p").parent
    (folder / "output").mkdir()
    (folder / "output" / "precious.txt").write_text("mine")
    if run_file is not None:
        (folder / "output" / "run.json").write_text(run_file)
    assert "files that no run wrote" in run(folder, code=2)
    assert (folder / "output" / "precious.txt").read_text() == "mine"
    assert not (folder / "work").exists()


def test_an_empty_output_folder_is_fine(copy: Copy) -> None:
    folder = project(copy().parent / "p").parent
    (folder / "output").mkdir()
    run(folder, "--only", "gptq")


@pytest.mark.parametrize("damage", ["weights", "ledger", "side file"])
def test_a_damaged_artifact_is_written_again(copy: Copy, finished: Path, damage: str) -> None:
    folder = copy()
    artifact = folder / "output" / "gptq"
    if damage == "weights":
        with (artifact / "model.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x99")
    elif damage == "ledger":
        (artifact / "conversion.json").write_text("{")
    else:
        (artifact / "tokenizer.json").unlink()
    text = run(folder, "--only", "gptq")
    assert "gptq: damaged, so it is written again: " in text and "gptq: written to" in text
    assert content(artifact) == content(finished / "output" / "gptq")


def test_two_targets_with_the_same_bytes_report_their_own_names(tmp_path: Path) -> None:
    targets = [{"name": name, "format": "tinygemm", "group_size": 32, "method": "rtn"} for name in ("one", "two")]
    folder = project(tmp_path / "p", targets=targets).parent
    run(folder)
    assert [target["name"] for target in report(folder)["targets"]] == ["one", "two"]
    for name in ("one", "two"):
        recorded = Ledger.read(folder / "output" / name).validation
        assert recorded is not None and recorded["report"]["name"] == name


def test_an_automatic_format_says_why_everywhere(tmp_path: Path) -> None:
    targets = [{"name": "auto", "format": "auto", "group_size": 32, "device": "device.json", "method": "rtn"}]
    folder = tmp_path / "p"
    folder.mkdir()
    (folder / "device.json").write_text('{"device_class": "x86-amx"}')
    project(folder, targets=targets)
    text = run(folder)
    assert "format auto came to gptq: " in text
    (target,) = report(folder)["targets"]
    assert target["format"] == "gptq" and any(note.startswith("format auto came to gptq") for note in target["notes"])
    assert any(note.startswith("format auto") for note in Ledger.read(folder / "output" / "auto").notes)


def test_without_validation_artifacts_are_written_and_checked_only(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", targets=[TARGETS[0]], calibration=None, validation=None).parent
    content_ = settings(targets=[TARGETS[0]])
    del content_["validation"], content_["calibration"]
    write_yaml(folder, content_)
    assert "no validation section: nothing was measured" in run(folder)
    ledger = Ledger.read(folder / "output" / "gptq")
    assert ledger.validation is None and ledger.calibration is None
    assert ledger.notes == ("no calibration text: every input channel weighs the same",)
    assert not (folder / "output" / "report.json").exists()


def test_the_ledger_names_no_folder_of_this_machine(finished: Path, tmp_path: Path) -> None:
    for name in NAMES:
        text = (finished / "output" / name / "conversion.json").read_text()
        assert str(finished.parent) not in text and "/tmp" not in text
    # Nor when the yaml is full of them.
    folder = project(tmp_path / "p").parent
    dataset = {"path": "text", "data_files": str(folder / "text.txt")}
    write_yaml(
        folder,
        settings(
            model={"source": str(folder / "model")},
            calibration={"dataset": dataset, "samples": 2, "sequence_length": 32},
            validation=settings()["validation"] | {"dataset": dataset},
            output=str(tmp_path / "out"),
        ),
    )
    run(folder, "--only", "gptq")
    text = (tmp_path / "out" / "gptq" / "conversion.json").read_text()
    assert str(tmp_path) not in text and tmp_path.name not in text
    ledger = Ledger.read(tmp_path / "out" / "gptq")
    assert ledger.source["name"] == "model" and ledger.calibration is not None and ledger.validation is not None
    assert ledger.calibration["dataset"]["data_files"] == ["./text.txt"]


def test_equal_runs_in_different_folders_give_equal_bytes(finished: Path, zygote: Zygote, tmp_path: Path) -> None:
    folder = project(tmp_path / "deep" / "er" / "p").parent
    result = zygote.run("run", "p/pipeline.yaml", cwd=folder.parent)
    assert result.returncode == 0, result.stderr
    ours, theirs = content(folder / "output"), content(finished / "output")
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if ours[name] != theirs[name]} == set(VOLATILE)
    assert same_report(report(folder)) == same_report(report(finished))


def test_intermediate_results_leave_no_hidden_states_behind(finished: Path) -> None:
    names = {path.name for path in (finished / "work").rglob("*")}
    assert not [name for name in names if name.startswith("hidden-") or name.endswith(".partial")]
    for file in (finished / "work").glob("calibrate-*/layer-*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert "errors" in opened.metadata()["found"]


def test_compensated_and_refined_targets_run_from_the_command_line(tmp_path: Path) -> None:
    """Every format with [gptq, refine]: what is written is whole, and loses less than rounding to nearest."""
    targets = [
        {"name": f"{format}-{method[0]}", "format": format, "group_size": 32, "method": method, "lm_head": "keep"}
        for format in ("gptq", "awq", "tinygemm")
        for method in (["rtn"], ["gptq", "refine"])
    ]
    # Some tokens more than channels: fewer say little of the inputs.
    calibration = {"dataset": {"path": "text", "data_files": "text.txt"}, "samples": 24, "sequence_length": LENGTH}
    yaml = project(tmp_path / "project", targets=targets, calibration=calibration)
    result = invoke("run", str(yaml))
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "project" / "output" / "report.json").read_text())
    losses = {target["name"]: target["kl"] for target in report["targets"]}
    for format in ("gptq", "awq", "tinygemm"):
        assert losses[f"{format}-gptq"] < losses[f"{format}-rtn"], format
        ledger = Ledger.read(tmp_path / "project" / "output" / f"{format}-gptq")
        methods = {linear.method for row in ledger.tensors for linear in row.linears}
        assert methods == {("gptq", "refine")}
