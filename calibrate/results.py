"""What calibration has found so far, one file a layer, so that a killed run repeats at most one layer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from calibrate.grid import Quantized
from models.files import sync

FIELDS = ("codes", "scales", "zeros", "zero_points")


@dataclass
class QuantizedLayer:
    """The quantised linears of one decoder layer (or the head), by full linear name.

    Attributes:
        linears: codes and scales.
        errors: relative output error of each, see `calibrate.search.error`.
    """

    linears: dict[str, Quantized]
    errors: dict[str, float]


class Results:
    """A folder of finished layers, numbered from 0; the head comes after the last layer.

    A layer's file appears by rename after the hidden states that the next layer needs, so a layer that is there
    can always be continued from.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def done(self, index: int) -> bool:
        return self._layer(index).is_file()

    def first_missing(self, count: int) -> int:
        """The first of ``count`` layers that is not there; ``count`` when all are."""
        return next((i for i in range(count) if not self.done(i)), count)

    def save(self, index: int, layer: QuantizedLayer, hidden: list[torch.Tensor] | None = None) -> None:
        """Commits a layer and the hidden states that enter the next one."""
        if hidden is not None:
            save_tensors(self._hidden(index + 1), {f"{i:06d}": h.contiguous() for i, h in enumerate(hidden)})
        tensors = {
            f"{name}.{field}": value.contiguous()
            for name, quantized in layer.linears.items()
            for field in FIELDS
            if (value := getattr(quantized, field)) is not None
        }
        save_tensors(self._layer(index), tensors, {"errors": json.dumps(layer.errors)})
        self._hidden(index).unlink(missing_ok=True)

    def load(self, index: int) -> QuantizedLayer:
        """A committed layer."""
        with safe_open(self._layer(index), "pt") as file:
            errors = json.loads(file.metadata()["errors"])
            keys = set(file.keys())
            linears = {
                name: Quantized(**{f: file.get_tensor(f"{name}.{f}") for f in FIELDS if f"{name}.{f}" in keys})
                for name in errors
            }
        return QuantizedLayer(linears, errors)

    def load_hidden(self, index: int) -> list[torch.Tensor]:
        """The hidden states that enter layer ``index``, one tensor a batch."""
        with safe_open(self._hidden(index), "pt") as file:
            return [file.get_tensor(key) for key in sorted(file.keys())]

    def drop_hidden(self, index: int) -> None:
        """Removes hidden states that no later layer needs."""
        self._hidden(index).unlink(missing_ok=True)

    def _layer(self, index: int) -> Path:
        return self.folder / f"layer-{index:05d}.safetensors"

    def _hidden(self, index: int) -> Path:
        return self.folder / f"hidden-{index:05d}.safetensors"


def save_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file that is whole or absent, also after a crash of the machine."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(tensors, partial, metadata=metadata)
        sync(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)
