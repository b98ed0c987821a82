"""`awq` inside a layer: the link that a group of linears reads from, and its factors folded into both sides of it.

What writes a group's inputs is a norm, or a linear that was quantised before: dividing its rows divides their scales
and leaves its codes, so that no input has to be gathered twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from calibrate.awq import smoothing
from calibrate.composition import METHODS
from calibrate.grid import Grid, Quantized
from calibrate.methods import choose
from calibrate.results import QuantizedLayer
from calibrate.statistics import Inputs
from models.family import Family, Linear
from models.skeleton import Reader

DIVIDED, MULTIPLIED = "awq: divided by its readers' factors", "awq: multiplied by its inputs' factors"
# Of a scale that was divided and stored again: bf16 and fp16 round by less unless the number is too small for them.
ROUNDING = 2.0**-8


@dataclass(frozen=True)
class Link:
    """Where a group of linears has its inputs from, by names inside a layer.

    Attributes:
        writer: a norm or a linear.
        readers: everything that reads the writer's output.
    """

    writer: str
    readers: tuple[str, ...]


def link_of(family: Family, names: Sequence[str]) -> Link | None:
    """The link that linears with the same input have; None where their input is not only theirs, or not known to be."""
    if family.links is None:
        return None
    for norm, readers in family.links.norms:
        if set(names) <= set(readers):
            return Link(norm, readers)
    pairs = (family.links.values, family.links.product)
    return next((Link(writer, (reader,)) for writer, reader in pairs if [reader] == list(names)), None)


def divided_norm(weight: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A norm's weight [n] over factors, in its dtype; and the factors fp32 that the stored numbers stand for."""
    new = (weight.float() / factors).to(weight.dtype)
    usable = torch.isfinite(new) & (new != 0)
    new = torch.where(usable, new, weight)
    return new, torch.where(usable, weight.float() / new.float(), 1.0)


def divided_rows(quantized: Quantized, factors: torch.Tensor) -> tuple[Quantized, torch.Tensor]:
    """A linear's rows over factors [N], by its scales and zeros; and the factors, 1 where a row is not divided because
    its numbers would be too small or too large for their dtype."""
    scales = quantized.scales.float() / factors[:, None]
    stored = scales.to(quantized.scales.dtype)
    fits = (((stored.float() - scales).abs() <= ROUNDING * scales.abs()) & torch.isfinite(stored)).all(1)
    zeros = quantized.zeros
    if zeros is not None:
        zeros = (zeros.float() / factors[:, None]).to(zeros.dtype)
        fits &= torch.isfinite(zeros).all(1)
        zeros = torch.where(fits[:, None], zeros, quantized.zeros)  # type: ignore[arg-type]
    stored = torch.where(fits[:, None], stored, quantized.scales)
    return replace(quantized, scales=stored, zeros=zeros), torch.where(fits, factors, 1.0)


@dataclass(frozen=True)
class Smoother:
    """What all links of a model share.

    Attributes:
        linears: all of the model's, by full name.
        method: the recipe's.
        head_dim: of the value heads.
        dtype: what the model computes in.
    """

    family: Family
    linears: Mapping[str, Linear]
    method: tuple[str, ...]
    head_dim: int
    dtype: torch.dtype

    def changes(self, prefix: str, group: Sequence[Linear]) -> tuple[str, ...]:
        """Modules by names inside a layer, the group's own among them, whose weights `smooth` may change."""
        link = link_of(self.family, [linear.name.removeprefix(prefix) for linear in group])
        return () if link is None else (link.writer, *link.readers)

    def smooth(
        self, layer: nn.Module, prefix: str, group: Sequence[Linear], grid: Grid, inputs: Inputs, found: QuantizedLayer
    ) -> torch.Tensor | None:
        """Folds the factors of a group's link into its writer, and into readers that are not in the group.

        Args:
            layer: loaded, with the writer's weights as they are to be stored; changed in place.
            prefix: the layer's full name and a dot.
            group: linears with the same input; their own weights are left to the caller.
            inputs: what they read.
            found: takes the writer's new numbers and what was found.

        Returns:
            Factors fp32 [K] for the group's weights, whose inputs are divided by them now; None where there are none.
        """
        names = [linear.name.removeprefix(prefix) for linear in group]
        link = link_of(self.family, names)
        if link is None:
            return None
        writer = self.linears.get(prefix + link.writer)
        channel_of = self._channels(writer, group[0].columns)
        weights = [_rows(layer, prefix, linear) for linear in group]
        factors = self._search(prefix + link.writer, group, weights, grid, inputs, channel_of, found)
        if factors is None:
            return None
        if writer is None:
            factors = _divide_norm(layer.get_submodule(link.writer), prefix + link.writer, factors, found)
        else:
            factors = self._divide_linear(layer, prefix, writer, factors, found)
        found.factors[prefix + link.writer] = factors
        spread = factors[channel_of]
        for name in link.readers:
            if name not in names and _has(layer, name):
                weight = layer.get_submodule(name).weight
                weight.copy_(weight.float() * spread)  # type: ignore[operator, arg-type]
                _change(found, f"{prefix}{name}.weight", weight, MULTIPLIED)  # type: ignore[arg-type]
        return spread

    def smooth_head(
        self, read: Reader, head: Linear, weight: torch.Tensor, grid: Grid, inputs: Inputs, found: QuantizedLayer
    ) -> torch.Tensor | None:
        """As `smooth`, for a head that is quantised and the norm before it; ``read`` gives the norm's tensors."""
        norm = self.family.norm
        if self.family.links is None:
            return None
        factors = self._search(norm, [head], [weight], grid, inputs, torch.arange(head.columns), found)
        if factors is None:
            return None
        found.tensors[f"{norm}.weight"], factors = divided_norm(read(f"{norm}.weight"), factors)
        found.reasons[f"{norm}.weight"] = DIVIDED
        found.factors[norm] = factors
        return factors

    def _search(
        self,
        writer: str,
        group: Sequence[Linear],
        weights: Sequence[torch.Tensor],
        grid: Grid,
        inputs: Inputs,
        channel_of: torch.Tensor,
        found: QuantizedLayer,
    ) -> torch.Tensor | None:
        """The factors of a link [writer's channels] where they make the error smaller, else None; notes both."""
        names = [name for name in self.method if METHODS[name].stage == "codes"]
        best = smoothing(
            weights,
            grid,
            inputs,
            lambda weight, known: choose(weight, grid, names, known).error,
            channel_of,
            compensated=any(METHODS[name].compensates for name in self.method),
        )
        found.links[writer] = {
            "readers": [linear.name for linear in group],
            "alpha": best.alpha,
            "weighted": best.weighted,
            "before": best.before,
            "after": best.after,
            "accepted": best.better,
        }
        return best.factors if best.better else None

    def _channels(self, writer: Linear | None, columns: int) -> torch.Tensor:
        """Of each input, the channel of the writer that it is; query heads in groups read one value head."""
        channels = columns if writer is None else writer.rows
        if channels == columns:
            return torch.arange(columns)
        heads = torch.arange(channels).unflatten(0, (-1, self.head_dim))
        return heads.repeat_interleave(columns // channels, 0).flatten()

    def _divide_linear(
        self, layer: nn.Module, prefix: str, writer: Linear, factors: torch.Tensor, found: QuantizedLayer
    ) -> torch.Tensor:
        rows = _rows(layer, prefix, writer)
        if writer.name in found.linears:
            divided, factors = divided_rows(found.linears[writer.name], factors)
            found.linears[writer.name] = divided
            rows.copy_(divided.dequantize(self.dtype))
        else:
            rows.copy_(rows.float() / factors[:, None])
            weight = layer.get_submodule(writer.module.removeprefix(prefix)).weight
            _change(found, f"{writer.module}.weight", weight, DIVIDED)  # type: ignore[arg-type]
        bias = layer.get_submodule(writer.module.removeprefix(prefix)).bias
        if isinstance(bias, torch.Tensor):
            part = bias[writer.start : writer.stop]
            part.copy_(part.float() / factors)
            _change(found, f"{writer.module}.bias", bias, DIVIDED)
        return factors


def _divide_norm(norm: nn.Module, name: str, factors: torch.Tensor, found: QuantizedLayer) -> torch.Tensor:
    tensors = dict(norm.named_parameters())
    new, factors = divided_norm(tensors["weight"], factors)
    tensors["weight"].copy_(new)
    if "bias" in tensors:
        tensors["bias"].copy_(tensors["bias"].float() / factors)
    for leaf, tensor in tensors.items():
        _change(found, f"{name}.{leaf}", tensor, DIVIDED)
    return factors


def _change(found: QuantizedLayer, name: str, value: torch.Tensor, reason: str) -> None:
    found.tensors[name], found.reasons[name] = value.detach().clone(), reason


def _rows(layer: nn.Module, prefix: str, linear: Linear) -> torch.Tensor:
    module = layer.get_submodule(linear.module.removeprefix(prefix))
    assert isinstance(module, nn.Linear)
    return module.weight[linear.start : linear.stop]


def _has(layer: nn.Module, name: str) -> bool:
    """Whether a layer has a linear; a configuration may switch one off."""
    return name in dict(layer.named_modules())
