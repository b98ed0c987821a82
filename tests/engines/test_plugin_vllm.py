"""vLLM with this project's plugin: tinygemm artifacts of every shape, and Spark-X2.5 in all formats."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from calibrate.text import cut_windows, tokenise
from export import tinygemm
from export.artifact import Artifact, Expansion
from models.checkpoint import Folder
from models.tokenizer import load_tokenizer
from tests.engines.processor import BUILT, WNA16
from tests.helpers import CONFIGS, ROOT, TEXT, tokens
from tests.runs import environment, invoke, write_yaml
from tests.workshop import Workshop, spec
from validate.engines.compare import compare_engine, positions
from validate.engines.run import Job, Result, run_jobs
from validate.greedy import continue_greedily
from validate.score import final_hidden

SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in CONFIGS},
    "llama-deep": ("llama", {"num_hidden_layers": 3}),
}
# Name -> source, format, and what is special about the target.
ARTIFACTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "split, quantised head": ("llama", "tinygemm", {}),
    "split, kept head": ("llama", "tinygemm", {"quantize_head": False}),
    "skipped layer": ("llama-deep", "tinygemm", {"skip": ("model.layers.1.*",)}),
    "biases": ("qwen2", "tinygemm", {"group_size": 128}),
    "fused": ("phi3", "tinygemm", {"group_size": -1}),
    "another machine's": ("llama", "tinygemm", {"isa": "neon"}),
    "another machine's, fused": ("phi3", "tinygemm", {"isa": "avx2", "group_size": 64}),
    "Spark, fused": ("spark2_5", "tinygemm", {}),
    "Spark, split": ("spark2_5", "tinygemm", {"fused": False}),
    "Spark, kept head": ("spark2_5", "tinygemm", {"quantize_head": False}),
    "Spark, GPTQ, fused": ("spark2_5", "gptq", {}),
    "Spark, GPTQ, split": ("spark2_5", "gptq", {"fused": False}),
    "Spark, AWQ, fused": ("spark2_5", "awq", {}),
    "Spark, AWQ, split": ("spark2_5", "awq", {"fused": False}),
}
RUN = {name: target for name, target in ARTIFACTS.items() if BUILT or target[1] == "tinygemm"}
WINDOWS = tokens(3, 64)
PROMPTS = tokens(48, 12, seed=1)
STEPS = 8
# A greedy step whose first two logits are nearer than this may go either way in bf16.
CLEAR = 0.4


@dataclass(frozen=True)
class Run:
    """An artifact, what vLLM made of it, and our own continuation of the same prompt, which has no near-tie."""

    artifact: Artifact
    greedy: torch.Tensor
    result: Result


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("plugin"), SOURCES)


@pytest.fixture(scope="module")
def runs(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory, engines_python: Path) -> dict[str, Run]:
    jobs, continued = [], []
    for source, format, changes in RUN.values():
        here = {"isa": tinygemm.host_isa()} if format == "tinygemm" else {}
        artifact = workshop.built(source, spec(format, **{**here, **changes})).artifact
        found = continue_greedily(Expansion(artifact), PROMPTS, STEPS, torch.bfloat16)
        # The prompt with the widest margins, alone: its steps are single rows, which the operator computes.
        best = int(found.margins.min(dim=1).values.argmax())
        assert found.margins[best].min() > CLEAR, source
        continued.append(found.tokens[best : best + 1])
        jobs.append(Job(artifact, WINDOWS, PROMPTS[best : best + 1], STEPS, "off"))
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    results = run_jobs("vllm", engines_python, jobs, log, timeout=1200)
    for job, result in zip(jobs, results, strict=True):
        assert isinstance(result, Result), (job.artifact.folder, result, log)
    return {
        name: Run(job.artifact, greedy, result)
        for name, job, greedy, result in zip(RUN, jobs, continued, results, strict=True)
    }


@pytest.mark.parametrize("name", [name if name in RUN else pytest.param(name, marks=WNA16) for name in ARTIFACTS])
def test_vllm_gives_the_expansion(runs: dict[str, Run], name: str) -> None:
    run = runs[name]
    expansion = Expansion(run.artifact)
    hidden = final_hidden(expansion, WINDOWS, torch.bfloat16)
    found = compare_engine(run.result, positions(expansion, hidden, WINDOWS, torch.bfloat16))
    assert found["top1"] > 0.99 and found["top1_of"] > found["tokens"] / 2
    # The logits lie between 8 and 16, where bf16 has steps of 0.06; a wrong scale, zero or shard costs whole units.
    assert found["logprob_gap"] < 0.1 and found["gap"] < 0.02
    assert run.result.greedy is not None and torch.equal(run.result.greedy, run.greedy)


def test_the_plugins_method_holds_every_quantised_module(runs: dict[str, Run]) -> None:
    for name, (source, format, changes) in RUN.items():
        kernels = runs[name].result.kernels
        if format == "tinygemm":
            assert set(kernels.values()) == {"TinygemmMethod"}, name
            assert ("lm_head" in kernels) == changes.get("quantize_head", True), name
            out = "out_proj" if source == "spark2_5" else "o_proj"
            assert set(kernels) >= {"qkv_proj", out, "gate_up_proj", "down_proj"}, name


def test_bytes_for_another_machine_give_the_same_answers_as_for_this_one(runs: dict[str, Run]) -> None:
    here, there = runs["split, quantised head"].result, runs["another machine's"].result
    split, fused = runs["Spark, split"].result, runs["Spark, fused"].result
    for one, other in ((here, there), (split, fused)):
        assert torch.equal(one.logprobs, other.logprobs) and torch.equal(one.top1, other.top1)


def test_the_plugin_alone(engines_python: Path) -> None:
    # What artifacts must not hold is refused by our own check before an engine starts, so the plugin is asked itself.
    command = [str(engines_python), str(ROOT / "tests" / "engines" / "plugin_checks.py")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "all checks passed" in done.stdout, done.stderr[-3000:]


def test_a_trained_spark_has_the_perplexity_of_its_expansion(tmp_path: Path, engines_python: Path) -> None:
    content = {
        "model": {"source": str(ROOT / "examples" / "spark-tiny")},
        "targets": [
            {"name": qkv, "format": "tinygemm", "group_size": 64, "method": "rtn", "qkv": qkv, "lm_head": "quantize"}
            for qkv in ("fused", "split")
        ],
        "validation": {"dataset": {"path": "text", "data_files": str(TEXT)}, "sequence_length": 64, "tokens": 256},
    }
    assert invoke("run", write_yaml(tmp_path, content)).exit_code == 0
    artifacts = [Artifact(tmp_path / "output" / qkv) for qkv in ("fused", "split")]
    tokenizer = load_tokenizer(Folder(artifacts[0].folder))
    windows = cut_windows(tokenise(tokenizer, TEXT.read_text(encoding="utf-8")), 6, 256, "windows")
    jobs = [Job(artifact, windows, windows[:1, :32], 8, "off") for artifact in artifacts]
    fused, split = run_jobs("vllm", engines_python, jobs, timeout=600)
    assert isinstance(fused, Result) and isinstance(split, Result)
    assert torch.equal(fused.logprobs, split.logprobs)
    expansion = Expansion(artifacts[0])
    hidden = final_hidden(expansion, windows, torch.bfloat16)
    found = compare_engine(fused, positions(expansion, hidden, windows, torch.bfloat16))
    assert found["gap"] < 0.002 and found["top1"] == 1
