"""One artifact in one engine: runs it and compares every answer with our scorer's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from export.artifact import Artifact
from export.opened import AnyArtifact, expansion_of
from export.phone.artifact import PhoneArtifact
from models.checkpoint import Checkpoint
from models.errors import BadInput, EnvironmentProblem
from validate.engines.compare import compare_engine, compare_greedy, positions
from validate.engines.run import ENGINES, W4A8, Job, run_engine
from validate.engines.simulator import check_simulator
from validate.kernels import W4A8Linear
from validate.score import final_hidden
from validate.swap import kernel_swap

SIMULATOR = "qnn"


@dataclass(frozen=True)
class EngineSpec:
    """An engine to run artifacts in.

    Attributes:
        python: the interpreter of its environment.
        version: that was found there.
        w4a8: see `validate.engines.run.Job`.
    """

    name: str
    python: Path
    version: str
    w4a8: W4A8 = "auto"

    @property
    def formats(self) -> tuple[str, ...]:
        """That it loads."""
        return ENGINES[self.name].formats

    def key(self) -> dict[str, str]:
        """What decides its answers, besides the artifact and the text."""
        return {"name": self.name, "version": self.version, "w4a8": self.w4a8}


def check_engine(
    spec: EngineSpec,
    artifact: AnyArtifact,
    checkpoint: Checkpoint,
    windows: torch.Tensor,
    hidden: torch.Tensor,
    prompts: torch.Tensor,
    greedy: torch.Tensor,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Runs the artifact and compares: with the expanded weights, or, where the engine rounds activations to 8 bits,
    with our emulation of that kernel. A simulator runs a few tokens only.

    Args:
        checkpoint: the reference.
        windows: int64 [windows, tokens].
        hidden: of the expanded weights for them, as from `validate.score.final_hidden`.
        prompts, greedy: int64 [prompts, length], and how the expanded weights continue them.

    Returns:
        The engine's entry in the report. Where the engine refused the artifact or died, ``failed`` says what it said,
        ``lacking`` whether that was for want of something on this machine, and ``gap`` is None.
    """
    try:
        if spec.name == SIMULATOR and isinstance(artifact, PhoneArtifact):
            return check_simulator(spec.name, spec.python, artifact, checkpoint, windows)
        result = run_engine(spec.name, spec.python, Job(artifact, windows, prompts, greedy.shape[1], spec.w4a8))
    except (BadInput, EnvironmentProblem) as error:
        # What was measured until now is worth a report.
        lacking = isinstance(error, EnvironmentProblem)
        # Where the artifact lies is this machine's business.
        said = str(error).replace(str(artifact.folder), artifact.folder.name)
        return {"name": spec.name, "version": spec.version, "gap": None, "failed": said, "lacking": lacking}
    expansion = expansion_of(artifact)
    if result.w4a8 and isinstance(artifact, Artifact):
        swap = kernel_swap(artifact, expansion, W4A8Linear, dtype)
        emulated = final_hidden(expansion, windows, dtype, swap)
        ours = positions(expansion, emulated, windows, dtype, swap)
    else:
        ours = positions(expansion, hidden, windows, dtype)
    return {
        "name": spec.name,
        "version": result.version,
        "kernels": result.kernels,
        "against": "the emulated W4A8 kernel" if result.w4a8 else "the expanded weights",
        **compare_engine(result, ours),
        "greedy": compare_greedy(result, greedy),
    }
