"""Running engines: what reaches them, how their failures are told, and how their answers are compared with ours.

The engine here is a script that answers from our own scorer, so that no engine need be installed.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from convert import cli
from export.artifact import Artifact, Expansion
from models.errors import BadInput, EnvironmentProblem
from tests.helpers import tokens
from tests.workshop import Workshop, spec
from validate.engines import run
from validate.engines.check import EngineSpec, check_engine
from validate.engines.compare import Positions, compare_engine, compare_greedy, positions, worst_gap
from validate.engines.run import (
    ENGINES,
    ROOT,
    Job,
    Result,
    check_format,
    check_processor,
    installed_version,
    run_engine,
    run_jobs,
)
from validate.score import compare, final_hidden

WINDOWS, PROMPTS = tokens(2, 24), tokens(2, 8, seed=1)
PYTHON = Path(sys.executable)
# Answers every job as a model that finds all tokens alike, unless the artifact's folder says what to do instead.
FAKE = """
import json, math, os, pathlib, signal, sys
import torch
from safetensors.torch import save_file

engine, jobs, results = sys.argv[1], json.load(open(sys.argv[2])), pathlib.Path(sys.argv[3])
print("fake engine", os.environ.get("HF_HUB_OFFLINE"), os.environ.get("PYTHONPATH"))
for index, job in enumerate(jobs):
    order = pathlib.Path(job["artifact"]).name
    if order == "die":
        os.kill(os.getpid(), signal.SIGILL)
    if order == "leave":
        sys.exit("ImportError: libcuda.so")
    summary = {"error": "ValueError: no such kernel"} if order == "refuse" else {
        "version": "1.2", "kernels": {"q_proj": "Fake W4A8" if order == "eight" else "Fake"}}
    shape = (len(job["windows"]), len(job["windows"][0]) - 1)
    tensors = {"logprobs": torch.full(shape, -math.log(512)), "top1": torch.zeros(shape, dtype=torch.int64),
               "top1_logprobs": torch.zeros(shape)}
    if job["greedy_tokens"]:
        tensors["greedy"] = torch.zeros(len(job["prompts"]), job["greedy_tokens"], dtype=torch.int64)
    save_file(tensors, results / f"{index}.safetensors")
    (results / f"{index}.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every engine is the fake one, and installed."""
    script = tmp_path / "worker.py"
    script.write_text(FAKE)
    monkeypatch.setattr(run, "WORKER", script)
    monkeypatch.setattr(run, "installed_version", lambda engine, python: "1.2")
    monkeypatch.setattr(run, "has_avx512", lambda: True)


def job(workshop: Workshop, tmp_path: Path, name: str = "works", format: str = "gptq") -> Job:
    folder = shutil.copytree(workshop.built("llama-tied", spec(format)).artifact.folder, tmp_path / name)
    return Job(Artifact(folder), WINDOWS, PROMPTS, 4)


def test_the_answers_of_every_job_come_back_typed(workshop: Workshop, tmp_path: Path, fake: None) -> None:
    jobs = [job(workshop, tmp_path, name) for name in ("works", "refuse", "eight")]
    first, refused, eight = run_jobs("vllm", PYTHON, jobs, tmp_path / "log")
    assert isinstance(first, Result) and first.version == "1.2" and not first.w4a8
    assert first.logprobs.shape == first.top1.shape == (2, 23) and first.greedy is not None
    assert isinstance(refused, BadInput)
    assert str(refused) == f"{tmp_path / 'refuse'}: engine vllm 1.2 does not run it: ValueError: no such kernel"
    assert isinstance(eight, Result) and eight.w4a8
    # Nothing is fetched, and our packages do not stand before the engine's own.
    assert (tmp_path / "log").read_text() == "fake engine 1 None\n"


def test_an_engine_that_refuses_an_artifact_is_bad_input(workshop: Workshop, tmp_path: Path, fake: None) -> None:
    with pytest.raises(BadInput, match="does not run it: ValueError: no such kernel"):
        run_engine("vllm", PYTHON, job(workshop, tmp_path, "refuse"))


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("die", "engine vllm 1.2: ended with SIGILL while it ran .*/die; its last line: "),
        ("leave", "ended with exit code 1 before it loaded anything; its last line: ImportError: libcuda.so"),
    ],
)
def test_an_engine_that_dies_is_a_problem_of_the_machine(
    workshop: Workshop, tmp_path: Path, fake: None, name: str, wanted: str
) -> None:
    with pytest.raises(EnvironmentProblem, match=wanted):
        run_engine("vllm", PYTHON, job(workshop, tmp_path, name))


def test_no_engine_sees_a_damaged_artifact(workshop: Workshop, tmp_path: Path, fake: None) -> None:
    damaged = job(workshop, tmp_path)
    config = json.loads((damaged.artifact.folder / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (damaged.artifact.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match="desc_act: expected false, found true"):
        run_jobs("vllm", PYTHON, [Job(Artifact(damaged.artifact.folder), WINDOWS, PROMPTS, 4)], tmp_path / "log")
    assert not (tmp_path / "log").exists()


def test_an_engine_is_refused_what_it_does_not_load(workshop: Workshop, tmp_path: Path, fake: None) -> None:
    with pytest.raises(BadInput, match="engine gptqmodel: runs artifacts of format gptq or awq; this one is tinygemm"):
        run_engine("gptqmodel", PYTHON, job(workshop, tmp_path, format="tinygemm"))
    for engine in ("onnxruntime", "qnn"):
        with pytest.raises(BadInput, match=f"engine {engine}: runs artifacts of format phone; this one is awq"):
            check_format(engine, "awq")


def test_an_engine_without_a_kernel_for_this_processor_is_told_before_it_starts(
    workshop: Workshop, tmp_path: Path, fake: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "has_avx512", lambda: False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for format in ("gptq", "awq"):
        wanted = f"engine vllm: its kernel for {format} needs a processor with AVX-512, .* here it runs tinygemm"
        with pytest.raises(EnvironmentProblem, match=wanted):
            run_jobs("vllm", PYTHON, [job(workshop, tmp_path, format, format)], tmp_path / "log")
    assert not (tmp_path / "log").exists()
    check_processor("vllm", "tinygemm")
    check_processor("gptqmodel", "gptq")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    check_processor("vllm", "gptq")


def test_an_absent_engine_is_told_with_the_line_that_installs_it(tmp_path: Path) -> None:
    for engine in ("vllm", "gptqmodel"):
        with pytest.raises(EnvironmentProblem, match=rf"{engine}.* is not installed for .*: `make engines`"):
            installed_version(engine, PYTHON)
    with pytest.raises(EnvironmentProblem, match="none/python cannot be started: .*No such file"):
        installed_version("vllm", tmp_path / "none" / "python")


def test_the_version_is_read_without_starting_the_engine() -> None:
    import transformers

    assert installed_version("transformers", PYTHON) == transformers.__version__


def test_the_command_line_knows_the_engines() -> None:
    assert tuple(ENGINES) == cli.ENGINES


def test_workers_stand_alone() -> None:
    """They run where edge-convert is not installed: imports of its packages are for what is optional there."""
    workers = sorted((ROOT / "validate" / "engines" / "workers").glob("*.py"))
    assert {f"{engine}_session.py" for engine, known in ENGINES.items() if known.distributions} <= {
        file.name for file in workers
    }
    for file in workers:
        top = [line for line in file.read_text().splitlines() if line.startswith(("import ", "from "))]
        assert not [
            line for line in top if line.split()[1].split(".")[0] in ("convert", "validate", "export", "models")
        ]


def test_our_answers_are_those_of_the_scorer(workshop: Workshop) -> None:
    expansion = Expansion(workshop.built("llama-tied", spec("gptq")).artifact)
    hidden = final_hidden(expansion, WINDOWS, torch.bfloat16)
    ours = positions(expansion, hidden, WINDOWS, torch.bfloat16)
    scores = compare(expansion, hidden, expansion, hidden, WINDOWS, torch.bfloat16)
    assert ours.logprobs.shape == ours.top1.shape == ours.margins.shape == (2, 23)
    assert -ours.logprobs.double().mean(dim=1) == pytest.approx(torch.tensor(scores.nll).double(), rel=1e-6)
    assert bool((ours.margins >= 0).all()) and bool(ours.clear.any()) and not bool(ours.clear.all())
    # bf16 has eight bits: margins are whole steps, except where the second logit's steps are finer.
    assert bool((ours.margins / ours.steps * 8 == (ours.margins / ours.steps * 8).round()).all())


def answers(**changes: torch.Tensor) -> Result:
    values = {
        "logprobs": torch.tensor([[-1.0, -2.0, -3.0]]),
        "top1": torch.tensor([[5, 6, 7]]),
        "top1_logprobs": torch.zeros(1, 3),
        "greedy": torch.tensor([[1, 2], [3, 4]]),
    }
    return Result("1.2", {}, **{**values, **changes})


OURS = Positions(
    torch.tensor([[-1.0, -2.0, -3.0]]),
    torch.tensor([[5, 6, 8]]),
    torch.tensor([[1.0, 0.3, 0.05]]),
    torch.tensor([[0.125, 0.0625, 0.0625]]),
)


def test_equal_answers_have_no_gap_and_near_ties_are_not_judged() -> None:
    found = compare_engine(answers(), OURS)
    assert found == {
        "perplexity": pytest.approx(math.exp(2)),
        "gap": 0,
        "gap_se": 0,
        "top1": 1,
        "top1_of": 2,
        "logprob_gap": 0,
        "tokens": 3,
    }


def test_the_gap_is_relative_and_differences_do_not_cancel() -> None:
    found = compare_engine(answers(logprobs=torch.tensor([[-1.3, -1.7, -3.3]]), top1=torch.tensor([[5, 9, 8]])), OURS)
    assert found["gap"] == pytest.approx(math.expm1(0.1), rel=1e-5)
    assert found["logprob_gap"] == pytest.approx(0.3, rel=1e-5)
    assert (found["top1"], found["top1_of"]) == (0.5, 2)


def test_without_a_clear_position_there_is_no_share() -> None:
    found = compare_engine(answers(), replace(OURS, margins=torch.zeros(1, 3)))
    assert (found["top1"], found["top1_of"]) == (None, 0)


def test_a_margin_of_a_few_steps_may_be_rounding() -> None:
    steps = torch.tensor([[0.5, 0.125, 0.01]])
    found = replace(OURS, margins=torch.tensor([[2.0, 0.625, 0.11]]), steps=steps).clear
    assert found.tolist() == [[False, True, True]]


def test_continuations_are_counted_whole() -> None:
    assert compare_greedy(answers(), torch.tensor([[1, 2], [3, 5]])) == {"identical": 1, "of": 2}


@pytest.mark.parametrize(
    "gaps, wanted", [([], None), ([0.1, 0.3], 0.3), ([0.1, None], None), ([math.nan, 0.1], None), ([math.inf], None)]
)
def test_the_judged_gap_is_the_worst_that_was_measured(gaps: list[float | None], wanted: float | None) -> None:
    assert worst_gap(gaps) == wanted


@pytest.mark.parametrize("name, against", [("works", "the expanded weights"), ("eight", "the emulated W4A8 kernel")])
def test_an_engines_entry_says_what_it_was_compared_with(
    workshop: Workshop, tmp_path: Path, fake: None, name: str, against: str
) -> None:
    artifact = job(workshop, tmp_path, name).artifact
    hidden = final_hidden(Expansion(artifact), WINDOWS, torch.bfloat16)
    greedy = torch.zeros(2, 4, dtype=torch.int64)
    engine = EngineSpec("vllm", PYTHON, "1.2")
    found = check_engine(engine, artifact, Expansion(artifact), WINDOWS, hidden, PROMPTS, greedy, torch.bfloat16)
    assert found["name"] == "vllm" and found["version"] == "1.2" and found["against"] == against
    assert found["perplexity"] == pytest.approx(512, rel=1e-5) and found["tokens"] == 46
    assert found["gap"] > 0.1 and found["greedy"] == {"identical": 2, "of": 2}
