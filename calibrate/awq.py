"""AWQ: the channels that matter most get the finer part of a group's grid (arXiv 2306.00978).

With a positive factor per input channel a linear computes ``y = (W s) (x / s)``: the same function before rounding,
and after it a channel with a large factor has the smaller error, at the cost of the others in its group. The factors
are a power of what each channel's error costs, with or without the weights' own sizes; of these few candidates the one
with the least expected error is measured, and taken only where the measured error falls by a hundredth or more.

Where the engine rounds a linear's inputs to 8 bits a token (W4A8), the expected error counts that rounding too: a
factor takes an outlier from the inputs into the weights, as SmoothQuant does (arXiv 2211.10438).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from calibrate.grid import Grid, grouped, range_parameters
from calibrate.search import energy
from calibrate.statistics import Inputs

# Powers of a channel's cost.
ALPHAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Factors lie between this and its reciprocal, around a geometric mean of 1.
LARGEST = 32.0
# Output channels that are looked at, evenly spread over all readers'.
ROWS = 512
# Of the error that factors must gain on the calibration text: smaller gains were losses on other text.
GAIN = 0.01
# What the engine's int8 activations span.
INT8 = 127
# Variance of a rounding to steps of 1.
UNIFORM = 1 / 12
# (weight [N, K], inputs) -> relative error of its output once quantised
Measure = Callable[[torch.Tensor, Inputs], float]


@dataclass(frozen=True)
class Smoothing:
    """The best factors that were found, and what they came to.

    Attributes:
        factors: fp32 [channels], of the module that writes the inputs.
        alpha: power of the channels' costs.
        weighted: whether the weights' sizes count too.
        before, after: relative error of the readers' outputs, without and with the factors.
    """

    factors: torch.Tensor
    alpha: float
    weighted: bool
    before: float
    after: float

    @property
    def better(self) -> bool:
        """Whether they gain enough."""
        return self.after < (1 - GAIN) * self.before


def smoothing(
    weights: Sequence[torch.Tensor],
    grid: Grid,
    inputs: Inputs,
    measure: Measure,
    channel_of: torch.Tensor,
    compensated: bool,
) -> Smoothing:
    """Searches the factors of one link.

    Args:
        weights: of the linears that read the same inputs, [N, K] each.
        grid: theirs.
        inputs: what they read; with a ``sample`` where the engine rounds it to int8.
        measure: the error that is left by what will choose the codes, here of a part of the rows.
        channel_of: int64 [K], the writer's channel that each input is; several inputs may share one.
        compensated: whether later channels make up for errors (`calibrate.hessian.Factor`).
    """
    every = torch.cat([weight.float() for weight in weights])
    weight = every[:: max(1, len(every) // ROWS)]
    costs = inputs.factor.weights if compensated else inputs.moments
    best, factors = (0.0, False), torch.ones(int(channel_of.max()) + 1)
    least = _expected(weight, grid, costs, inputs)
    for alpha, weighted, candidate in _candidates(weight, costs, channel_of):
        spread = candidate[channel_of]
        expected = _expected(weight * spread, grid, costs / spread.square(), inputs.scaled(spread))
        if expected < least:
            least, best, factors = expected, (alpha, weighted), candidate
    before = _measured(weight, inputs, measure)
    spread = factors[channel_of]
    after = before if best[0] == 0 else _measured(weight * spread, inputs.scaled(spread), measure)
    return Smoothing(factors, *best, before, after)


def _candidates(
    weight: torch.Tensor, costs: torch.Tensor, channel_of: torch.Tensor
) -> Iterator[tuple[float, bool, torch.Tensor]]:
    """(power, whether weights count, factors by writer's channel)."""
    cost = _logs(_by_channel(costs, channel_of))
    size = _logs(_by_channel(weight.square().mean(0), channel_of))
    for alpha in ALPHAS:
        yield alpha, False, _factors(alpha / 2 * cost)
        yield alpha, True, _factors(alpha / 2 * cost - (1 - alpha) / 2 * size)


def _by_channel(values: torch.Tensor, channel_of: torch.Tensor) -> torch.Tensor:
    """The mean of values [K] over the inputs that share a channel of the writer."""
    total = torch.zeros(int(channel_of.max()) + 1).index_add_(0, channel_of, values.float())
    return total / torch.bincount(channel_of)


def _logs(values: torch.Tensor) -> torch.Tensor:
    """Logarithms of values that are not negative; what is zero counts as the smallest that is not."""
    positive = values[values > 0]
    return values.clamp_min(positive.amin() if len(positive) else 1.0).log()


def _factors(logs: torch.Tensor) -> torch.Tensor:
    return (logs - logs.mean()).exp().clamp(1 / LARGEST, LARGEST)


def _expected(weight: torch.Tensor, grid: Grid, costs: torch.Tensor, inputs: Inputs) -> float:
    """The error's energy, were every rounding error evenly spread over a step of the grid that spans the weights."""
    groups = grouped(weight, grid.group_size)
    steps = range_parameters(groups.amin(-1), groups.amax(-1), grid).scales.float()
    of_weights = UNIFORM * float((steps.square().sum(0) * costs.view(-1, grid.group_size).sum(-1)).sum())
    return of_weights + rounding(weight, inputs)


def rounding(weight: torch.Tensor, inputs: Inputs) -> float:
    """The output's error energy from inputs that are rounded to int8, each token by its largest; 0 without a sample."""
    if inputs.sample is None:
        return 0.0
    steps = inputs.sample.abs().amax(1) / INT8
    return UNIFORM * float(steps.square().mean()) * float(weight.square().sum())


def _measured(weight: torch.Tensor, inputs: Inputs, measure: Measure) -> float:
    """Relative error of the output: the weights' as it is, the inputs' as it is to be expected."""
    whole = energy(weight, inputs.second)
    return (measure(weight, inputs) ** 2 + (rounding(weight, inputs) / whole if whole else 0.0)) ** 0.5
