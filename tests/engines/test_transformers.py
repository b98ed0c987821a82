"""Artifacts in transformers as its own process: tinygemm through the loader that `import export.serving` registers,
gptq and awq as users of the engines' environment load them, through GPTQModel's kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from export.artifact import Expansion
from export.tinygemm import host_isa
from tests.helpers import tokens
from tests.workshop import Workshop, spec
from validate.engines.compare import compare_engine, positions
from validate.engines.run import Job, Result, run_jobs
from validate.score import final_hidden

WINDOWS = tokens(4, 64)
CASES = ("llama-untied", "qwen2-biases", "phi3", "spark2_5")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Job, Result]]:
    workshop = Workshop(tmp_path_factory.mktemp("engines"))
    jobs = []
    for case in CASES:
        artifact = workshop.built(case, spec("tinygemm", isa=host_isa())).artifact
        jobs.append(Job(artifact, WINDOWS, WINDOWS[:, :8], 4))
    results = run_jobs("transformers", Path(sys.executable), jobs, timeout=600)
    found = {}
    for case, job, result in zip(CASES, jobs, results, strict=True):
        assert isinstance(result, Result), result
        found[case] = (job, result)
    return found


@pytest.mark.parametrize("case", CASES)
def test_transformers_gives_the_expansion(outcomes: dict[str, tuple[Job, Result]], case: str) -> None:
    job, result = outcomes[case]
    assert "TinygemmLinear" in result.kernels.values()
    expansion = Expansion(job.artifact)
    hidden = final_hidden(expansion, WINDOWS, torch.bfloat16)
    found = compare_engine(result, positions(expansion, hidden, WINDOWS, torch.bfloat16))
    assert found["top1"] == 1 and found["logprob_gap"] < 0.1 and found["gap"] < 0.02


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, engines_python: Path) -> dict[str, tuple[Job, Result]]:
    workshop = Workshop(tmp_path_factory.mktemp("engines"))
    jobs = [
        Job(workshop.built("llama-untied", target).artifact, WINDOWS, WINDOWS[:, :8], 4)
        # The search gives a symmetric grid scales of both signs.
        for target in (spec(format, quantize_head=False, method=("search",)) for format in ("gptq", "awq"))
    ]
    results = run_jobs("transformers", engines_python, jobs, tmp_path_factory.mktemp("log") / "log", timeout=900)
    found = {}
    for job, result in zip(jobs, results, strict=True):
        assert isinstance(result, Result), result
        found[job.artifact.layout.FORMAT] = (job, result)
    return found


@pytest.mark.parametrize("format", ["gptq", "awq"])
def test_transformers_itself_loads_gptq_and_awq_and_gives_the_expansion(
    packed: dict[str, tuple[Job, Result]], format: str
) -> None:
    job, result = packed[format]
    assert len(result.kernels) == 7 and not {"Linear"} & set(result.kernels.values())
    expansion = Expansion(job.artifact)
    hidden = final_hidden(expansion, WINDOWS, torch.bfloat16)
    found = compare_engine(result, positions(expansion, hidden, WINDOWS, torch.bfloat16))
    assert found["top1"] > 0.98 and found["logprob_gap"] < 0.1 and found["gap"] < 0.02
