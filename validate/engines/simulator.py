"""A phone artifact in Qualcomm's compiler and simulator: a few tokens, because a chunk takes it seconds to minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from calibrate.replay import Replay
from export.phone.artifact import PhoneArtifact
from models.checkpoint import Checkpoint
from models.errors import BadInput
from validate.engines.compare import compare_engine, positions_of
from validate.engines.onnxruntime import host_logits, steps_of
from validate.engines.run import Job, run_engine
from validate.engines.workers.phone_host import Host
from validate.score import decibels, final_hidden

# Tokens that go through decode, after one chunk of prefill.
STEPS = 4


def check_simulator(
    engine: str, python: Path, artifact: PhoneArtifact, checkpoint: Checkpoint, windows: torch.Tensor
) -> dict[str, Any]:
    """Compiles every graph with no operator left to the CPU, and runs a chunk and a few steps.

    Args:
        checkpoint: the reference.
        windows: int64 [windows, tokens]; the beginning of the first is run.

    Returns:
        The engine's entry in the report; ``snr_db`` of its logits and ``cpu_snr_db`` of ONNX Runtime's on the CPU, both
        against the reference in fp32.

    Raises:
        BadInput: naming the operators that would fall back to the CPU, or a float table that is no part of its own.
        EnvironmentProblem: when the engine is not there, or dies.
    """
    if artifact.float_tables:
        raise BadInput(
            f"{artifact.folder}: {', '.join(artifact.float_tables)}: HTP does not compile a Gather from a float table;"
            " write the target with `embedding: uint16`, or with `split`"
        )
    window = windows[:1, : artifact.manifest.prefill + STEPS]
    steps = steps_of(window.shape[1], STEPS)
    job = Job(artifact, window, window[:, :0], 0, steps=steps, keep_logits=True)
    result = run_engine(engine, python, job)
    assert result.logits is not None
    cpu = host_logits(Host(artifact.folder), window[0], steps)
    reference = _reference(checkpoint, window)
    return {
        "name": engine,
        "version": result.version,
        "kernels": result.kernels,
        "against": "ONNX Runtime on the CPU",
        **compare_engine(result, positions_of(cpu[None], window)),
        "snr_db": _snr(reference, result.logits[0]),
        "cpu_snr_db": _snr(reference, cpu),
    }


@torch.no_grad()
def _reference(checkpoint: Checkpoint, window: torch.Tensor) -> torch.Tensor:
    """The reference's logits fp32 [tokens, vocabulary] of a window int64 [1, tokens]."""
    hidden = final_hidden(checkpoint, window, torch.float32)
    with Replay(checkpoint, torch.float32).end() as logits:
        return logits(window, hidden)[0]


def _snr(reference: torch.Tensor, found: torch.Tensor) -> float:
    signal, noise = reference.double(), (reference - found).double()
    return decibels(float(signal.square().sum()), float(noise.square().sum()))
