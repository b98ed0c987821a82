"""GPTQ: every channel's codes make up for the rounding errors of the channels before it (arXiv 2210.17323).

The groups' scales and zeros are chosen first, so that channels may be visited in the order of their importance while
``g_idx`` stays trivial: a group's channels keep their place in the file, only the order of rounding changes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from calibrate.grid import Grid, Quantized
from calibrate.hessian import Factor
from calibrate.search import search

# Sizes of a symmetric scale that are tried: compensation and fits leave little for finer ones.
SIZES = 36
# Channels between two products with the errors of all earlier ones.
BLOCK = 128


def gptq(weight: torch.Tensor, grid: Grid, factor: Factor) -> Quantized:
    """Scales and zeros by a search, weighted by what an error costs after compensation; then compensated codes.

    Args:
        weight: [N, K], any float dtype.
        factor: of the inputs' Hessian.
    """
    parameters = search(weight, grid, factor.weights, SIZES)
    return replace(parameters, codes=compensate(weight, parameters, factor))


def compensate(weight: torch.Tensor, parameters: Quantized, factor: Factor, block: int = BLOCK) -> torch.Tensor:
    """The codes uint8 [N, K] of a weight [N, K] on fixed grids, rounded channel by channel with error feedback."""
    rows, columns = weight.shape
    group_size = columns // parameters.scales.shape[1]
    # Channels are rows here: each step works on one of them, for all output channels at once.
    w = weight.float().t()[factor.order]
    scales = parameters.scales.float().t().contiguous()
    zeros = None if parameters.zeros is None else parameters.zeros.float().t().contiguous()
    points = None if parameters.zero_points is None else parameters.zero_points.float().t().contiguous()
    group_of = (factor.order // group_size).tolist()
    codes = torch.empty(columns, rows, dtype=torch.uint8)
    errors = torch.empty_like(w)
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        targets = w[start:stop] + factor.feedback[:start, start:stop].t() @ errors[:start]
        feedback = factor.feedback[start:stop, start:stop]
        for i, target in enumerate(targets):
            group = group_of[start + i]
            scale, middle = scales[group], parameters.middle if points is None else points[group]
            shifted = target if zeros is None else target - zeros[group]
            code = (shifted / scale).round_().add_(middle).clamp_(parameters.lowest, parameters.highest)
            codes[start + i] = code
            value = (code - middle).mul_(scale)
            if zeros is not None:
                value += zeros[group]
            errors[start + i] = w[start + i] - value
            targets[i + 1 :].addr_(feedback[i, i + 1 :], errors[start + i])
    found = torch.empty_like(codes)
    found[factor.order] = codes
    return found.t().contiguous()
