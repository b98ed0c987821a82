"""What ONNX Runtime computes of a phone artifact, through its manifest alone, beside the reference in fp32."""

from __future__ import annotations

from typing import Any

import onnxruntime
import torch

from export.phone.artifact import PhoneArtifact
from models.checkpoint import Checkpoint
from validate.engines.run import STEPS
from validate.engines.workers.phone_host import Host
from validate.score import Comparison, Progress, compare_logits, final_hidden, no_progress

NAME = "ONNX Runtime on the CPU, its optimisations off"


def steps_of(tokens: int, wanted: int = STEPS) -> int:
    """Of a window's tokens, how many go through decode: at least one goes through prefill."""
    return min(wanted, tokens - 1)


def host_logits(host: Host, window: torch.Tensor, steps: int = STEPS) -> torch.Tensor:
    """Logits fp32 [tokens, vocabulary] of a window int64 [tokens]: chunks through prefill, the last tokens in steps."""
    return torch.from_numpy(host.score(window.numpy(), steps_of(len(window), steps)))


def compare_host(
    artifact: PhoneArtifact, checkpoint: Checkpoint, windows: torch.Tensor, progress: Progress = no_progress
) -> Comparison:
    """What the graphs lose against the reference checkpoint, which computes in fp32: another dtype's rounding would be
    most of the difference."""
    hidden = final_hidden(checkpoint, windows, torch.float32)
    host = Host(artifact.folder)
    return compare_logits(
        checkpoint, hidden, lambda index: host_logits(host, windows[index]), windows, torch.float32, progress
    )


def continue_in_host(artifact: PhoneArtifact, prompts: torch.Tensor, tokens: int) -> torch.Tensor:
    """Greedy continuations int64 [prompts, tokens] of prompts int64 [prompts, length]."""
    host = Host(artifact.folder)
    return torch.tensor([host.continue_greedily(prompt.numpy(), tokens) for prompt in prompts])


def measure_host(
    artifact: PhoneArtifact,
    checkpoint: Checkpoint,
    windows: torch.Tensor,
    prompts: torch.Tensor,
    continuations: torch.Tensor,
    progress: Progress = no_progress,
) -> tuple[dict[str, Any], tuple[float, ...]]:
    """The engine's entry in the report, and its mean negative log-likelihood of each window.

    Args:
        windows: int64 [windows, tokens].
        prompts, continuations: int64 [prompts, length], and the reference's continuations.
    """
    scores = compare_host(artifact, checkpoint, windows, progress)
    greedy = continue_in_host(artifact, prompts, continuations.shape[1])
    entry = {
        "name": NAME,
        "version": str(onnxruntime.__version__),
        "against": "the reference in float32",
        "perplexity": scores.perplexity,
        "perplexity_ratio": scores.perplexity_ratio,
        "perplexity_ratio_se": scores.perplexity_ratio_se,
        "kl": scores.kl,
        "top1": scores.top1,
        "snr_db": scores.snr_db,
        "tokens": scores.tokens,
        "greedy": {"identical": int((greedy == continuations).all(dim=1).sum()), "of": len(prompts)},
    }
    return entry, scores.nll
