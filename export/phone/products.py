"""Products of two activations, attention's only ones: both sides are signed and symmetric, each on a grid of its own.

Qualcomm's HTP takes the right side of a product of 16-bit activations in 8 bits, unless both sides are signed: its
compiler puts a Convert there that no report names, and 40 dB are left of 84 (docs/phone.md). So caches hold signed
codes, as they are multiplied, and what else enters such a product is converted in front of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization import QuantType

from calibrate.ranges import Ranges

# The dtype of a product's sides, by that of activations.
SIGNED: Mapping[str, str] = {"uint16": "int16", "uint8": "int8"}
_TYPES = {"int16": QuantType.QInt16, "int8": QuantType.QInt8}


@dataclass(frozen=True)
class Joined:
    """Past and new entries of a cache, put together for attention; names of tensors of a float graph."""

    past: str
    new: str
    whole: str


def products(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The products of two activations, in a float graph."""
    constants = {tensor.name for tensor in model.graph.initializer}
    return [node for node in model.graph.node if node.op_type == "MatMul" and not constants.intersection(node.input)]


def joined_caches(model: onnx.ModelProto) -> list[Joined]:
    """Every cache of a float graph."""
    inputs = {value.name for value in model.graph.input}
    sides = {name for node in products(model) for name in node.input}
    return [
        Joined(node.input[0], node.input[1], node.output[0])
        for node in model.graph.node
        if node.op_type == "Concat" and node.input[0] in inputs and node.output[0] in sides
    ]


def span_new_entries(model: onnx.ModelProto, ranges: Ranges) -> None:
    """Widens the ranges of the caches' past entries to the new ones', as those are before they share a grid with what
    they were cut from; in place. A text's last entries are never past ones.

    Args:
        model: a float graph.
        ranges: of its tensors, as they were seen.
    """
    for cache in joined_caches(model):
        new = ranges.by_name[cache.new]
        ranges.add(cache.past, new.low, new.high)


def signed_overrides(model: onnx.ModelProto, ranges: Ranges, activations: str) -> dict[str, list[dict[str, Any]]]:
    """What ONNX Runtime's quantiser must do otherwise than with all other activations, by the name of the tensor.

    Args:
        model: a float graph.
        ranges: of its tensors; those of a cache's past span the new entries too.
        activations: ``uint16`` or ``uint8``.
    """
    signed = {"quant_type": _TYPES[SIGNED[activations]], "symmetric": True}
    found: dict[str, list[dict[str, Any]]] = {}
    for cache in joined_caches(model):
        span = ranges.by_name[cache.past]
        grid = signed | {"rmin": np.array(span.low, np.float32), "rmax": np.array(span.high, np.float32)}
        found |= {cache.past: [grid], cache.whole: [grid], cache.new: [{"convert": grid}]}
    for node in products(model):
        for name in node.input:
            given = found.setdefault(name, [{"convert": signed | {"recv_nodes": set()}}])
            if "recv_nodes" in given[0].get("convert", {}):
                given[0]["convert"]["recv_nodes"].add(node.name)
    return found
