"""Coordinate descent on codes, scales and zeros of a quantised linear, for the error of its output.

The error tr(E H E^T), E = W - W', is a parabola in any one code, in any one scale and in any one pair of scale and
zero while the others stand still: each has its best value in closed form, given the gradient E H. A sweep visits
groups in turn: first the scale and zero (the least squares fit to the codes as they are, rounded to the stored dtype
and taken only where the error falls all the same), then each of the group's codes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from calibrate.grid import Quantized
from calibrate.hessian import damped

SWEEPS = 6
# A sweep that gains a smaller part of the error's energy is the last.
GAIN = 0.002
# Of a scale that is left in one step.
SMALLEST = 2.0**-10


def refine(weight: torch.Tensor, quantized: Quantized, hessian: torch.Tensor, sweeps: int = SWEEPS) -> Quantized:
    """Sweeps over a linear [N, K] until the error falls no more; the error (as damped) never rises.

    Args:
        weight: [N, K], any float dtype.
        quantized: where to start; on any kind of grid.
        hessian: fp32 [K, K], E[x x^T] of the inputs.
    """
    state = _State.of(weight, quantized, damped(hessian).float())
    before = state.energy()
    for _ in range(sweeps):
        for group in range(len(state.scales)):
            state.fit_parameters(group)
            state.descend(group)
        after = state.energy()
        if before - after <= GAIN * before:
            break
        before = after
    return state.quantized()


@dataclass
class _State:
    """A linear with channels as rows, as `calibrate.gptq` has it too.

    Attributes:
        hessian: fp32 [K, K].
        levels: fp32 [K, N], codes minus the zero point.
        points: fp32 [G, N], the zero point (8 where the grid has none).
        scales, zeros: fp32 [G, N], numbers of the stored dtype; zeros None without a float zero.
        errors: fp32 [K, N], the weight minus what codes and scales stand for.
        gradient: fp32 [group_size, N], of the group that is being visited: rows of H E.
    """

    hessian: torch.Tensor
    levels: torch.Tensor
    points: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    errors: torch.Tensor
    start: Quantized
    gradient: torch.Tensor

    @staticmethod
    def of(weight: torch.Tensor, q: Quantized, hessian: torch.Tensor) -> _State:
        scales = q.scales.float().t().contiguous()
        points = torch.full_like(scales, q.middle) if q.zero_points is None else q.zero_points.float().t().contiguous()
        zeros = None if q.zeros is None else q.zeros.float().t().contiguous()
        levels = q.codes.t().float() - points.repeat_interleave(q.group_size, 0)
        errors = (weight.float() - q.dequantize(torch.float32)).t().contiguous()
        return _State(hessian, levels, points, scales, zeros, errors, q, errors[:0])

    def energy(self) -> float:
        return float(((self.hessian @ self.errors) * self.errors).sum(dtype=torch.float64))

    def quantized(self) -> Quantized:
        q = self.start
        codes = (self.levels + self.points.repeat_interleave(q.group_size, 0)).to(torch.uint8).t().contiguous()
        zeros = None if self.zeros is None else self.zeros.t().to(q.scales.dtype).contiguous()
        return replace(q, codes=codes, scales=self.scales.t().to(q.scales.dtype).contiguous(), zeros=zeros)

    def _rows(self, group: int) -> slice:
        size = self.start.group_size
        return slice(group * size, (group + 1) * size)

    def fit_parameters(self, group: int) -> None:
        """Moves the group's scale (and zero) to the least squares fit; computes the group's gradient on the way."""
        rows = self._rows(group)
        levels, errors = self.levels[rows], self.errors[rows]
        self.gradient = self.hessian[rows] @ self.errors
        inside = self.hessian[rows, rows]
        # Change of W' by a step of the scale: the levels; by a step of the zero: ones.
        h_levels = inside @ levels
        slope, curve = (levels * self.gradient).sum(0), (levels * h_levels).sum(0)
        step = slope / curve.clamp_min(torch.finfo(torch.float32).tiny)
        zero_step = None
        if self.zeros is not None:
            h_ones = inside.sum(1, keepdim=True)
            zero_slope, zero_curve, mixed = self.gradient.sum(0), h_ones.sum(), h_levels.sum(0)
            determinant = curve * zero_curve - mixed * mixed
            # Levels that are all alike leave scale and zero undetermined: then the scale stays.
            solvable = determinant > 1e-6 * curve * zero_curve
            solved = (slope * zero_curve - zero_slope * mixed) / torch.where(solvable, determinant, 1.0)
            step = torch.where(solvable, solved, 0.0)
        scale = self.scales[group]
        new = _stored(scale + step, self.start.scales.dtype)
        # A scale that vanishes, overflows or turns round would be no scale, or another grid's.
        usable = (new / scale >= SMALLEST) & torch.isfinite(new)
        step = torch.where(usable, new - scale, 0.0)
        gain = 2 * step * slope - step * step * curve
        if self.zeros is not None:
            zero_step = (zero_slope - step * mixed) / zero_curve.clamp_min(torch.finfo(torch.float32).tiny)
            zero_step = _stored(self.zeros[group] + zero_step, self.start.scales.dtype) - self.zeros[group]
            gain += 2 * zero_step * zero_slope - zero_step * zero_step * zero_curve - 2 * step * zero_step * mixed
        better = gain > 0
        step = torch.where(better, step, 0.0)
        scale += step
        errors -= step * levels
        self.gradient -= step * h_levels
        if self.zeros is not None and zero_step is not None:
            zero_step = torch.where(better, zero_step, 0.0)
            self.zeros[group] += zero_step
            errors -= zero_step
            self.gradient -= zero_step * h_ones

    def descend(self, group: int) -> None:
        """Gives each of the group's codes its best value while the others stand still."""
        rows = self._rows(group)
        inside = self.hessian[rows, rows]
        # Column c: how a change of the error in one channel moves the optimum of channel c.
        feedback = inside / inside.diagonal()
        moves = self.gradient / inside.diagonal()[:, None]
        scale = self.scales[group]
        low, high = self.start.lowest - self.points[group], self.start.highest - self.points[group]
        levels, errors = self.levels[rows], self.errors[rows]
        for i, move in enumerate(moves):
            new = torch.minimum(torch.maximum((levels[i] + move / scale).round_(), low), high)
            change = (levels[i] - new).mul_(scale)
            levels[i] = new
            errors[i] += change
            moves[i + 1 :].addr_(feedback[i, i + 1 :], change)


def _stored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.to(dtype).float()
