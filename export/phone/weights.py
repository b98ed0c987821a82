"""Where a phone's weights come from: int8 codes from what calibration committed, all else from the model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from calibrate.grid import PHONE_BITS, Grid, Quantized, concatenate
from calibrate.results import QuantizedLayer, Results
from calibrate.rewrites import rewritten as rewritten_in
from export.phone.int8 import pack
from models.family import Linear
from models.opened import OpenedModel


def rewritten(model: OpenedModel, method: tuple[str, ...]) -> OpenedModel:
    """The model in the weights that the graphs hold (see `calibrate.rewrites`), with `phone_linears`."""
    return replace(rewritten_in(model, method, torch.float32), linears=tuple(phone_linears(model)))


def phone_linears(model: OpenedModel) -> list[Linear]:
    """Every linear of a model, layer by layer; those too that other formats keep in bf16 (`Family.kept`), since a phone
    multiplies codes only."""
    found: list[Linear] = []
    layers: dict[int | None, list[Linear]] = {}
    for linear in model.linears:
        layers.setdefault(linear.layer, []).append(linear)
    for layer, linears in layers.items():
        found += linears
        for name in model.family.kept if layer is not None else ():
            full = f"{model.family.layers}.{layer}.{name}"
            info = model.checkpoint.tensors.get(f"{full}.weight")
            # A configuration may switch it off.
            if info is not None:
                found.append(Linear(full, layer, full, 0, info.shape[0], info.shape[1]))
    return found


def int8_grid(columns: int) -> Grid:
    """One scale an output channel."""
    return Grid(columns, dtype=torch.float32, bits=PHONE_BITS)


class CodedWeights:
    """Int8 weights by the name of their tensor, from committed layers; one layer is in memory at a time.

    Args:
        layers: decoder layers; the head's results come after them.
    """

    def __init__(self, linears: list[Linear], results: Results, layers: int) -> None:
        self._results, self._layers = results, layers
        self.modules: dict[str, list[Linear]] = {}
        for linear in linears:
            self.modules.setdefault(f"{linear.module}.weight", []).append(linear)
        self._loaded: tuple[int, QuantizedLayer] | None = None

    def layer(self, index: int | None) -> QuantizedLayer:
        """What was found for a layer; for the head with None."""
        wanted = self._layers if index is None else index
        if self._loaded is None or self._loaded[0] != wanted:
            self._loaded = wanted, self._results.load(wanted)
        return self._loaded[1]

    def quantized(self, name: str) -> Quantized:
        """A module's weight [N, K], its linears in order."""
        linears = self.modules[name]
        layer = self.layer(linears[0].layer)
        return concatenate([layer.linears[linear.name] for linear in linears])

    def packed(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Codes int8 [K, N] and scales fp32 [N]."""
        return pack(self.quantized(name))
