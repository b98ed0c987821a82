"""Float graphs of a model's parts, exported without weights: only the structure passes through memory.

One export of the embedding, the head and a layer of each kind, for both numbers of tokens, gives the units that all
parts are put together from. The weights are read one at a time when the files are written (`export.phone.files`), so
that a part of any size costs the memory of its largest tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx
import torch

from export.phone.files import ReadWeight
from export.phone.manifest import GRAPHS, Port
from export.phone.options import PhoneOptions
from export.phone.ports import Span, ports, spans
from export.phone.structure import Structure
from export.phone.trace import Traced, trace
from export.phone.units import Unit
from models.checkpoint import Checkpoint
from models.skeleton import reader, skeleton

# The oldest that has opset 23.
IR_VERSION = 11
PRODUCER = "edge-convert"


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
    """

    span: Span
    prefill: onnx.ModelProto
    decode: onnx.ModelProto
    weights: dict[str, Weight]

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


def export_parts(checkpoint: Checkpoint, structure: Structure, options: PhoneOptions) -> Iterator[PartGraphs]:
    """Both graphs of every part, one part after the other.

    Raises:
        BadInput: for a number of parts that cannot be.
    """
    wanted = spans(len(structure.layers), options.parts)
    traced = trace(checkpoint, structure, options)
    for span in wanted:
        yield _part(traced, structure, span, options)


def export_part(checkpoint: Checkpoint, structure: Structure, span: Span, options: PhoneOptions) -> PartGraphs:
    """Both graphs of one part."""
    return _part(trace(checkpoint, structure, options), structure, span, options)


def _part(traced: Traced, structure: Structure, span: Span, options: PhoneOptions) -> PartGraphs:
    graphs = {}
    weights: dict[str, Weight] = {}
    for kind, tokens in zip(GRAPHS, (options.prefill, 1), strict=True):
        inputs, outputs = ports(structure, span, tokens)
        units = _units(traced, structure, span, kind)
        names = dict.fromkeys(name for unit in units for name in unit.weights)
        weights = {name: Weight(name, *traced.weight(name)) for name in names}
        graphs[kind] = _graph(units, list(weights.values()), inputs, outputs, options.opset)
    return PartGraphs(span, graphs["prefill"], graphs["decode"], weights)


def _units(traced: Traced, structure: Structure, span: Span, kind: str) -> list[Unit]:
    """The part's units in order, each with the names that it has there."""
    found = []
    hidden = "hidden_states"
    if span.embedding:
        unit = traced.embedding[kind]
        found.append(unit)
        hidden = unit.outputs[0]
    for layer in range(span.start, span.stop):
        last = layer == span.stop - 1 and not span.head
        unit = traced.layer(layer, kind, hidden, "hidden_states_out" if last else None)
        found.append(unit)
        hidden = unit.outputs[0]
    if span.head:
        found.append(traced.head(kind, hidden))
    elif not span.stop > span.start:
        # The embedding alone.
        found[-1] = found[-1].copy(lambda name: "hidden_states_out" if name == hidden else name)
    return found


def _graph(
    units: list[Unit], weights: list[Weight], inputs: tuple[Port, ...], outputs: tuple[Port, ...], opset: int
) -> onnx.ModelProto:
    # What several units begin with (a mask made ready for its layers) is there once.
    nodes = {node.name: node for unit in units for node in unit.nodes}
    constants = {tensor.name: tensor for unit in units for tensor in unit.constants}
    initializers = [*(_external(weight) for weight in weights), *constants.values()]
    graph = onnx.helper.make_graph(
        list(nodes.values()), "part", _value_infos(inputs), _value_infos(outputs), initializer=initializers
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=IR_VERSION)
    model.producer_name = PRODUCER
    return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)


def _value_infos(side: tuple[Port, ...]) -> list[onnx.ValueInfoProto]:
    types = {"float32": onnx.TensorProto.FLOAT, "int32": onnx.TensorProto.INT32}
    return [onnx.helper.make_tensor_value_info(port.name, types[port.dtype], port.shape) for port in side]


def _external(weight: Weight) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name=weight.name, data_type=onnx.TensorProto.FLOAT, dims=weight.shape)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    return tensor
