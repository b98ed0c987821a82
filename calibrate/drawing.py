"""Tokens drawn from a model's distributions."""

from __future__ import annotations

import torch


def draw(probabilities: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One index for each row of probabilities [rows, count]: int64 [rows, 1].

    torch.multinomial draws a random number for each of the count; the sums up to each take one for all.
    """
    sums = probabilities.cumsum(-1)
    places = torch.rand(len(sums), 1, generator=generator) * sums[:, -1:]
    # The first sum above the place: an index of probability 0 adds nothing and is never it.
    return torch.searchsorted(sums, places, right=True).clamp_max_(sums.shape[1] - 1)
