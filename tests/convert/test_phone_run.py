"""Phone targets by the real command line: planned, written, measured by their graphs, expanded, resumed and refused."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from transformers import AutoModelForCausalLM

import export.phone.structure
from convert.config import load
from convert.estimate import estimate
from convert.prepare import prepare
from convert.target import Target
from export.opened import open_artifact
from export.phone.artifact import PhoneArtifact
from export.phone.plan import PhonePlan
from tests.runs import LENGTH, WINDOWS, command, content, environment, invoke, project, settings, times, write_yaml

PHONE = {"format": "phone", "context": 64, "prefill": 16, "method": ["rotate", "rtn"], "embedding": "float"}
GPTQ = {"format": "gptq", "group_size": 32, "method": "rtn"}
HYBRID = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder after a run with a phone target beside a 4-bit one."""
    folder = tmp_path_factory.mktemp("phone-run")
    # All tokens by the graphs too.
    validation = settings()["validation"] | {"engine_tokens": LENGTH * WINDOWS}
    invocation = invoke("run", project(folder, "spark2_5", config=HYBRID, targets=[PHONE, GPTQ], validation=validation))
    assert invocation.exit_code == 0, invocation.output
    return folder


def test_all_that_a_run_has_made_is_of_use_to_the_next(finished: Path) -> None:
    assert list(finished.glob("work/observe-*"))
    assert invoke("clean", finished / "pipeline.yaml").output.startswith("0 unused stages")


def target(folder: Path) -> dict[str, Any]:
    report = json.loads((folder / "output" / "report.json").read_text())
    found: dict[str, Any] = next(entry for entry in report["targets"] if entry["format"] == "phone")
    return found


def test_a_run_measures_the_graphs_themselves(finished: Path) -> None:
    entry = target(finished)
    engine = entry["engine"]
    assert engine["name"].startswith("ONNX Runtime") and engine["against"] == "the reference in float32"
    # Sixteen bits of activations and eight of weights lose little of a model that bf16 computes.
    assert engine["snr_db"] > 25 and engine["top1"] > 0.9 and engine["gap"] < 0.05
    assert engine["greedy"]["of"] == 3 and engine["tokens"] == entry["tokens"]
    assert 8 < entry["bits_per_weight"] < 8.5
    assert entry["perplexity_ratio"] == pytest.approx(1, abs=0.05)


def test_the_artifact_is_whole_and_accounts_for_every_tensor(finished: Path) -> None:
    artifact = open_artifact(finished / "output" / "phone")
    assert isinstance(artifact, PhoneArtifact)
    artifact.check()
    names = {path.name for path in artifact.folder.iterdir()}
    assert {"prefill.onnx", "decode.onnx", "model.data", "ranges.json", "manifest.json", "conversion.json"} <= names
    assert {"tokenizer.json", "tokenizer_config.json"} <= names
    assert artifact.ledger.calibration is not None
    stored = artifact.stored()
    codes = [name for name, info in stored.items() if info.dtype == torch.int8]
    # Four fused or plain linears and the gate's, in two layers, and the head.
    assert len(codes) == 2 * 6 + 1


def test_a_finished_run_took_no_more_disk_than_was_planned(finished: Path) -> None:
    promised = estimate(prepare(load(finished / "pipeline.yaml")))
    (planned,) = (target for target in promised.targets if target.plan.spec.format == "phone")
    assert isinstance(planned.plan, PhonePlan)
    stored = (finished / "output" / "phone" / "model.data").stat().st_size
    # Scales stand in the graphs; beside the tensors a file has gaps up to the next page.
    scales = 4 * sum(linear.rows for linear in planned.plan.linears)
    assert stored == pytest.approx(planned.file_bytes - scales, rel=0.2)
    work = sum(path.stat().st_size for path in (finished / "work").rglob("*") if path.is_file())
    assert work < promised.work_bytes


def test_a_run_holds_about_as_much_memory_as_was_planned(tmp_path: Path) -> None:
    """A model whose layer weighs about as much as Python and its packages do."""
    wide = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 49152}
    yaml = project(tmp_path, config=wide, targets=[{**PHONE, "method": "rtn"}], validation=None)
    planned = estimate(prepare(load(yaml))).memory_bytes
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command("run", yaml), env=environment(), stdout=log, stderr=log)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, (tmp_path / "log").read_text()
    # Linux counts in kibibytes.
    assert 0.7 * planned < usage.ru_maxrss * 1024 < 1.1 * planned


def test_a_second_run_touches_nothing(finished: Path) -> None:
    before = times(finished / "output" / "phone")
    again = invoke("run", finished / "pipeline.yaml")
    assert again.exit_code == 0 and "phone: up to date" in again.output
    assert times(finished / "output" / "phone") == before


def test_another_run_gives_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    other = project(tmp_path, "spark2_5", config=HYBRID, targets=[PHONE])
    assert invoke("run", other).exit_code == 0
    first, second = (content(folder / "output" / "phone") for folder in (finished, tmp_path))
    # The ledger tells of the run.
    first.pop("conversion.json"), second.pop("conversion.json")
    assert first == second


def test_expand_gives_a_plain_checkpoint(finished: Path, tmp_path: Path) -> None:
    assert invoke("expand", finished / "output" / "phone", tmp_path / "plain").exit_code == 0
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    source = AutoModelForCausalLM.from_pretrained(finished / "model", dtype=torch.float32)
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        a, b = source(ids).logits, plain(ids).logits
    assert 0 < float((a - b).square().sum() / a.square().sum()) < 5e-3
    names = {path.name for path in (tmp_path / "plain").iterdir()}
    assert "tokenizer.json" in names and not names & {"manifest.json", "ranges.json", "decode.onnx"}


def test_inspect_shows_the_graphs(finished: Path) -> None:
    shown = invoke("inspect", finished / "output" / "phone", "--json")
    assert shown.exit_code == 0
    found = json.loads(shown.output)
    assert found["caches"] == {"sliding_attention": "ring of 15 slots", "full_attention": "full of 64 slots"}
    assert found["operators"]["prefill.onnx"]["RMSNormalization"] == 5
    assert invoke("inspect", finished / "output" / "phone").exit_code == 0


def test_validate_measures_the_same_again_and_runs_the_engine_by_itself(finished: Path) -> None:
    artifact = finished / "output" / "phone"
    result = invoke("validate", artifact, "--reference", finished / "model", "--engine", "onnxruntime", "--json")
    assert result.exit_code == 0, result.output
    (entry,) = json.loads(result.stdout)["targets"]
    assert entry["engine"]["snr_db"] == target(finished)["engine"]["snr_db"]
    (ran,) = entry["engines"]
    assert ran["name"] == "onnxruntime" and ran["against"] == "the expanded weights" and ran["gap"] < 0.05


def test_explain_ranks_the_weights_and_says_what_activations_add(finished: Path) -> None:
    """The rotated model is compared with the rotated source, linear by linear, those too that other formats keep."""
    arguments = ("explain", finished / "output" / "phone", "--reference", finished / "model", "--linears", 2)
    tokens = ("--tokens", LENGTH * WINDOWS)
    result = invoke(*arguments, *tokens, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["rewritten"] == [] and len(found["linears"]) == 2 * 8 + 1
    assert {"model.layers.1.self_attn.g_proj", "lm_head"} <= {linear["name"] for linear in found["linears"]}
    assert found["kl"] > 0 and found["check"]["correlation"] > 0.9
    engine = target(finished)["engine"]
    assert found["activations"]["graphs_kl"] == engine["kl"]
    changes = {entry["yaml"]: entry["change"] for entry in found["advice"]}
    assert [change for change in changes.values()] == [{"method": ["rotate", "search"]}]
    for yaml in changes:
        (written,) = YAML(typ="safe").load(yaml)["targets"]
        assert Target.model_validate(written).phone_options == Target.model_validate(PHONE).phone_options
        assert written["method"] == ["rotate", "search"]
    shown = invoke(*arguments, *tokens).output
    assert "what rounding of activations adds is in none of them" in shown
    assert f"{engine['kl']:.4g} against the source in float32" in shown


def test_texts_longer_than_the_context_are_not_measured_and_say_so(finished: Path) -> None:
    options = ("--reference", finished / "model", "--sequence-length", "100", "--json")
    result = invoke("validate", finished / "output" / "phone", *options)
    assert result.exit_code == 0, result.output
    (entry,) = json.loads(result.stdout)["targets"]
    assert entry["engine"]["skipped"] == "texts of 100 tokens; the context is 64"


def test_a_damaged_graph_is_told(finished: Path) -> None:
    artifact = finished / "output" / "phone"
    whole = (artifact / "decode.onnx").read_bytes()
    try:
        (artifact / "decode.onnx").write_bytes(whole[:-7])
        result = invoke("validate", artifact, "--reference", finished / "model")
        assert result.exit_code == 2 and "decode.onnx: its bytes are not those that were written" in result.output
    finally:
        (artifact / "decode.onnx").write_bytes(whole)


def plan_of(folder: Path, **changes: Any) -> str:
    (folder / "text.txt").touch()
    result = invoke("plan", write_yaml(folder, settings(**changes)))
    assert result.exit_code == 2, result.output
    return result.output


def test_plan_names_everything_that_does_not_suit_a_phone_at_once(finished: Path, tmp_path: Path) -> None:
    model = {"source": str(finished / "model")}
    problems = plan_of(tmp_path, model=model, targets=[{**PHONE, "context": 24, "split": {"parts": 9}}])
    for problem in (
        "calibration.sequence_length: expected at most the context (24), found 32",
        "validation.sequence_length: expected at most the context (24), found 32",
        "split: parts: expected at least 3 (embedding, layers, head) and at most 4 for 2 layers, found 9",
    ):
        assert problem in problems
    chunk = "a prefill chunk and 16 decode steps that ranges are seen in"
    assert f"context: expected at least 32, {chunk}, found 24" in problems
    short = plan_of(tmp_path, model=model, targets=[{**PHONE, "prefill": 24}])
    assert f"calibration.sequence_length: expected at least 40, {chunk}, found 32" in short
    uncalibrated = plan_of(tmp_path, model=model, targets=[PHONE], calibration=None)
    assert "the ranges of activations need a `calibration:` text: without" in uncalibrated
    assert "-1.6 dB (Spark on a phone)" in uncalibrated and "`i_know: [uncalibrated-ranges]`" in uncalibrated


def test_plan_says_what_was_chosen_although_it_was_measured_broken(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").touch()
    chosen = {**PHONE, "activations": "uint8", "i_know": ["uint8-activations"]}
    yaml = write_yaml(tmp_path, settings(model={"source": str(finished / "model")}, targets=[chosen]))
    planned = invoke("plan", yaml)
    assert planned.exit_code == 0, planned.output
    assert "note: i_know: uint8-activations: 8-bit activations gave 5.1 dB" in planned.output
    blind = settings(model={"source": str(finished / "model")}, calibration=None)
    blind["targets"] = [{**PHONE, "i_know": ["uncalibrated-ranges"]}]
    planned = invoke("plan", write_yaml(tmp_path, blind))
    assert planned.exit_code == 0, planned.output
    assert "note: i_know: uncalibrated-ranges: without a calibration text, ranges gave -1.6 dB" in planned.output
    float_table = write_yaml(tmp_path, settings(model={"source": str(finished / "model")}, targets=[PHONE]))
    assert "note: embedding: float: Qualcomm's HTP does not compile a Gather" in invoke("plan", float_table).output


def test_a_family_without_a_phone_export_is_refused_with_the_reason(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = export.phone.structure.family_of
    monkeypatch.setattr(
        export.phone.structure, "family_of", lambda config, name: replace(known(config, name), phone=False)
    )
    refused = plan_of(tmp_path, model={"source": str(finished / "model")}, targets=[PHONE])
    assert "model_type 'spark2_5': there is no phone export for this family" in refused


def test_engines_of_the_other_formats_refuse_a_phone_artifact(finished: Path) -> None:
    artifact = finished / "output" / "phone"
    result = invoke("validate", artifact, "--reference", finished / "model", "--engine", "vllm")
    assert (
        result.exit_code == 2 and "runs artifacts of format gptq or awq or tinygemm; this one is phone" in result.output
    )
