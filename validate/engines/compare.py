"""An engine's answers beside our own scorer's, for the same artifact and the same text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from calibrate.replay import Replay
from models.checkpoint import Checkpoint
from validate.engines.run import Result
from validate.score import CHUNK, Swap, no_swap, standard_error, swapped

# Below this difference of the first two logits, another order of the same sums may change the first.
MARGIN = 0.1
# So may rounding: two logits in two computations, each by half a step of their dtype, and in the models that were
# measured the layers' own rounding adds as much again. A bf16 logit between 16 and 32 has steps of 0.125.
STEPS = 4


@dataclass(frozen=True)
class Positions:
    """Our scorer's answer for every predicted token, [windows, tokens - 1].

    Attributes:
        logprobs: of the actual tokens.
        top1: the most likely token.
        margins: its logit minus the second's.
        steps: between it and the next number of the logits' dtype.
    """

    logprobs: torch.Tensor
    top1: torch.Tensor
    margins: torch.Tensor
    steps: torch.Tensor

    @property
    def clear(self) -> torch.Tensor:
        """Whether the first choice is beyond what rounding may change."""
        return self.margins > (STEPS * self.steps).clamp_min(MARGIN)


@torch.no_grad()
def positions(
    checkpoint: Checkpoint, hidden: torch.Tensor, windows: torch.Tensor, dtype: torch.dtype, swap: Swap = no_swap
) -> Positions:
    """From the final hidden states [windows, tokens, hidden], as `validate.score.final_hidden` gives them.

    Args:
        swap: as there, for the head.
    """
    end = Replay(checkpoint, dtype)
    rows = []
    with end.end() as logits_of, swapped(end.model, "", swap):
        for index, window in enumerate(windows.split(1)):
            rows.append(_of_window(logits_of(window, hidden[index : index + 1])[0], window[0]))
    return _stacked(rows)


def positions_of(logits: torch.Tensor, windows: torch.Tensor) -> Positions:
    """From logits [windows, tokens, vocabulary] of windows int64 [windows, tokens]."""
    return _stacked([_of_window(*row) for row in zip(logits, windows, strict=True)])


def _of_window(logits: torch.Tensor, window: torch.Tensor) -> list[torch.Tensor]:
    few = max(1, CHUNK // logits.shape[1])
    chunks = zip(logits[:-1].split(few), window[1:].split(few), strict=True)
    parts = [_answers(part, targets) for part, targets in chunks]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def _stacked(rows: list[list[torch.Tensor]]) -> Positions:
    return Positions(*(torch.stack(column) for column in zip(*rows, strict=True)))


def _answers(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values = logits.float()
    best = values.topk(2)
    own = torch.log_softmax(values, -1).gather(1, targets[:, None])[:, 0]
    # frexp's exponent is one above that of the leading bit.
    steps = torch.finfo(logits.dtype).eps * torch.exp2(torch.frexp(best.values[:, 0]).exponent.float() - 1)
    return own, best.indices[:, 0], best.values[:, 0] - best.values[:, 1], steps


def compare_engine(result: Result, ours: Positions) -> dict[str, Any]:
    """What the engine's answers differ in from ours.

    Returns:
        ``perplexity`` of the engine, ``gap``: its relative difference from ours, with its paired standard error
        ``gap_se``; ``top1``: share of the same first choice among the ``top1_of`` positions where ours is clear
        (null when there are none);
        ``logprob_gap``: mean absolute difference; ``tokens``: how many were compared.
    """
    clear = ours.clear
    judged = int(clear.sum())
    difference = result.logprobs.double() - ours.logprobs.double()
    return {
        "perplexity": float((-result.logprobs.double().mean()).exp()),
        "gap": float(torch.expm1(-difference.mean()).abs()),
        "gap_se": float((-difference.mean()).exp()) * standard_error(difference.mean(dim=1)),
        "top1": float((result.top1 == ours.top1)[clear].double().mean()) if judged else None,
        "top1_of": judged,
        "logprob_gap": float(difference.abs().mean()),
        "tokens": difference.numel(),
    }


def compare_greedy(result: Result, tokens: torch.Tensor) -> dict[str, Any]:
    """Continuations [prompts, tokens] of ours that the engine's equal in every token."""
    assert result.greedy is not None
    return {"identical": int((result.greedy == tokens).all(dim=1).sum()), "of": len(tokens)}


def worst_gap(gaps: list[float | None]) -> float | None:
    """The gap to judge: the largest, or None when one of them is not a finite number."""
    if not gaps or any(gap is None or not math.isfinite(gap) for gap in gaps):
        return None
    return max(gap for gap in gaps if gap is not None)
