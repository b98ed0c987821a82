"""Contexts longer than a sliding window: perplexity by position, and a needle that only full attention reaches.

A model with sliding and full layers may lose its long range in a build that scores well on short windows. So windows of
four times the sliding window are scored by quarters, and a needle is hidden: a run of random tokens stands in the first
quarter and again at the end, more than two windows later. What the first one is worth for predicting the second, in
nats a token, is the needle's gain. A model that does not copy has none, quantised or not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from calibrate.text import cut_windows
from models.checkpoint import Checkpoint
from models.skeleton import model_config
from validate.engines.compare import positions
from validate.score import Progress, final_hidden, no_progress

# Quarters of the text, each as long as the sliding window.
QUARTERS = 4
# Tokens of the needle, less where the window is short.
NEEDLE = 16


@dataclass(frozen=True)
class LongText:
    """Windows beyond the sliding window.

    Attributes:
        plain: int64 [windows, 4 * window], text that ends with a needle.
        hidden: the same with that needle in the first quarter, too.
        window: the model's sliding window in tokens.
        needle: its length in tokens.
        distance: between the two needles, in tokens.
    """

    plain: torch.Tensor
    hidden: torch.Tensor
    window: int
    needle: int
    distance: int

    @property
    def both(self) -> torch.Tensor:
        """int64 [2 * windows, 4 * window], the plain ones first."""
        return torch.cat([self.plain, self.hidden])


def sliding_window(checkpoint: Checkpoint) -> int | None:
    """In tokens; None for a model all of whose layers see everything."""
    window = getattr(model_config(checkpoint), "sliding_window", None)
    return int(window) if window else None


def long_text(ids: torch.Tensor, window: int, count: int, leading: tuple[int, ...] = ()) -> LongText:
    """Evenly spread windows of a text, with needles of tokens that occur in it.

    Args:
        ids: int64 [tokens] of the whole text.
        window: the sliding window in tokens.
        leading: tokens that every window begins with.

    Raises:
        BadInput: when the text is too short.
    """
    plain = cut_windows(ids, count, QUARTERS * window, "validation: long_context").clone()
    known = ids.unique()
    generator = torch.Generator().manual_seed(0)
    length = min(NEEDLE, window // QUARTERS)
    needles = known[torch.randint(len(known), (count, length), generator=generator)]
    plain[:, : len(leading)] = torch.tensor(leading, dtype=torch.int64)
    plain[:, -length:] = needles
    hidden = plain.clone()
    start = max(len(leading), (window - length) // 2)
    hidden[:, start : start + length] = needles
    return LongText(plain, hidden, window, length, plain.shape[1] - length - start)


def long_logprobs(
    checkpoint: Checkpoint, text: LongText, dtype: torch.dtype, progress: Progress = no_progress
) -> torch.Tensor:
    """fp32 [2 * windows, 4 * window - 1]: log-likelihoods of every token but the first of each window of `both`."""
    hidden = final_hidden(checkpoint, text.both, dtype, progress=progress)
    return positions(checkpoint, hidden, text.both, dtype).logprobs


def compare_long(text: LongText, reference: torch.Tensor, model: torch.Tensor) -> dict[str, Any]:
    """A target's entry in the report, from both models' `long_logprobs`.

    Returns:
        ``perplexity_ratio`` over the text without its needles, ``quarters`` the same by position, and of the needle:
        ``distance`` in tokens, and the gain in nats a token of the reference and of the model.
    """
    count = len(text.plain)
    # The token at position p is predicted in column p - 1.
    lost = (reference - model).double()[:count, : -text.needle]
    parts = [
        lost[:, max(0, quarter * text.window - 1) : (quarter + 1) * text.window - 1] for quarter in range(QUARTERS)
    ]
    # The needle's first token has nothing before it that would tell of the rest.
    ends = [logprobs.double()[:, -text.needle + 1 :] for logprobs in (reference, model)]
    gains = [float((end[count:] - end[:count]).mean()) for end in ends]
    return {
        "sliding_window": text.window,
        "length": text.plain.shape[1],
        "windows": count,
        "perplexity_ratio": _exp(float(lost.mean())),
        "quarters": [_exp(float(part.mean())) for part in parts],
        "needle": {
            "distance": text.distance,
            "reference_gain": gains[0],
            "gain": gains[1],
        },
    }


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
