"""Which linears stay in the model's dtype where a target may spend more bits: those that buy back most with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from calibrate.coded import Coded
from calibrate.results import Results
from export.plan import TargetPlan
from models.opened import OpenedModel
from validate.advice import Skip, skips
from validate.alternatives import observed_hidden
from validate.explain import Progress
from validate.sensitivity import attribute

# Calibration tokens that sensitivity is measured on.
TOKENS = 4096
# Of a budget.
PARTS = 1000


@dataclass(frozen=True)
class Row:
    """One linear of the table.

    Attributes:
        linears: full names; engines load them as one, so that they are chosen together.
        kl: the divergence attributed to them, quantised, in nats per token.
        extra_bits: what they cost more in the model's dtype, on the mean over all linears' weights.
        kept: whether they were chosen.
    """

    linears: tuple[str, ...]
    kl: float
    extra_bits: float
    kept: bool


def sensitivities(
    model: OpenedModel, plan: TargetPlan, results: Results, windows: torch.Tensor, progress: Progress
) -> dict[str, float]:
    """The divergence, in nats per token, that each linear of a quantised model causes.

    Args:
        model: in the weights that were quantised.
        plan: of the target.
        results: every layer's.
        windows: calibration token ids [count, tokens]; evenly spread ones of them are used.
    """
    count = max(1, min(len(windows), TOKENS // windows.shape[1]))
    chosen = windows[[index * len(windows) // count for index in range(count)]]
    coded = Coded(model.checkpoint, plan.linears, model.dimensions.layers, results, plan.dtype)
    hidden, _ = observed_hidden(model, chosen, plan.dtype, lambda done, total: progress("reference", done, total))
    return attribute(model, coded, hidden, chosen, plan.dtype, lambda done, total: progress("sensitivity", done, total))


def within(model: OpenedModel, plan: TargetPlan, parts: Mapping[str, float], bits: float) -> list[Row]:
    """Every set of linears that can stay unquantised, the best first, and which of them do.

    Args:
        plan: with everything quantised that may be.
        parts: as from `sensitivities`.
        bits: per weight, on the mean over the plan's linears and those that it skips, at most.
    """
    grids = {linear.name: plan.grid(linear.columns) for linear in plan.linears}
    candidates = skips(model.family, plan.linears, parts, grids, plan.dtype)
    kept = best(candidates, (bits - plan.bits_per_weight) * plan.counted)
    return [Row(skip.linears, skip.kl, skip.extra_bits / plan.counted, skip in kept) for skip in candidates]


def best(candidates: Sequence[Skip], capacity: float) -> list[Skip]:
    """The candidates that buy back most within so many bits (dynamic programming over PARTS equal parts of them)."""
    value = [0.0] * (PARTS + 1)
    taken: list[list[bool]] = []
    sizes = [math.ceil(candidate.extra_bits * PARTS / capacity) for candidate in candidates]
    for candidate, size in zip(candidates, sizes, strict=True):
        with_it = [value[room - size] + candidate.kl if room >= size else -1.0 for room in range(PARTS + 1)]
        taken.append([new > old for new, old in zip(with_it, value, strict=True)])
        value = [max(pair) for pair in zip(with_it, value, strict=True)]
    room, chosen = PARTS, []
    for candidate, size, takes in reversed(list(zip(candidates, sizes, taken, strict=True))):
        if takes[room]:
            chosen.append(candidate)
            room -= size
    return chosen


def mean_bits(plan: TargetPlan, rows: Sequence[Row]) -> float:
    """Bits per weight over all linears of the plan, those that stay unquantised among them."""
    return plan.bits_per_weight + sum(row.extra_bits for row in rows if row.kept)
