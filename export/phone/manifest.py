"""The manifest: everything that a runtime must know to run the graphs, as JSON.

It imports neither torch nor onnx, so that a host loop needs numpy and a runtime only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

FILE = "manifest.json"
VERSION = 2
# Added to the scores of positions that a token does not see. The dtype's minimum as a quantised tensor's range cost
# 28 dB, -1e4 cost 5; softmax makes exp(-100) of this one.
MASK = -100.0

Role = Literal["input_ids", "hidden", "mask", "cos", "sin", "past_key", "past_value", "logits", "new_key", "new_value"]
GRAPHS = ("prefill", "decode")


@dataclass(frozen=True)
class Port:
    """An input or output of a graph.

    Attributes:
        name: in the graph.
        role: what it holds.
        shape: fixed.
        dtype: numpy's name for its element type.
        layer: of a cache entry.
        layer_type: of a mask, a rotary input or a cache entry.
        scale, zero_point: of an integer port that stands for real numbers, (q - zero_point) * scale.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    layer: int | None = None
    layer_type: str | None = None
    scale: float | None = None
    zero_point: int | None = None


@dataclass(frozen=True)
class Graph:
    """One file and its ports, in order."""

    file: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclass(frozen=True)
class Part:
    """A pair of graphs that share ``data``; parts run one after another, each on the hidden states of the last.

    Attributes:
        layers: the first decoder layer and the one after the last; equal when there is none.
        norms: root mean square norms in each graph.
    """

    data: str
    layers: tuple[int, int]
    norms: int
    prefill: Graph
    decode: Graph

    def graph(self, kind: str) -> Graph:
        """``prefill`` or ``decode``."""
        return self.prefill if kind == "prefill" else self.decode


@dataclass(frozen=True)
class CacheType:
    """The cache of the layers of one type.

    Past entries are [1, kv_heads, slots, head_dim]; the token at position p belongs in slot p mod ``slots``. A token at
    position p sees the entries of positions in (p - window, p]; None sees all. Which slot holds which position makes no
    difference to attention; slots without an entry are masked.

    Attributes:
        kind: ``ring`` overwrites the oldest entry, ``full`` ends when its slots are used up.
    """

    kind: Literal["ring", "full"]
    slots: int
    window: int | None


@dataclass(frozen=True)
class Rotary:
    """The rotary inputs of one layer type, [1, tokens, 2 * frequencies], computed in fp32 by the host:

    ``angle = position * inverse_frequencies``, twice side by side; ``cos(angle) * scaling``, ``sin(angle) * scaling``.
    """

    inverse_frequencies: tuple[float, ...]
    scaling: float


@dataclass(frozen=True)
class Manifest:
    """The graphs of an artifact and how a host drives them.

    Attributes:
        context: positions that full layers hold: no text is longer.
        prefill: tokens of the prefill graph; a shorter chunk is padded at its end, and the new entries of the padding
            are not kept.
        activations: dtype of activations; float32 where the graphs are not quantised. Caches, which are sides of
            products, hold signed codes of the same width.
        mask_value: what the masks [1, 1, tokens, slots + tokens] hold where a token does not see an entry, else 0; the
            past slots come first.
        layers: type of every decoder layer.
        caches, rotary: by layer type.
    """

    model_type: str
    vocabulary: int
    context: int
    prefill: int
    activations: str
    mask_value: float
    kv_heads: int
    head_dim: int
    layers: tuple[str, ...]
    caches: Mapping[str, CacheType]
    rotary: Mapping[str, Rotary]
    parts: tuple[Part, ...]
    version: int = VERSION
    format: str = field(default="phone")

    def tokens(self, kind: str) -> int:
        """How many tokens a graph takes: ``prefill`` or ``decode``."""
        return self.prefill if kind == "prefill" else 1

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> Manifest:
        """Raises KeyError or TypeError for values that no manifest of this version has."""
        if value["version"] != VERSION:
            raise TypeError(f"version: expected {VERSION}, found {value['version']}")
        return Manifest(
            **{
                **value,
                "layers": tuple(value["layers"]),
                "caches": {name: CacheType(**cache) for name, cache in value["caches"].items()},
                "rotary": {
                    name: Rotary(tuple(rotary["inverse_frequencies"]), rotary["scaling"])
                    for name, rotary in value["rotary"].items()
                },
                "parts": tuple(_part(part) for part in value["parts"]),
            }
        )

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Raises OSError, ValueError, KeyError or TypeError when there is no such manifest."""
        return Manifest.from_dict(json.loads((folder / FILE).read_text(encoding="utf-8")))


def _part(value: Mapping[str, Any]) -> Part:
    first, last = value["layers"]
    return Part(value["data"], (first, last), value["norms"], _graph(value["prefill"]), _graph(value["decode"]))


def _graph(value: Mapping[str, Any]) -> Graph:
    inputs, outputs = (
        tuple(Port(**{**port, "shape": tuple(port["shape"])}) for port in value[side]) for side in ("inputs", "outputs")
    )
    return Graph(value["file"], inputs, outputs)
