"""What calibration has found so far, one file a layer, so that a killed run repeats at most one layer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from calibrate.grid import Quantized
from models.files import sync

FIELDS = ("codes", "scales", "zeros", "zero_points")
# Before the names of unquantised tensors, and of links' factors, in a layer's file; no tensor's name has a colon.
CHANGED, FACTORS = "changed:", "factors:"


@dataclass
class QuantizedLayer:
    """What was found for one decoder layer, or for the head and the norm before it.

    Attributes:
        linears: codes and scales, by full linear name.
        errors: relative output error of each, see `calibrate.search.error`.
        fallbacks: of linears that were rounded to nearest instead of by their methods, why.
        tensors: new values of tensors that stay unquantised, by the source's name for them, in its shape.
        reasons: of each such tensor, what changed it.
        factors: fp32 [channels] by a writer's name: its outputs were divided by them, its readers' weights multiplied.
        links: what was found for each link that was looked at, by its writer's name, as JSON values.
    """

    linears: dict[str, Quantized] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    fallbacks: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    factors: dict[str, torch.Tensor] = field(default_factory=dict)
    links: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Hidden:
    """Hidden states [batch, tokens, hidden] that enter a layer, one tensor a batch.

    Attributes:
        quantized: behind the layers as they were quantised.
        reference: behind the source's layers; empty when no method compares with them.
    """

    quantized: list[torch.Tensor]
    reference: list[torch.Tensor] = field(default_factory=list)


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

    def save(self, index: int, layer: QuantizedLayer, hidden: Hidden | None = None) -> None:
        """Commits a layer and the hidden states that enter the next one."""
        if hidden is not None:
            save_tensors(self._hidden(index + 1), _numbered(hidden))
        tensors = {
            f"{name}.{field}": value.contiguous()
            for name, quantized in layer.linears.items()
            for field in FIELDS
            if (value := getattr(quantized, field)) is not None
        }
        tensors |= {f"{CHANGED}{name}": value.contiguous() for name, value in layer.tensors.items()}
        tensors |= {f"{FACTORS}{name}": value.contiguous() for name, value in layer.factors.items()}
        # Sorted, so that a layer's bytes depend on what was found and not on the order in which it was.
        bits = {name: quantized.bits for name, quantized in layer.linears.items()}
        words = {"bits": bits, "errors": layer.errors, "fallbacks": layer.fallbacks, "reasons": layer.reasons}
        words["links"] = layer.links
        save_tensors(self._layer(index), tensors, {"found": json.dumps(words, sort_keys=True)})
        self.drop_hidden(index)

    def load(self, index: int) -> QuantizedLayer:
        """A committed layer."""
        with safe_open(self._layer(index), "pt") as file:
            words = _words(file)
            keys = set(file.keys())
            linears = {
                name: Quantized(
                    **{f: file.get_tensor(f"{name}.{f}") for f in FIELDS if f"{name}.{f}" in keys}, bits=bits
                )
                for name, bits in words.pop("bits").items()
            }
            tensors = {name: file.get_tensor(f"{CHANGED}{name}") for name in words["reasons"]}
            factors = {key.removeprefix(FACTORS): file.get_tensor(key) for key in keys if key.startswith(FACTORS)}
        return QuantizedLayer(linears, **words, tensors=tensors, factors=factors)

    def changes(self, index: int) -> dict[str, str]:
        """The unquantised tensors that a committed layer has new values for, and what changed each."""
        with safe_open(self._layer(index), "pt") as file:
            return _words(file)["reasons"]

    def links(self, index: int) -> dict[str, dict[str, Any]]:
        """What was found for the links of a committed layer, by writer."""
        with safe_open(self._layer(index), "pt") as file:
            return _words(file)["links"]

    def read_changed(self, index: int, name: str) -> torch.Tensor:
        """The new value of one of them."""
        with safe_open(self._layer(index), "pt") as file:
            value: torch.Tensor = file.get_tensor(f"{CHANGED}{name}")
        return value

    def load_hidden(self, index: int) -> Hidden:
        """The hidden states that enter layer ``index``."""
        with safe_open(self._hidden(index), "pt") as file:
            found = {key: file.get_tensor(key) for key in sorted(file.keys())}
        return Hidden(*([found[key] for key in found if key.startswith(kind)] for kind in ("quantized", "reference")))

    def drop_hidden(self, index: int) -> None:
        """Removes hidden states that no later layer needs."""
        self._hidden(index).unlink(missing_ok=True)

    def _layer(self, index: int) -> Path:
        return self.folder / f"layer-{index:05d}.safetensors"

    def _hidden(self, index: int) -> Path:
        return self.folder / f"hidden-{index:05d}.safetensors"


def _words(file: Any) -> dict[str, dict[str, Any]]:
    """What a layer's file says beside its tensors."""
    found: dict[str, dict[str, Any]] = json.loads(file.metadata()["found"])
    return found


def _numbered(hidden: Hidden) -> dict[str, torch.Tensor]:
    return {
        f"{kind}-{i:06d}": tensor.contiguous()
        for kind, batches in (("quantized", hidden.quantized), ("reference", hidden.reference))
        for i, tensor in enumerate(batches)
    }


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
