"""Round to nearest, and a search over each group's scale (and zero) for the least squared error.

Both are pure functions of a weight [N, K], a grid and, for the search, the second moments of the inputs: the error
of a linear's output is to first order ``sum_k E[x_k^2] (w_k - w'_k)^2``, so channels that carry more are kept better.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from calibrate.grid import PHONE_BITS, Grid, Quantized, grouped, range_parameters, with_codes

# Symmetric: from two fifths of the max-abs grid (outliers clipped hard) to a tenth above it, each with both signs: a
# negative scale lets -8, the longer side, face the positive extreme (with 8 bits both sides are as long).
SMALLEST_FACTOR, LARGEST_FACTOR = 0.40, 1.10
SIZES = 40
# Asymmetric: each end of the range shrinks on its own: 9 x 9 candidates.
END_FACTORS = torch.linspace(0.5, 1.0, 9)
# Least squares fits to the best candidate's codes: they find more than finer candidates would.
FITS = 2
# Elements per pass: temporaries of a pass stay in a core's cache.
CHUNK = 1 << 18
# The smallest scale: a normal number of fp32.
SMALLEST = torch.finfo(torch.float32).smallest_normal


def round_to_nearest(weight: torch.Tensor, grid: Grid, moments: torch.Tensor | None = None) -> Quantized:
    """The grid that spans each group's range, and the nearest codes. ``moments`` is not used.

    Args:
        weight: [N, K], any float dtype.
    """
    low, high = _ends(weight, grid)
    return with_codes(weight, range_parameters(low, high, grid), grid.group_size)


def search(weight: torch.Tensor, grid: Grid, moments: torch.Tensor | None = None, sizes: int = SIZES) -> Quantized:
    """The best of 80 (symmetric) or 81 (asymmetric) grids per group, by weighted squared error, and fits from there.

    Args:
        weight: [N, K], any float dtype.
        grid: group size, kind of zero and stored dtype; candidates are rounded to it before they are judged.
        moments: fp32 [K], second moments of the inputs; None weighs all channels alike.
        sizes: how many sizes of a symmetric scale are tried.
    """
    rows = max(1, CHUNK // weight.shape[1])
    parts = [_search_rows(chunk, grid, moments, sizes) for chunk in weight.split(rows)]
    scales = torch.cat([p.scales for p in parts])
    zeros = torch.cat([p.zeros for p in parts if p.zeros is not None]) if grid.zero == "float" else None
    points = torch.cat([p.zero_points for p in parts if p.zero_points is not None]) if grid.zero == "integer" else None
    return Quantized(torch.cat([p.codes for p in parts]), scales, zeros, points, grid.bits)


def error(weight: torch.Tensor, quantized: Quantized, second: torch.Tensor | None = None) -> float:
    """Relative error of the output y = W x: the root of E|y - y'|^2 / E|y|^2; 0 for a weight that gives zero.

    Args:
        weight: [N, K].
        second: second moments of the inputs, fp32: all of them [K, K] = E[x x^T]; or E[x_k^2] [K], for channels that
            are taken to be independent; None is inputs of one size.
    """
    lost, all_ = 0.0, 0.0
    for rows, approximated in zip(weight.split(512), quantized.dequantize(torch.float32).split(512), strict=True):
        rows = rows.float()
        lost += energy(rows - approximated, second)
        all_ += energy(rows, second)
    return (lost / all_) ** 0.5 if all_ else 0.0


def energy(weight: torch.Tensor, second: torch.Tensor | None) -> float:
    """E|W x|^2 = tr(W H W^T), for fp32 W [N, K] and second moments as in `error`."""
    weighted = weight if second is None else weight * second if second.dim() == 1 else weight @ second
    # Rounding may leave a little less than nothing of a product that is zero.
    return max(0.0, float((weighted * weight).sum(dtype=torch.float64)))


def _ends(weight: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    groups = grouped(weight.float(), grid.group_size)
    return groups.amin(-1), groups.amax(-1)


def _candidates(low: torch.Tensor, high: torch.Tensor, grid: Grid, sizes: int) -> list[Quantized]:
    if grid.symmetric:
        positive = [
            range_parameters(low * f, high * f, grid) for f in torch.linspace(SMALLEST_FACTOR, LARGEST_FACTOR, sizes)
        ]
        if grid.bits == PHONE_BITS:
            return positive
        return positive + [replace(q, scales=-q.scales) for q in positive]
    # Around the middle, so that a range that does not straddle zero shrinks from both ends too.
    middle = low / 2 + high / 2
    lows = [middle + (low - middle) * f for f in END_FACTORS]
    highs = [middle + (high - middle) * f for f in END_FACTORS]
    return [range_parameters(a, b, grid) for a in lows for b in highs]


def _search_rows(weight: torch.Tensor, grid: Grid, moments: torch.Tensor | None, sizes: int) -> Quantized:
    w = grouped(weight.float(), grid.group_size)
    h = None if moments is None else moments.float().view(1, -1, grid.group_size)
    low, high = _ends(weight, grid)
    # The plain range is the first to beat, so the result is never worse than round to nearest.
    best = range_parameters(low, high, grid)
    scales, zeros, points = best.scales, best.zeros, best.zero_points
    least = _loss(w, best, h)
    candidates: list[Quantized | None] = [*_candidates(low, high, grid, sizes), *[None] * FITS]
    for candidate in candidates:
        if candidate is None:
            found = replace(best, scales=scales, zeros=zeros, zero_points=points)
            candidate = _fit(w, with_codes(weight, found, grid.group_size), h)
        loss = _loss(w, candidate, h)
        better = loss < least
        least = torch.where(better, loss, least)
        scales = torch.where(better, candidate.scales, scales)
        if zeros is not None and candidate.zeros is not None:
            zeros = torch.where(better, candidate.zeros, zeros)
        if points is not None and candidate.zero_points is not None:
            points = torch.where(better, candidate.zero_points, points)
    found = replace(best, scales=scales, zeros=zeros, zero_points=points)
    return with_codes(weight, found, grid.group_size)


def _fit(w: torch.Tensor, q: Quantized, h: torch.Tensor | None) -> Quantized:
    """The scales (and float zeros) of the least weighted squared error for codes as they are; w and h as in `_loss`."""
    middle: float | torch.Tensor = q.middle if q.zero_points is None else q.zero_points.float()[..., None]
    levels = grouped(q.codes, w.shape[-1]).float() - middle
    weights = torch.ones_like(w[:1, :1]) if h is None else h
    weighted = levels * weights
    squares, products = (weighted * levels).sum(-1), (weighted * w).sum(-1)
    if q.zeros is None:
        return replace(q, scales=_usable(products / squares, q.scales))
    total, levels_sum, sums = weights.sum(-1), weighted.sum(-1), (w * weights).sum(-1)
    determinant = squares * total - levels_sum * levels_sum
    scales = _usable((products * total - sums * levels_sum) / determinant, q.scales)
    # The best zero for the scale as it is stored.
    zeros = (sums - scales.float() * levels_sum) / total
    return replace(q, scales=scales, zeros=_usable(zeros, q.zeros, smallest=0.0))


def _usable(values: torch.Tensor, old: torch.Tensor, smallest: float = SMALLEST) -> torch.Tensor:
    """Values in the old ones' dtype; the old ones where the new are not finite there or vanish."""
    rounded = values.to(old.dtype)
    return torch.where(torch.isfinite(rounded) & (rounded.float().abs() >= smallest), rounded, old)


def _loss(w: torch.Tensor, parameters: Quantized, h: torch.Tensor | None) -> torch.Tensor:
    """Weighted squared error per group, [N, groups]; w [N, groups, group_size], h [1, groups, group_size]."""
    scales = parameters.scales.float()[..., None]
    low, high = parameters.lowest - parameters.middle, parameters.highest - parameters.middle
    if parameters.zeros is not None:
        shifted = w - parameters.zeros.float()[..., None]
        difference = (shifted / scales).round_().clamp_(low, high).mul_(scales).sub_(shifted)
    elif parameters.zero_points is not None:
        points = parameters.zero_points.float()[..., None]
        codes = (w / scales).round_()
        difference = torch.maximum(torch.minimum(codes, parameters.highest - points), -points).mul_(scales).sub_(w)
    else:
        difference = (w / scales).round_().clamp_(low, high).mul_(scales).sub_(w)
    difference.square_()
    return (difference if h is None else difference.mul_(h)).sum(-1)
