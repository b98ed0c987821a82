"""A checkpoint with its linears as calibration quantised them, before any layout holds them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from calibrate.results import QuantizedLayer, Results
from models.checkpoint import Checkpoint, TensorInfo, View
from models.family import Linear


class Coded(View):
    """Linears are dequantised when they are read; everything else is as calibration left it.

    Args:
        base: what was quantised.
        linears: those that were.
        layers: how many decoder layers there are; the head's results come after them.
        results: one layer's are in memory at a time.
        dtype: of dequantised weights.
    """

    def __init__(
        self, base: Checkpoint, linears: Sequence[Linear], layers: int, results: Results, dtype: torch.dtype
    ) -> None:
        super().__init__(base)
        self.results, self.dtype, self._layers = results, dtype, layers
        self.config = dict(base.config)
        self._modules: dict[str, list[Linear]] = {}
        for linear in linears:
            self._modules.setdefault(f"{linear.module}.weight", []).append(linear)
        untied = {name: parts[0] for name, parts in self._modules.items() if name not in base.tensors}
        if untied:
            self.config["tie_word_embeddings"] = False
        self.tensors = {
            **base.tensors,
            **{name: TensorInfo(dtype, (head.rows, head.columns)) for name, head in untied.items()},
        }
        self._changed = {name: index for index in range(layers + 1) for name in results.changes(index)}
        self._loaded: tuple[int, QuantizedLayer] | None = None

    def read(self, name: str) -> torch.Tensor:
        if name in self._changed:
            return self.results.read_changed(self._changed[name], name)
        parts = self._modules.get(name)
        if parts is None:
            return self.base.read(name)
        found = self._layer(self._layers if parts[0].layer is None else parts[0].layer).linears
        weights = [found[part.name].dequantize(self.dtype) for part in parts]
        if sum(part.rows for part in parts) == self.tensors[name].shape[0]:
            return torch.cat(weights)
        value = self.base.read(name).to(self.dtype, copy=True)
        for part, rows in zip(parts, weights, strict=True):
            value[part.start : part.stop] = rows
        return value

    def _layer(self, index: int) -> QuantizedLayer:
        if self._loaded is None or self._loaded[0] != index:
            self._loaded = index, self.results.load(index)
        return self._loaded[1]
