"""A head's output channels in clusters, each quantised for the tokens at whose places its channels are likely.

An error e of a logit costs p (1 - p) e^2 / 2 where the model gives the channel's token the probability p (the diagonal
of softmax's Fisher information). So the inputs count by that for each channel; channels with like weights are likely at
like places, and share it (`calibrate.fisher` does the same for layers, where gradients take the probabilities' place).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from calibrate.statistics import Inputs, Moments
from models.wide import linear

# Clusters, at most, and output channels in each on the mean, at least.
CLUSTERS, CHANNELS = 32, 64
ROUNDS = 10
# Of what a token counts for a cluster, the part that it counts for all channels: some clusters are hardly ever likely.
SHARED = 0.2
# Tokens whose probabilities are in memory at once.
ROWS = 128


@dataclass(frozen=True)
class Part:
    """Some output channels of a linear, and what they see of its inputs.

    Attributes:
        channels: int64 [n].
        inputs: without a drift.
    """

    channels: torch.Tensor
    inputs: Inputs


def parts(weight: torch.Tensor, inputs: Sequence[torch.Tensor], seed: int = 0) -> Iterator[Part]:
    """The clusters of a head's output channels, one at a time: each has a Hessian of its own.

    Args:
        weight: [N, K] of the head, any float dtype.
        inputs: what it reads, [..., K] each.
        seed: of the clusters' first centres.
    """
    labels = clusters(weight, min(CLUSTERS, max(1, len(weight) // CHANNELS)), seed)
    counts = torch.cat([_counts(x.reshape(-1, x.shape[-1]), weight, labels) for x in inputs])
    every = counts.sum(1)
    for label in range(counts.shape[1]):
        tokens = (1 - SHARED) * _mean_one(counts[:, label]) + SHARED * _mean_one(every)
        seen = Moments(full=True)
        for x, weights in zip(inputs, tokens.split([x.shape[:-1].numel() for x in inputs]), strict=True):
            seen.add(x, weights=weights)
        yield Part((labels == label).nonzero()[:, 0], seen.inputs())


def _mean_one(counts: torch.Tensor) -> torch.Tensor:
    return counts / counts.mean().clamp_min(torch.finfo(counts.dtype).tiny)


def clusters(weight: torch.Tensor, count: int, seed: int = 0) -> torch.Tensor:
    """K-means of the rows' directions: a label for each row of [N, K], int64, below ``count`` and none unused."""
    rows = torch.nn.functional.normalize(weight.float(), dim=-1)
    centres = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count]]
    labels = torch.zeros(len(rows), dtype=torch.int64)
    for _ in range(ROUNDS):
        labels = torch.cat([(part @ centres.t()).argmax(-1) for part in rows.split(4096)])
        sums = torch.zeros_like(centres).index_add_(0, labels, rows)
        sizes = torch.bincount(labels, minlength=len(centres))[:, None]
        centres = torch.nn.functional.normalize(torch.where(sizes > 0, sums, centres), dim=-1)
    return labels.unique(return_inverse=True)[1]


def _counts(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What each token counts for each cluster, fp32 [tokens, clusters]: the sum of p (1 - p) over its channels."""
    found = []
    for part in x.split(ROWS):
        p = torch.softmax(linear(part, weight.to(x.dtype)).float(), -1)
        found.append(torch.zeros(len(part), int(labels.max()) + 1).index_add_(1, labels, p - p * p))
    return torch.cat(found)
