"""Validation that people gate on: whole pipelines, nightly runs, engines that refuse, texts that overlap."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from models.errors import BadInput, EnvironmentProblem
from tests.helpers import TEXT
from tests.runs import TARGETS, content, invoke, project, same_report, settings, write_yaml
from validate.history import History

Copy = Callable[[], Path]
NAMES = ("gptq", "awq", "tiny")
# One target, where the others would only repeat it.
ONE = ("--only", "tiny")


def judged(folder: Path, **changes: Any) -> Path:
    """The project with another validation section; returns the yaml."""
    return write_yaml(folder, settings(validation=settings()["validation"] | changes))


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "output" / "report.json").read_text())
    return found


def history(folder: Path) -> History:
    return History(folder / "output" / "history.sqlite")


def say(*arguments: Any, code: int = 0) -> str:
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    return result.output


def test_a_pipelines_artifacts_are_measured_anew_from_their_bytes(copy: Copy) -> None:
    folder = copy()
    before, first = content(folder / "output"), report(folder)
    for file in folder.glob("work/measure-*/measurement.json"):
        # What was measured before is not taken for granted.
        file.write_text(file.read_text().replace('"kl":', '"kl": 99, "was":'))
    result = invoke("validate", folder / "pipeline.yaml", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == report(folder) and same_report(found) == same_report(first)
    changed = {name for name, value in content(folder / "output").items() if value != before[name]}
    assert changed == {"report.json", "report.html", "junit.xml", "history.sqlite"}
    assert [entry.target for entry in history(folder).entries()] == [*NAMES, *NAMES]


def test_only_the_named_targets_are_validated(copy: Copy) -> None:
    folder = copy()
    say("validate", folder / "pipeline.yaml", "--only", "tiny")
    assert [target["name"] for target in report(folder)["targets"]] == ["tiny"]
    assert "no such target; did you mean 'tiny'?" in say("validate", folder / "pipeline.yaml", "--only", "tini", code=2)


def test_artifacts_that_changed_or_are_gone_are_refused_all_at_once(copy: Copy) -> None:
    folder = copy()
    before = report(folder)
    with (folder / "output" / "gptq" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x99")
    (folder / "output" / "awq" / "tokenizer.json").write_text("{}")
    (folder / "output" / "tiny" / "conversion.json").unlink()
    text = say("validate", folder / "pipeline.yaml", code=2)
    assert "gptq: model.safetensors: its bytes are not those that were written" in text
    assert "awq: tokenizer.json: its bytes are not those" in text
    assert "tiny: no artifact there; `convert run` writes it" in text
    assert report(folder) == before and len(history(folder).entries()) == 3


def test_validate_before_any_run_says_what_is_missing(tmp_path: Path) -> None:
    yaml = project(tmp_path / "p")
    assert "no artifacts there; `convert run` writes them" in say("validate", yaml, code=2)
    assert not (tmp_path / "p" / "output").exists()
    values = settings()
    del values["validation"]
    write_yaml(tmp_path / "p", values)
    assert "validation: this key is required to validate, and missing" in say("validate", yaml, code=2)
    assert "no_pipeline.yaml: cannot be read" in say("validate", tmp_path / "no_pipeline.yaml", code=2)


def test_an_artifact_of_an_older_pipeline_is_validated_with_a_warning(copy: Copy) -> None:
    folder = copy()
    targets = [dict(target) for target in TARGETS]
    targets[1]["group_size"] = 64
    write_yaml(folder, settings(targets=targets))
    text = say("validate", folder / "pipeline.yaml")
    assert "warning: awq: the pipeline or its source has changed since this was written" in text
    assert "gptq: the pipeline" not in text


@pytest.mark.parametrize(
    "options, wanted",
    [
        (("--reference", "model"), "--reference: only for an artifact; the pipeline says it itself"),
        (("--tokens", 96, "--text", "x"), "--text, --tokens: only for an artifact"),
    ],
)
def test_options_of_an_artifact_are_no_options_of_a_pipeline(
    finished: Path, options: tuple[Any, ...], wanted: str
) -> None:
    assert wanted in say("validate", finished / "pipeline.yaml", *options, code=2)


def test_options_of_a_pipeline_are_no_options_of_an_artifact(finished: Path) -> None:
    artifact = finished / "output" / "gptq"
    assert "--only: only for a pipeline" in say("validate", artifact, "--only", "gptq", code=2)
    assert "an artifact needs the model that it was made from" in say("validate", artifact, code=2)
    text = say("validate", artifact, "--reference", finished / "nowhere", code=2)
    assert "nowhere: expected a folder with config.json and safetensors" in text


def test_a_single_artifact_may_have_its_report_too(finished: Path, tmp_path: Path) -> None:
    options = ("--reference", finished / "model", "--report", tmp_path / "r")
    text = say("validate", finished / "output" / "tiny", *options)
    assert {path.name for path in (tmp_path / "r").iterdir()} == {"report.json", "report.html", "junit.xml"}
    assert "report.html" in text and "warning: the validation text is the calibration text" in text


def test_another_build_of_the_reference_is_told(finished: Path, tmp_path: Path) -> None:
    other = project(tmp_path / "p").parent / "model"
    (other / "generation_config.json").write_text('{"eos_token_id": 2}')
    text = say("validate", finished / "output" / "tiny", "--reference", other)
    assert "warning: the reference is not the source that this was made from: generation_config.json differ" in text


def test_nightly_converts_what_changed_and_measures_everything(copy: Copy) -> None:
    folder = copy()
    (folder / "output" / "gptq" / "tokenizer.json").unlink()
    marks = [file.stat().st_mtime_ns for file in sorted(folder.glob("work/measure-*/measurement.json"))]
    judged(folder, gates={"no_worse_than": "best", "max_engine_gap": 1.0})
    text = say("nightly", folder / "pipeline.yaml")
    assert "gptq: damaged, so it is written again" in text and "awq: up to date" in text
    run = history(folder).entries()[0].run
    for name in NAMES:
        assert f"{name}: beside the last run: perplexity equal to that of {run}" in text
        assert (
            f"{name}: gate held: no_worse_than: expected 0, found 0 (best: perplexity equal to that of {run})" in text
        )
    again = [file.stat().st_mtime_ns for file in sorted(folder.glob("work/measure-*/measurement.json"))]
    assert all(a != b for a, b in zip(marks, again, strict=True))
    cases = ElementTree.parse(folder / "output" / "junit.xml").findall(".//testcase")
    assert [case.get("name") for case in cases] == ["max_engine_gap", "no_worse_than"] * 3


def test_a_run_that_got_worse_fails_and_does_not_become_the_measure(copy: Copy) -> None:
    folder = copy()
    entries = history(folder).entries()
    good = [replace(entry, run="good", nll=tuple(value - 0.1 for value in entry.nll)) for entry in entries]
    history(folder).append(good)
    yaml = judged(folder, gates={"no_worse_than": "last"})
    for _ in range(2):
        text = say("nightly", yaml, *ONE, code=1)
        assert "error: target tiny: no_worse_than: expected " in text and "found 0.10517" in text
        assert "above that of good, beyond the noise" in text
    failed = history(folder).entries()[-1].run
    assert f"{failed}: later runs may be compared with it" in say("history", yaml, "--accept", failed)
    assert f"equal to that of {failed}" in say("run", yaml, *ONE)


def test_the_first_run_has_nothing_to_be_compared_with_and_the_second_has(tmp_path: Path) -> None:
    yaml = project(tmp_path / "p", targets=[TARGETS[2] | {"method": "rtn"}])
    judged_values = settings(targets=[TARGETS[2] | {"method": "rtn"}])
    judged_values["validation"]["gates"] = {"no_worse_than": "last"}
    judged_values["validation"]["history"] = "nights/history.sqlite"
    write_yaml(yaml.parent, judged_values)
    text = say("nightly", yaml, code=1)
    assert "no_worse_than: not evaluated: last: the history has no earlier run of tiny" in text
    assert (yaml.parent / "nights" / "history.sqlite").is_file()
    assert "perplexity equal to that of" in say("nightly", yaml)


def test_a_history_of_another_model_is_not_compared_and_says_why(copy: Copy) -> None:
    folder = copy()
    path = folder / "nights.sqlite"
    History(path).append([replace(entry, model_sha256="0" * 64) for entry in history(folder).entries()])
    yaml = judged(folder, history="nights.sqlite", gates={"no_worse_than": "last"})
    text = say("run", yaml, *ONE, code=1)
    assert "cannot be compared: it is of another model (000000000000, this one " in text
    # A run that is named is refused before any work: nothing could change that.
    run = History(path).entries()[0].run
    yaml = judged(folder, history="nights.sqlite", gates={"no_worse_than": run})
    count = len(History(path).entries())
    text = say("run", yaml, code=2)
    assert f"error: validation.gates.no_worse_than: {run} cannot be compared: it is of another model" in text
    assert len(History(path).entries()) == count


@pytest.mark.parametrize(
    "wanted, message",
    [
        ("lst", "no_worse_than: lst: no such run in {folder}/output/history.sqlite; did you mean 'last'?"),
        ("2020-01-01-abc", "no_worse_than: 2020-01-01-abc: no such run in"),
        ("old.json", "no such file: {folder}/old.json"),
    ],
)
def test_a_baseline_that_is_not_there_is_refused_before_any_work(copy: Copy, wanted: str, message: str) -> None:
    folder = copy()
    text = say("run", judged(folder, gates={"no_worse_than": wanted}), code=2)
    assert message.format(folder=folder) in text and "gptq: up to date" not in text


def test_misspelt_gates_are_refused_with_the_line(copy: Copy) -> None:
    folder = copy()
    text = say("run", judged(folder, gates={"max_pplexity_increase": 0.1, "no_worse_then": "last"}), code=2)
    assert "max_pplexity_increase: unknown key; did you mean 'max_perplexity_increase'?" in text
    assert "no_worse_then: unknown key; did you mean 'no_worse_than'?" in text


def test_another_machines_report_may_be_the_measure(copy: Copy) -> None:
    folder = copy()
    baseline = folder / "main.json"
    baseline.write_text((folder / "output" / "report.json").read_text())
    yaml = judged(folder, gates={"no_worse_than": "main.json"})
    assert f"perplexity equal to that of {report(folder)['run']['id']}" in say("run", yaml, *ONE)
    for schema, message in (
        (99, "schema: expected 2 at most, found 99: a newer"),
        (1, "schema: expected 2, found 1: run it"),
    ):
        baseline.write_text(json.dumps({**json.loads(baseline.read_text()), "schema": schema}))
        assert f"main.json: {message}" in say("run", yaml, code=2)
    for text in ("{", "[]", "{}", '{"schema": 2}'):
        baseline.write_text(text)
        assert "main.json: " in say("run", yaml, code=2)


def test_a_history_that_is_none_is_refused_before_any_work(copy: Copy) -> None:
    folder = copy()
    (folder / "mine.txt").write_text("Call me Ishmael. " * 50)
    text = say("run", judged(folder, history="mine.txt"), code=2)
    assert "mine.txt: expected a history of edge-convert" in text and "up to date" not in text
    assert (folder / "mine.txt").read_text().startswith("Call me")


def refuse(error: type[BadInput] | type[EnvironmentProblem]) -> Callable[..., Any]:
    def run_engine(engine: str, python: Path, job: Any) -> Any:
        raise error(f"{job.artifact.folder}: engine {engine} 1.2 does not run it: ValueError: no such kernel")

    return run_engine


@pytest.mark.usefixtures("avx512")
@pytest.mark.parametrize("kind, lacking, code", [(BadInput, False, 1), (EnvironmentProblem, True, 3)])
def test_an_engine_that_does_not_run_an_artifact_ends_no_run(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, kind: Any, lacking: bool, code: int
) -> None:
    folder = copy()
    monkeypatch.setattr("validate.engines.check.run_engine", refuse(kind))
    values = settings(engines={"vllm": {"python": sys.executable}})
    values["validation"] |= {"engines": ["vllm"], "gates": {"max_engine_gap": 1.0, "min_top1": 0.05}}
    monkeypatch.setattr("convert.engines.installed_version", lambda *_: "1.2")
    yaml = write_yaml(folder, values)
    text = say("run", yaml, *ONE, code=code)
    said = "engine vllm 1.2 does not run it: ValueError: no such kernel"
    found = report(folder)
    for target in found["targets"]:
        assert target["kl"] > 0 and not target["passed"]
        (engine,) = target["engines"]
        assert engine["failed"] == f"{target['name']}: {said}" and engine["lacking"] is lacking
        top1, gap = target["gates"]
        assert (gap["passed"], gap["measured"], top1["passed"]) == (False, None, True)
        assert f"error: target {target['name']}: max_engine_gap: expected 1, found not measured" in text
        assert f"error: target {target['name']}: engine vllm: {target['name']}: {said}" in text
    assert said in (folder / "output" / "report.html").read_text()
    assert len(history(folder).entries()) == 4 and not history(folder).entries()[-1].passed
    # Nothing of it is kept: a mended engine runs the next time, also without a gate.
    calls: list[str] = []
    monkeypatch.setattr("validate.measure.check_engine", lambda spec, *_: calls.append(spec.name) or found_engine())
    del values["validation"]["gates"]
    write_yaml(folder, values)
    say("run", yaml, *ONE)
    assert calls == ["vllm"]


def found_engine() -> dict[str, Any]:
    figures = {
        "perplexity": 12.0,
        "gap": 0.0,
        "gap_se": 0.0,
        "top1": 1.0,
        "top1_of": 5,
        "logprob_gap": 0.0,
        "tokens": 6,
    }
    return {
        "name": "vllm",
        "version": "1.2",
        "kernels": {},
        "against": "the expanded weights",
        "greedy": None,
        **figures,
    }


def test_an_evaluation_text_that_calibration_saw_is_told_and_strictly_refused(copy: Copy) -> None:
    folder = copy()
    warning = "100% of the validation text stands in the calibration text"
    assert report(folder)["warnings"][0].startswith(warning)
    assert warning in (folder / "output" / "report.html").read_text()
    assert f"warning: {warning}" in say("run", folder / "pipeline.yaml", *ONE)
    for command in ("run", "validate", "nightly"):
        text = say(command, judged(folder, strict=True), code=2)
        assert f"error: {warning}" in text and "(validation: strict: true)" in text
    # Another text passes.
    (folder / "other.txt").write_bytes(TEXT.read_bytes()[200_000:206_000])
    values = settings()
    values["validation"] |= {"strict": True, "dataset": {"path": "text", "data_files": "other.txt"}}
    say("run", write_yaml(folder, values), *ONE)
    assert report(folder)["warnings"] == []
