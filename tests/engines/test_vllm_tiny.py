"""Tiny models of every shape that artifacts take, run by vLLM: its answers are the expanded weights' and, with 8-bit
activations, those of our emulation swapped in for its kernel, to the last bit."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from export.artifact import Artifact, Expansion
from models.errors import BadInput
from tests.engines.processor import BUILT, WNA16
from tests.helpers import CONFIGS, tokens
from tests.runs import environment
from tests.workshop import Workshop, spec
from validate.engines.compare import compare_engine, positions
from validate.engines.run import Job, Result, run_jobs
from validate.greedy import continue_greedily
from validate.kernels import W4A8Linear
from validate.score import final_hidden
from validate.swap import kernel_swap

SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in CONFIGS if name != "spark2_5"},
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "llama-deep": ("llama", {"num_hidden_layers": 3}),
}
# Name -> source, format, and what is special about the target.
ARTIFACTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "untied head": ("llama-untied", "gptq", {}),
    "tied head, quantised": ("llama", "gptq", {"group_size": 64}),
    "tied head, kept": ("llama", "gptq", {"quantize_head": False}),
    "skipped layer": ("llama-deep", "gptq", {"skip": ("model.layers.1.*",)}),
    "biases": ("qwen2", "gptq", {}),
    "QK norms": ("qwen3", "gptq", {}),
    "sliding window": ("mistral", "gptq", {}),
    "fused on disk": ("phi3", "gptq", {}),
    "groups of 128": ("llama-untied", "gptq", {"group_size": 128}),
    "a group a row": ("llama-untied", "gptq", {"group_size": -1}),
    "signed scales": ("llama-untied", "gptq", {"method": ("search",)}),
    "AWQ": ("llama-untied", "awq", {}),
    "AWQ, tied head, quantised": ("llama", "awq", {"group_size": 64}),
    "AWQ, skipped layer": ("llama-deep", "awq", {"skip": ("model.layers.1.*",)}),
    "AWQ, biases, groups of 128": ("qwen2", "awq", {"group_size": 128}),
    "AWQ, fused on disk": ("phi3", "awq", {}),
    "AWQ, a group a row": ("qwen3", "awq", {"group_size": -1}),
}
WINDOWS = tokens(4, 64)
PROMPTS = tokens(64, 12, seed=1)
STEPS = 8
# A greedy step whose first two logits are nearer than this may go either way in bf16.
CLEAR = 0.25


@dataclass(frozen=True)
class Run:
    """An artifact with what vLLM made of it; prompts are those that our own scorer continues without a near-tie."""

    artifact: Artifact
    greedy: torch.Tensor
    weights: Result
    kernel: Result
    emulated: Result


# As vLLM's own platform chooses among its builds.
KERNEL = """
import torch
from vllm.platforms.cpu import CpuPlatform
CpuPlatform.import_kernels()
print(hasattr(torch.ops._C, "cpu_gemm_wna16"))
"""


def test_vllm_has_its_kernel_on_the_processors_that_we_say(engines_python: Path) -> None:
    done = subprocess.run(
        [engines_python, "-c", KERNEL], env=environment(), capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.split()[-1] == str(BUILT)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, engines_python: Path) -> dict[str, Run]:
    workshop = Workshop(tmp_path_factory.mktemp("engines"), SOURCES)
    jobs: list[Job] = []
    continued = []
    for source, format, changes in ARTIFACTS.values():
        artifact = workshop.built(source, spec(format, **changes)).artifact
        found = continue_greedily(Expansion(artifact), PROMPTS, STEPS, torch.bfloat16)
        clear = (found.margins > CLEAR).all(dim=1)
        assert clear.sum() >= 2, source
        prompts = PROMPTS[clear]
        continued.append(found.tokens[clear])
        jobs.append(Job(artifact, WINDOWS, prompts, STEPS, "off"))
        jobs.append(Job(artifact, WINDOWS, prompts, STEPS, "on"))
        jobs.append(Job(artifact, WINDOWS, prompts, STEPS, "on", emulate_w4a8=True))
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    results: list[Result] = []
    for job, outcome in zip(jobs, run_jobs("vllm", engines_python, jobs, log, timeout=1200), strict=True):
        assert not isinstance(outcome, BadInput), (job.artifact.folder, outcome, log)
        results.append(outcome)
    return {
        name: Run(jobs[3 * i].artifact, continued[i], *results[3 * i : 3 * i + 3]) for i, name in enumerate(ARTIFACTS)
    }


@WNA16
@pytest.mark.parametrize("name", ARTIFACTS)
def test_weights_only_gives_the_expansion(runs: dict[str, Run], name: str) -> None:
    run = runs[name]
    assert set(run.weights.kernels.values()) == {"CPUWNA16LinearKernel W4A16"}
    expansion = Expansion(run.artifact)
    hidden = final_hidden(expansion, WINDOWS, torch.bfloat16)
    found = compare_engine(run.weights, positions(expansion, hidden, WINDOWS, torch.bfloat16))
    assert found["top1"] == 1 and found["top1_of"] > found["tokens"] / 2
    # The logits lie between 8 and 16, where bf16 has steps of 0.06; a wrong scale, zero or bias costs whole units.
    assert found["logprob_gap"] < 0.1 and found["gap"] < 0.02
    assert run.weights.greedy is not None and torch.equal(run.weights.greedy, run.greedy)


@WNA16
@pytest.mark.parametrize("name", ARTIFACTS)
def test_eight_bit_activations_are_the_emulation_to_the_last_bit(runs: dict[str, Run], name: str) -> None:
    run = runs[name]
    assert set(run.kernel.kernels.values()) == {"CPUWNA16LinearKernel W4A8"}
    assert set(run.emulated.kernels.values()) == {"CPUWNA16LinearKernel W4A8 (emulated)"}
    assert not torch.equal(run.kernel.logprobs, run.weights.logprobs)
    for what in ("logprobs", "top1", "top1_logprobs", "greedy"):
        assert torch.equal(getattr(run.kernel, what), getattr(run.emulated, what)), what


@WNA16
@pytest.mark.parametrize("name", ARTIFACTS)
def test_eight_bit_activations_give_what_our_scorer_computes(runs: dict[str, Run], name: str) -> None:
    run = runs[name]
    expansion = Expansion(run.artifact)
    swap = kernel_swap(run.artifact, expansion, W4A8Linear, torch.bfloat16)
    hidden = final_hidden(expansion, WINDOWS, torch.bfloat16, swap)
    found = compare_engine(run.kernel, positions(expansion, hidden, WINDOWS, torch.bfloat16, swap))
    # Attention rounds otherwise there, and then an activation may fall on the next of its 255 steps.
    assert found["logprob_gap"] < 0.2 and found["gap"] < 0.05


@WNA16
def test_the_head_is_quantised_where_the_artifact_says_so(runs: dict[str, Run]) -> None:
    with_head = {name for name, run in runs.items() if "lm_head" in run.weights.kernels}
    assert with_head == set(ARTIFACTS) - {"tied head, kept"}
