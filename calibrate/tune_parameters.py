"""Stored numbers under training: a layer's scales, zeros, norm weights and biases, and their gradients.

A number is stored in few bits but trained in many: ``stored = round(start + unit * shift)``, with the rounding of its
stored dtype inside the forward, so that what is measured is what will be written. The gradient passes the rounding
unchanged (straight-through). Shifts are relative to a unit, a scale's own size for scales and zeros, so that one
learning rate suits all of them. Codes stay as they are and are not held here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from calibrate.grid import Quantized
from calibrate.results import QuantizedLayer
from models.family import Linear
from models.skeleton import Reader

# A scale may shrink to half and grow to twice its size: it never vanishes or changes sign.
SCALE_SHIFTS = (-0.5, 1.0)


@dataclass
class Trained:
    """One tensor under training.

    Attributes:
        start: its value before, in its stored dtype.
        unit: what a shift of 1 stands for: a number, or a tensor in the shape of start.
        bounds: that shifts are held to.
        shift: fp32, in the shape of start; the optimiser's parameter.
    """

    start: torch.Tensor
    unit: torch.Tensor | float
    bounds: tuple[float, float] | None = None
    shift: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.shift = torch.zeros(self.start.shape, dtype=torch.float32)

    def value(self) -> torch.Tensor:
        """The tensor as it is stored."""
        shift = self.shift if self.bounds is None else self.shift.clamp(*self.bounds)
        return (self.start.float() + self.unit * shift).to(self.start.dtype)

    def add_gradient(self, of_value: torch.Tensor, start: int = 0) -> None:
        """Takes the loss's gradient with respect to the value's rows from ``start`` on, in any float dtype."""
        if self.shift.grad is None:
            self.shift.grad = torch.zeros_like(self.shift)
        rows = slice(start, start + len(of_value))
        unit = self.unit[rows] if isinstance(self.unit, torch.Tensor) else self.unit
        self.shift.grad[rows] += of_value.float() * unit


def trained_vector(value: torch.Tensor) -> Trained:
    """A norm's weight or a bias [n]: the unit is its root mean square, or 1 where it is all zero."""
    size = float(value.float().square().mean().sqrt())
    return Trained(value, size or 1.0)


@dataclass
class TrainedGrid:
    """A linear's scales and zeros under training.

    Attributes:
        scales: [N, groups].
        zeros: [N, groups], shifted in units of the scales; None where the grid has no float zero.
    """

    scales: Trained
    zeros: Trained | None = None

    @staticmethod
    def of(linear: Quantized) -> TrainedGrid:
        scales = Trained(linear.scales, linear.scales, SCALE_SHIFTS)
        return TrainedGrid(scales, None if linear.zeros is None else Trained(linear.zeros, linear.scales))

    def parameters(self) -> Iterator[Trained]:
        yield self.scales
        if self.zeros is not None:
            yield self.zeros

    def quantized(self, linear: Quantized) -> Quantized:
        """The linear, which it was made of, with its numbers as they are stored now."""
        zeros = None if self.zeros is None else self.zeros.value()
        return replace(linear, scales=self.scales.value(), zeros=zeros)

    def weight(self, linear: Quantized, dtype: torch.dtype) -> torch.Tensor:
        """What `quantized` dequantises to, [N, K]."""
        stored = self.quantized(linear)
        if dtype != torch.bfloat16 or stored.scales.dtype != torch.bfloat16:
            return stored.dequantize(dtype)
        # 8 bits of code times 8 of a bf16 scale are exact in fp32: operations on bf16 round once, as dequantize does.
        steps, scales = _steps(linear, dtype), stored.scales[..., None]
        weight = steps.mul_(scales) if stored.zeros is None else torch.addcmul(stored.zeros[..., None], steps, scales)
        return weight.view(linear.codes.shape)

    def add_gradient(self, linear: Quantized, of_weight: torch.Tensor, start: int = 0) -> None:
        """Takes the loss's gradient with respect to the weight's rows from ``start`` on, [rows, K]."""
        part = linear.rows(start, start + len(of_weight))
        groups = of_weight.reshape(*part.scales.shape, -1)
        self.scales.add_gradient((groups * _steps(part, groups.dtype)).sum(-1, dtype=torch.float32), start)
        if self.zeros is not None:
            self.zeros.add_gradient(groups.sum(-1, dtype=torch.float32), start)


def _steps(linear: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """How many scales each weight is away from its zero, [N, groups, group_size]."""
    codes = linear.codes.view(*linear.scales.shape, -1).to(dtype)
    return codes.sub_(linear.middle if linear.zero_points is None else linear.zero_points.to(dtype)[..., None])


@dataclass
class TrainedLayer:
    """A decoder layer's numbers under training.

    Attributes:
        where: each quantised linear's place in the checkpoint, by its full name, in the order of output channels.
        rows: output channels of each module's weight that holds some of them, by the weight's full name.
        grids: by full linear name.
        tensors: norm weights and biases, by full name.
    """

    where: Mapping[str, Linear]
    rows: Mapping[str, int]
    grids: dict[str, TrainedGrid]
    tensors: dict[str, Trained]

    def parameters(self) -> Iterator[Trained]:
        for grid in self.grids.values():
            yield from grid.parameters()
        yield from self.tensors.values()

    def reader(self, found: QuantizedLayer, source: Reader, dtype: torch.dtype) -> Reader:
        """Reads the layer's tensors as they are stored now; ``source`` reads what is not trained."""

        def read(name: str) -> torch.Tensor:
            if name in self.tensors:
                return self.tensors[name].value()
            parts = [linear for linear in self.where.values() if f"{linear.module}.weight" == name]
            if not parts:
                return found.tensors[name] if name in found.tensors else source(name)
            weights = [self.grids[part.name].weight(found.linears[part.name], dtype) for part in parts]
            if sum(part.rows for part in parts) == self.rows[name]:
                return weights[0] if len(weights) == 1 else torch.cat(weights)
            weight = source(name).to(dtype, copy=True)
            for part, rows in zip(parts, weights, strict=True):
                weight[part.start : part.stop] = rows
            return weight

        return read

    def require_gradients(self, layer: nn.Module, prefix: str) -> None:
        """Makes those parameters of a loaded layer that are trained ask for gradients."""
        modules = {f"{linear.module}.weight" for linear in self.where.values()}
        for name in (*modules, *self.tensors):
            layer.get_parameter(name.removeprefix(prefix)).requires_grad_()

    def add_gradients(self, found: QuantizedLayer, layer: nn.Module, prefix: str) -> None:
        """Takes what a backward pass left in a loaded layer's parameters."""

        def gradient(name: str) -> torch.Tensor:
            found = layer.get_parameter(name.removeprefix(prefix)).grad
            assert found is not None
            return found

        for name, linear in self.where.items():
            rows = gradient(f"{linear.module}.weight")[linear.start : linear.stop]
            self.grids[name].add_gradient(found.linears[name], rows)
        for name, trained in self.tensors.items():
            trained.add_gradient(gradient(name))
