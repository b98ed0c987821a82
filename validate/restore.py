"""What an artifact's KL divergence becomes when parts of it get the source's weights back.

All variants run side by side, a layer at a time: each layer's weights are loaded once, and a variant costs nothing
until its first restored layer, because up to there its hidden states are the artifact's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from calibrate.quantize import batches
from calibrate.replay import Replay
from models.checkpoint import Checkpoint
from models.family import Linear
from models.opened import OpenedModel
from models.skeleton import Reader
from validate.score import CHUNK

Progress = Callable[[int, int], None]
Logits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Restoration:
    """What gets the source's weights back.

    Attributes:
        linears: full split names, the head not among them.
        layers: whole decoder layers, norms and biases included.
        head: the final norm and the head.
    """

    linears: frozenset[str] = frozenset()
    layers: frozenset[int] = frozenset()
    head: bool = False


@torch.no_grad()
def restored_kl(
    model: OpenedModel,
    artifact: Checkpoint,
    reference_hidden: torch.Tensor,
    windows: torch.Tensor,
    restorations: Sequence[Restoration],
    dtype: torch.dtype,
    progress: Progress,
) -> list[float]:
    """Mean KL divergence source || artifact, in nats, with each restoration; ``Restoration()`` is the artifact itself.

    Args:
        model: the source.
        artifact: as bf16 weights, see `export.artifact.Expansion`.
        reference_hidden: the source's final hidden states [windows, tokens, hidden].
        windows: int64 [windows, tokens]; the last logits of a window predict nothing that is scored.
    """
    source, other = Replay(model.checkpoint, dtype), Replay(artifact, dtype)
    parts = batches(windows)
    source.embed(parts)
    base = other.embed(parts)
    by_layer: dict[int, list[Linear]] = {}
    for linear in model.linears:
        if linear.layer is not None:
            by_layer.setdefault(linear.layer, []).append(linear)
    states: dict[int, list[torch.Tensor]] = {}
    for index in range(len(other)):
        progress(index, len(other))
        whole = [number for number, wanted in enumerate(restorations) if index in wanted.layers]
        before = {number: states.get(number, base) for number in whole}
        with other.layer(index) as layer:
            for number, wanted in enumerate(restorations):
                chosen = [linear for linear in by_layer.get(index, ()) if linear.name in wanted.linears]
                if number in before or (not chosen and number not in states):
                    continue
                with _restored(layer, other.prefix(index), chosen, source.read):
                    states[number] = [other.run(layer, index, part) for part in states.get(number, base)]
            base = [other.run(layer, index, part) for part in base]
        if whole:
            with source.layer(index) as layer:
                for number in whole:
                    states[number] = [source.run(layer, index, part) for part in before[number]]
    progress(len(other), len(other))
    finals = [torch.cat(states.get(number, base)) for number in range(len(restorations))]
    return _divergences(source, other, reference_hidden, windows, finals, [wanted.head for wanted in restorations])


@contextmanager
def _restored(layer: nn.Module, prefix: str, linears: Sequence[Linear], read: Reader) -> Iterator[None]:
    """Puts the source's rows into the linears of a loaded layer for the length of the block."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for linear in linears:
        weight = layer.get_submodule(linear.module.removeprefix(f"{prefix}.")).weight
        assert isinstance(weight, torch.Tensor)
        rows = weight[linear.start : linear.stop]
        kept.append((rows, rows.clone()))
        rows.copy_(read(f"{linear.module}.weight")[linear.start : linear.stop])
    try:
        yield
    finally:
        for rows, values in kept:
            rows.copy_(values)


def _divergences(
    source: Replay,
    other: Replay,
    reference_hidden: torch.Tensor,
    windows: torch.Tensor,
    finals: Sequence[torch.Tensor],
    heads: Sequence[bool],
) -> list[float]:
    """Mean KL of final hidden states, through the source's end of the model where ``heads`` says so."""
    totals = [0.0] * len(finals)
    with source.end() as of_source, other.end() as of_other:
        for index, window in enumerate(windows.split(1)):
            expected = of_source(window, reference_hidden[index : index + 1])[0, :-1]
            for number, hidden in enumerate(finals):
                ends: Logits = of_source if heads[number] else of_other
                totals[number] += divergence(expected, ends(window, hidden[index : index + 1])[0, :-1])
    tokens = windows.shape[0] * (windows.shape[1] - 1)
    return [total / tokens for total in totals]


def divergence(expected: torch.Tensor, logits: torch.Tensor) -> float:
    """Sum over rows of KL(softmax(expected) || softmax(logits)) in nats; both [rows, vocab]."""
    rows, total = max(1, CHUNK // expected.shape[1]), 0.0
    for a, b in zip(expected.split(rows), logits.split(rows), strict=True):
        log_a = torch.log_softmax(a.float(), -1)
        difference = log_a - torch.log_softmax(b.float(), -1)
        total += float(torch.linalg.vecdot(log_a.exp_(), difference).double().sum())
    return total
