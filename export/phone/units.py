"""Runs of operators cut out of an exported graph: folded, named by the model's modules, and without its metadata.

Layers of one kind have the same operators, so a graph is put together from copies of few units (`export.phone.graph`).
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir
from onnxscript import optimizer

# Where the exporter notes which modules a node comes from, outermost first, and last the node itself.
SCOPES = "pkg.torch.onnx.name_scopes"
Rename = Callable[[str], str]


@dataclass(frozen=True)
class Unit:
    """A run of operators.

    Attributes:
        inputs, outputs: names of its ports, in order.
        constants: folded ones, small.
        weights: names of the initialisers without data that it reads.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[onnx.NodeProto, ...]
    constants: tuple[onnx.TensorProto, ...]
    weights: tuple[str, ...]

    def copy(self, rename: Rename) -> Unit:
        """With other names of nodes and tensors."""
        nodes = tuple(_copied_node(node, rename) for node in self.nodes)
        constants = tuple(_copied_constant(tensor, rename) for tensor in self.constants)
        names = (tuple(rename(name) for name in names) for names in (self.inputs, self.outputs, self.weights))
        inputs, outputs, weights = names
        return Unit(inputs, outputs, nodes, constants, weights)


def fold(model: ir.Model) -> None:
    """Folds constants in place; the weights, which have no data, stay initialisers."""
    graph = model.graph
    weights = list(graph.initializers.values())
    graph.initializers.clear()
    # As inputs, no pass looks for their data.
    for value in weights:
        value.const_value = None
        graph.inputs.append(value)
    optimizer.optimize_ir(model, onnx_shape_inference=False)
    for value in weights:
        graph.inputs.remove(value)
        if value.uses():
            graph.initializers[str(value.name)] = value


def cut(graph: ir.Graph, prefix: str, inputs: dict[ir.Value, str], outputs: Sequence[ir.Value]) -> Unit:
    """The operators between inputs, which get names, and outputs, which are named by the nodes that make them.

    Nodes are named by module, operator and number, ``model.layers.0.mlp/Mul_0``; values by the node that makes them,
    and constants by the first that reads them.

    Args:
        prefix: of the names that the exporter gave weights and modules; removed.
    """
    nodes = _between(graph, inputs, outputs)
    names: dict[ir.Value, str] = dict(inputs)
    constants: dict[ir.Value, str] = {}
    weights: dict[ir.Value, str] = {}
    protos = []
    counts: Counter[str] = Counter()
    scope = ""
    for node in nodes:
        # What a pass put in belongs to where it was put.
        scope = _scope(node, prefix) or scope
        base = f"{scope}/{node.op_type}"
        name = f"{base}_{counts[base]}"
        counts[base] += 1
        for index, value in enumerate(node.inputs):
            if value is None or value in names:
                continue
            if value.const_value is not None:
                names[value] = constants[value] = f"{name}<{index}"
            else:
                names[value] = weights[value] = str(value.name).removeprefix(prefix)
        for index, value in enumerate(node.outputs):
            names[value] = f"{name}:{index}"
        protos.append(_node(node, name, names))
    return Unit(
        inputs=tuple(inputs.values()),
        outputs=tuple(names[value] for value in outputs),
        nodes=tuple(protos),
        constants=tuple(_constant(value, name) for value, name in constants.items()),
        weights=tuple(sorted(weights.values())),
    )


def _between(graph: ir.Graph, inputs: dict[ir.Value, str], outputs: Sequence[ir.Value]) -> list[ir.Node]:
    wanted: set[ir.Value] = set(outputs)
    found = []
    for node in reversed(graph):
        if wanted.intersection(node.outputs):
            found.append(node)
            wanted.update(value for value in node.inputs if value is not None and value not in inputs)
    return found[::-1]


def _scope(node: ir.Node, prefix: str) -> str:
    noted = node.metadata_props.get(SCOPES)
    if noted is None:
        return ""
    modules = [name for name in ast.literal_eval(noted)[:-1] if name]
    return modules[-1].removeprefix(prefix) if modules else ""


def _node(node: ir.Node, name: str, names: dict[ir.Value, str]) -> onnx.NodeProto:
    proto = ir.to_proto(node)
    # The exporter notes the source lines, with the paths of this machine.
    del proto.metadata_props[:]
    proto.ClearField("doc_string")
    proto.name = name
    proto.input[:] = ["" if value is None else names[value] for value in node.inputs]
    proto.output[:] = [names[value] for value in node.outputs]
    return proto


def _constant(value: ir.Value, name: str) -> onnx.TensorProto:
    assert value.const_value is not None
    return onnx.numpy_helper.from_array(value.const_value.numpy(), name)


def _copied_node(node: onnx.NodeProto, rename: Rename) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = rename(node.name)
    copy.input[:] = [rename(name) if name else "" for name in node.input]
    copy.output[:] = [rename(name) for name in node.output]
    return copy


def _copied_constant(tensor: onnx.TensorProto, rename: Rename) -> onnx.TensorProto:
    copy = onnx.TensorProto()
    copy.CopyFrom(tensor)
    copy.name = rename(tensor.name)
    return copy
