"""Float graphs of a model's parts, exported without weights: only the structure passes through memory.

The weights are read one at a time when the files are written (`export.phone.files`), so that a part of any size costs
the memory of its largest tensor.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import onnx
import onnx_ir as ir
import torch
from torch import nn

from export.phone.cleanup import clean
from export.phone.files import ReadWeight
from export.phone.manifest import GRAPHS, Port
from export.phone.modules import ATTENTION, PhoneCache, is_norm, substitute
from export.phone.options import PhoneOptions
from export.phone.ports import Span, layer_types, ports
from export.phone.structure import Structure
from models.checkpoint import Checkpoint
from models.skeleton import reader, skeleton

# The module that holds the model inside the exported one; names in the graphs are without it.
HOLDER = "source"


@dataclass(frozen=True)
class Weight:
    """A weight of a part's graphs.

    Attributes:
        name: of the initialiser in both graphs, and of the model's parameter.
        shape: in the graph.
        transposed: whether the parameter is stored the other way round.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool


@dataclass(frozen=True)
class PartGraphs:
    """One part, exported.

    Attributes:
        prefill, decode: the graphs; their weights are external tensors without a place yet.
        weights: the initialisers that both graphs share, by name.
        norms: how many root mean square norms the part's modules have.
    """

    span: Span
    prefill: onnx.ModelProto
    decode: onnx.ModelProto
    weights: dict[str, Weight]
    norms: int

    @property
    def by_kind(self) -> dict[str, onnx.ModelProto]:
        """Both graphs, by ``prefill`` and ``decode``."""
        return {"prefill": self.prefill, "decode": self.decode}


class WeightReader:
    """Reads a graph's weights from a checkpoint, fp32, as the graph holds them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        # A tied head has no tensor of its own: the model's names say what it is tied to.
        self._read = reader(checkpoint, skeleton(checkpoint, torch.float32))

    def __call__(self, weight: Weight) -> torch.Tensor:
        tensor = self._read(weight.name).float()
        return tensor.t().contiguous() if weight.transposed else tensor

    def of(self, graphs: PartGraphs) -> ReadWeight:
        """Reads a part's weights by name, as `export.phone.files.save_part` asks for them."""
        return lambda name: self(graphs.weights[name]).numpy()


class _PartModule(nn.Module):
    """A part of the model as a function of its ports."""

    def __init__(self, model: nn.Module, structure: Structure, span: Span) -> None:
        super().__init__()
        setattr(self, HOLDER, model)
        self.structure, self.span = structure, span
        self.types = layer_types(structure, span)

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        family, span = self.structure.family, self.span
        model = getattr(self, HOLDER)
        remaining = iter(inputs)
        hidden = next(remaining)
        if span.embedding:
            hidden = model.get_submodule(family.embedding)(hidden)
        masks, rotary = {}, {}
        groups = self.structure.dimensions.heads // self.structure.dimensions.kv_heads
        for type in self.types:
            mask = next(remaining)
            # One row of the mask for each query of a group.
            masks[type] = torch.cat([mask] * groups, dim=2) if groups > 1 else mask
            rotary[type] = next(remaining), next(remaining)
        layers = range(span.start, span.stop)
        cache = PhoneCache({layer: (next(remaining), next(remaining)) for layer in layers})
        for index in layers:
            layer = self.structure.layers[index]
            places = {"mask": masks[layer.type], "rotary": rotary[layer.type], "cache": cache}
            arguments = layer.arguments | {name: places[place] for name, place in layer.places.items()}
            output = model.get_submodule(f"{family.layers}.{index}")(hidden, **arguments)
            hidden = output[0] if isinstance(output, tuple) else output
        if span.head:
            hidden = model.get_submodule(family.head)(model.get_submodule(family.norm)(hidden))
        return [hidden, *(entry for layer in layers for entry in cache.new[layer])]


def export_part(checkpoint: Checkpoint, structure: Structure, span: Span, options: PhoneOptions) -> PartGraphs:
    """Both graphs of one part.

    Raises:
        RuntimeError: when the two graphs do not hold the same weights: a bug.
    """
    model = skeleton(checkpoint, torch.float32, ATTENTION)
    _keep_only(model, structure, span)
    norms = sum(is_norm(module) for module in model.modules())
    transposed = substitute(model, "", options.gelu == "tanh")
    module = _PartModule(model, structure, span).eval()
    exported = {}
    weights: dict[str, dict[str, Weight]] = {}
    for kind, tokens in zip(GRAPHS, (options.prefill, 1), strict=True):
        inputs, outputs = ports(structure, span, tokens)
        program = _export(module, inputs, options.opset)
        clean(program, f"{HOLDER}.", inputs, outputs)
        weights[kind] = {
            name: Weight(name, _shape(value), name in transposed)
            for name, value in program.graph.initializers.items()
            if value.const_value is None
        }
        exported[kind] = _to_proto(program, weights[kind])
    if weights["prefill"] != weights["decode"]:
        raise RuntimeError(f"{span}: the two graphs hold different weights")
    return PartGraphs(span, exported["prefill"], exported["decode"], weights["prefill"], norms)


def _keep_only(model: nn.Module, structure: Structure, span: Span) -> None:
    """Takes out of the model what the part does not compute."""
    family = structure.family
    gone = [f"{family.layers}.{i}" for i in range(len(structure.layers)) if not span.start <= i < span.stop]
    gone += [] if span.embedding else [family.embedding]
    gone += [] if span.head else [family.norm, family.head]
    for name in gone:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Identity())


@torch.no_grad()
def _export(module: nn.Module, inputs: tuple[Port, ...], opset: int) -> ir.Model:
    arguments = tuple(torch.zeros(port.shape, dtype=getattr(torch, port.dtype), device="meta") for port in inputs)
    with _quiet():
        program = torch.onnx.export(
            module, arguments, dynamo=True, opset_version=opset, optimize=False, verbose=False, external_data=False
        )
    assert program is not None
    return program.model


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of packages that it would support and of its own deprecated calls."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _shape(value: ir.Value) -> tuple[int, ...]:
    assert value.shape is not None and value.shape.is_static()
    return tuple(int(size) for size in value.shape.numpy())


def _to_proto(program: ir.Model, weights: dict[str, Weight]) -> onnx.ModelProto:
    # A value without data is not written as an initialiser: it gets a place in a file that is named later.
    for name in weights:
        value = program.graph.initializers[name]
        value.const_value = ir.ExternalTensor(
            "", 0, 0, ir.DataType.FLOAT, shape=ir.Shape(weights[name].shape), name=name
        )
    return ir.to_proto(program)
