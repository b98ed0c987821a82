"""Measures an artifact from its bytes: the expanded weights, the engine's arithmetic, and greedy continuations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from calibrate.grid import concatenate
from calibrate.text import Windows
from export.artifact import Artifact, Expansion
from models.checkpoint import Checkpoint
from models.errors import BadInput
from validate.gates import GateResult, evaluate
from validate.greedy import Continuations, continue_greedily, divergences
from validate.kernels import TinygemmLinear, W4A8Linear
from validate.score import Comparison, Swap, compare, final_hidden

Progress = Callable[[str, int, int], None]
ENGINES: Mapping[str, tuple[str, type[nn.Module]]] = {
    "gptq": ("vLLM W4A8 kernel (bit-exact emulation)", W4A8Linear),
    "awq": ("torch int4 operator (as GPTQModel packs AWQ)", TinygemmLinear),
    "tinygemm": ("torch int4 operator", TinygemmLinear),
}


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        windows: evaluation tokens.
        prompts: int64 [prompts, length], continued by ``greedy_tokens`` tokens.
        engine_windows: how many of the windows, evenly spread, the engine's arithmetic is scored on; 0 for none.
        gates: bounds by gate; None is no bound.
        dtype: compute dtype of reference and expansion.
    """

    windows: Windows
    prompts: torch.Tensor
    greedy_tokens: int
    engine_windows: int
    gates: Mapping[str, float | None]
    dtype: torch.dtype

    def key(self) -> dict[str, Any]:
        """What decides a reference's numbers, besides the weights."""
        return {
            "windows": self.windows.digest(),
            "prompts": self.prompts.tolist(),
            "greedy_tokens": self.greedy_tokens,
            "dtype": str(self.dtype),
        }


@dataclass(frozen=True)
class Reference:
    """The reference's final hidden states [windows, tokens, hidden] and greedy continuations."""

    hidden: torch.Tensor
    continuations: Continuations


@dataclass
class TargetReport:
    """One target's entry of the report (see README: how to read the report)."""

    name: str
    format: str
    bits_per_weight: float
    file_bytes: int
    scores: Comparison
    greedy: dict[str, Any]
    engine: dict[str, Any]
    gates: list[GateResult] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    kept: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(gate.passed for gate in self.gates)

    def judge(self, gates: Mapping[str, float | None]) -> None:
        """Evaluates the gates on what was measured."""
        self.gates = evaluate(
            gates,
            {
                "perplexity_increase": self.scores.perplexity_ratio - 1,
                "kl": self.scores.kl,
                "top1": self.scores.top1,
                "greedy_identical": self.greedy["identical"],
                "engine_gap": self.engine.get("gap"),
                "snr_db": self.scores.snr_db,
                "bits_per_weight": self.bits_per_weight,
            },
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON entry; the scores stand beside the name."""
        scores = {k: v for k, v in asdict(self.scores).items() if not k.startswith("reference_") and k != "nll"}
        head = {key: getattr(self, key) for key in ("name", "format", "bits_per_weight", "file_bytes")}
        tail = {
            "greedy": self.greedy,
            "engine": self.engine,
            "gates": [asdict(gate) for gate in self.gates],
            "notes": list(self.notes),
            "kept": self.kept,
        }
        return head | scores | tail


def measure_reference(checkpoint: Checkpoint, settings: Settings, cache: Path, progress: Progress) -> Reference:
    """Scores the reference once; ``cache`` is a folder for this checkpoint and these settings only."""
    file = cache / "reference.safetensors"
    if not file.is_file():
        hidden = final_hidden(
            checkpoint, settings.windows.ids, settings.dtype, progress=lambda d, t: progress("reference", d, t)
        )
        continuations = continue_greedily(checkpoint, settings.prompts, settings.greedy_tokens, settings.dtype)
        partial = file.with_name(".partial.safetensors")
        tensors = {"hidden": hidden, "tokens": continuations.tokens, "margins": continuations.margins}
        save_file({k: v.contiguous() for k, v in tensors.items()}, partial)
        partial.replace(file)
    with safe_open(file, "pt") as stored:
        continuations = Continuations(stored.get_tensor("tokens"), stored.get_tensor("margins"))
        return Reference(stored.get_tensor("hidden"), continuations)


def measure(
    artifact: Artifact,
    checkpoint: Checkpoint,
    reference: Reference,
    settings: Settings,
    progress: Progress,
) -> TargetReport:
    """Checks an artifact's bytes and measures what they lost against the reference checkpoint.

    Raises:
        BadInput: when the artifact's bytes are not what its ledger and layout say.
    """
    artifact.check()
    name = artifact.folder.name
    expansion = Expansion(artifact)
    ids = settings.windows.ids
    hidden = final_hidden(expansion, ids, settings.dtype, progress=lambda d, t: progress(f"{name}: weights", d, t))
    scores = compare(checkpoint, reference.hidden, expansion, hidden, ids, settings.dtype)
    continuations = continue_greedily(expansion, settings.prompts, settings.greedy_tokens, settings.dtype)
    diverged = divergences(reference.continuations, continuations)
    report = TargetReport(
        name=name,
        format=str(artifact.config["quant_method"]),
        bits_per_weight=artifact.bits_per_weight,
        file_bytes=sum(p.stat().st_size for p in artifact.folder.iterdir() if p.suffix == ".safetensors"),
        scores=scores,
        greedy={
            "identical": len(settings.prompts) - len(diverged),
            "of": len(settings.prompts),
            "tokens": settings.greedy_tokens,
            "divergences": [asdict(d) for d in diverged],
        },
        engine=_engine(artifact, expansion, checkpoint, reference, settings, scores, progress),
        notes=artifact.ledger.notes,
        kept={row.tensor: row.reason for row in artifact.ledger.tensors if row.outcome in ("kept", "tied")},
    )
    report.judge(settings.gates)
    return report


def _engine(
    artifact: Artifact,
    expansion: Expansion,
    checkpoint: Checkpoint,
    reference: Reference,
    settings: Settings,
    scores: Comparison,
    progress: Progress,
) -> dict[str, Any]:
    """Scores the engine's arithmetic; where the kernel cannot take the artifact, says why."""
    name, kernel = ENGINES[str(artifact.config["quant_method"])]
    if not settings.engine_windows:
        return {"name": name, "skipped": "validation: engine: false"}
    total = len(settings.windows.ids)
    chosen = [i * total // settings.engine_windows for i in range(settings.engine_windows)]
    ids = settings.windows.ids[chosen]
    swap = kernel_swap(artifact, expansion, kernel, settings.dtype)
    what = f"{artifact.folder.name}: engine"
    try:
        hidden = final_hidden(expansion, ids, settings.dtype, swap, lambda d, t: progress(what, d, t))
    except UnsuitedKernelError as error:
        return {"name": name, "skipped": str(error)}
    engine = compare(checkpoint, reference.hidden[chosen], expansion, hidden, ids, settings.dtype, swap)
    weights_only = math.exp(sum(scores.nll[i] for i in chosen) / len(chosen))
    return {
        "name": name,
        "perplexity": engine.perplexity,
        "perplexity_ratio": engine.perplexity_ratio,
        "perplexity_ratio_se": engine.perplexity_ratio_se,
        "kl": engine.kl,
        "tokens": engine.tokens,
        "gap": abs(engine.perplexity / weights_only - 1),
    }


class UnsuitedKernelError(Exception):
    """The kernel cannot compute with this artifact's linears."""


def kernel_swap(artifact: Artifact, expansion: Expansion, kernel: type[nn.Module], dtype: torch.dtype) -> Swap:
    """Gives the kernel's module for every linear of the model whose weight the artifact stores quantised."""
    rows = {row.tensor: row for row in artifact.ledger.tensors}

    def swap(module: str) -> nn.Module | None:
        row = rows.get(f"{module}.weight")
        if row is None or row.outcome != "quantized":
            return None
        if dtype != torch.bfloat16:
            raise UnsuitedKernelError(f"the kernel computes in bfloat16, the model in {dtype}")
        quantized = concatenate([artifact.quantized(stored) for stored in row.stored_as])
        bias = f"{module}.bias"
        try:
            return kernel(quantized, expansion.read(bias) if bias in expansion.tensors else None)
        except BadInput as error:
            raise UnsuitedKernelError(f"{module}: {error}") from error

    return swap
