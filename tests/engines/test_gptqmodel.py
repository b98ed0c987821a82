"""GPTQModel reads the zero-point words and the words' order that vLLM ignores, so it is the judge of those."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from export.artifact import Expansion
from models.errors import BadInput
from tests.helpers import tokens
from tests.workshop import Workshop, spec
from validate.engines.compare import compare_engine, positions
from validate.engines.run import Job, Result, run_jobs
from validate.greedy import continue_greedily
from validate.score import final_hidden

WINDOWS, PROMPTS, STEPS = tokens(4, 64), tokens(64, 12, seed=1), 8
# A greedy step whose first two logits are nearer than this may go either way in bf16.
CLEAR = 0.25
# Quantised by the search, which gives a symmetric grid scales of both signs.
CASES = [("llama-untied", "gptq"), ("llama-untied", "awq"), ("qwen2-biases", "gptq"), ("qwen2-biases", "awq")]
KERNELS = {"gptq": "TorchAtenLinear", "awq": "TorchAtenAwqLinear"}


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, engines_python: Path
) -> dict[tuple[str, str], tuple[Job, Result]]:
    workshop = Workshop(tmp_path_factory.mktemp("engines"))
    jobs = []
    for case, format in CASES:
        artifact = workshop.built(case, spec(format, quantize_head=False, method=("search",))).artifact
        clear = (continue_greedily(Expansion(artifact), PROMPTS, STEPS, torch.bfloat16).margins > CLEAR).all(dim=1)
        jobs.append(Job(artifact, WINDOWS, PROMPTS[clear][:4], STEPS))
    results = run_jobs("gptqmodel", engines_python, jobs, tmp_path_factory.mktemp("log") / "log", timeout=600)
    assert not [result for result in results if isinstance(result, BadInput)]
    return {case: (job, result) for case, job, result in zip(CASES, jobs, results, strict=True)}  # type: ignore[misc]


@pytest.mark.parametrize("case", CASES)
def test_gptqmodel_gives_the_expansion(
    outcomes: dict[tuple[str, str], tuple[Job, Result]], case: tuple[str, str]
) -> None:
    job, result = outcomes[case]
    assert set(result.kernels.values()) == {KERNELS[case[1]]}
    expansion = Expansion(job.artifact)
    hidden = final_hidden(expansion, WINDOWS, torch.bfloat16)
    found = compare_engine(result, positions(expansion, hidden, WINDOWS, torch.bfloat16))
    # The int4 operator rounds each product once more than a bf16 one, and random layers amplify it.
    assert found["top1"] > 0.98 and found["logprob_gap"] < 0.1 and found["gap"] < 0.02
    assert torch.equal(result.greedy, continue_greedily(expansion, job.prompts, STEPS, torch.bfloat16).tokens)
