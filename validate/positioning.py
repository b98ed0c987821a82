"""Where an artifact stands beside what others make of the same source: the same scorer on the same windows."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from models.checkpoint import Checkpoint
from models.errors import EnvironmentProblem
from models.opened import OpenedModel
from validate.divergence import parted
from validate.greedy import continue_greedily
from validate.llama_cpp import MIXES, GgufView, library_version, write
from validate.measure import Progress, Reference, Settings
from validate.score import Progress as Part
from validate.score import compare, final_hidden

PEER = "llama.cpp:"
NAMES = tuple(PEER + mix for mix in MIXES)


def version(name: str) -> str:
    """What decides a row beside the source and the settings. Raises EnvironmentProblem where it is not installed."""
    return f"{name} {library_version()}"


def not_measured(name: str, error: EnvironmentProblem) -> dict[str, Any]:
    """The row of a peer that is not installed."""
    return {"name": name, "skipped": "; ".join(error.problems)}


def position(
    name: str, model: OpenedModel, reference: Reference, settings: Settings, work: Path, progress: Progress
) -> dict[str, Any]:
    """One row of the report's ``positioning``: the figures of a target, and how many tensors have which type.

    ``bits_per_weight`` is over the decoder layers' linears, scales included; ``file_bytes`` is of all tensors.

    Args:
        name: one of NAMES.
        work: a folder for the quantised file, which is removed at the end: it is made again in less time than it is
            scored in.

    Raises:
        EnvironmentProblem: when the quantisers are not installed.
    """
    checkpoint = model.checkpoint
    file = work / f"{name.removeprefix(PEER)}.gguf"
    try:
        write(
            MIXES[name.removeprefix(PEER)], model, file, lambda done, total: progress(f"{name}: quantise", done, total)
        )
        view = GgufView(file, checkpoint)
        return {
            "name": name,
            "bits_per_weight": view.bits_per_weight([linear for linear in model.linears if linear.layer is not None]),
            "file_bytes": view.tensor_bytes,
            **lost(name, view, checkpoint, reference, settings, progress),
            "types": view.types(),
            "version": version(name),
        }
    finally:
        file.unlink(missing_ok=True)


def lost(
    name: str,
    view: Checkpoint,
    checkpoint: Checkpoint,
    reference: Reference,
    settings: Settings,
    progress: Progress,
) -> dict[str, Any]:
    """The figures of a target for any checkpoint of the reference's shape, whoever made it.

    Args:
        name: for ``progress``.
        view: what was made.
        checkpoint: the reference's weights.
    """
    ids, dtype = settings.windows.ids, settings.dtype

    def part(what: str) -> Part:
        return lambda done, total: progress(f"{name}: {what}", done, total)

    hidden = final_hidden(view, ids, dtype, progress=part("weights"))
    scores = asdict(compare(checkpoint, reference.hidden, view, hidden, ids, dtype, progress=part("logits")))
    continuations = continue_greedily(view, settings.prompts, settings.greedy_tokens, dtype, part("greedy"))
    both = reference.continuations, continuations
    return {
        **{key: value for key, value in scores.items() if not key.startswith("reference_") and key != "nll"},
        "greedy": parted(checkpoint, view, settings.prompts, both, dtype, settings.tokenizer),
    }
