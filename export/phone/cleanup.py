"""An exported graph made small, named and anonymous: constants folded, names from the model's modules, no metadata."""

from __future__ import annotations

import ast
from collections import Counter

import onnx_ir as ir
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from onnxscript import optimizer

from export.phone.manifest import Port

# Where the exporter notes which modules a node comes from, outermost first, and last the node itself.
SCOPES = "pkg.torch.onnx.name_scopes"
PRODUCER = "edge-convert"


def clean(model: ir.Model, prefix: str, inputs: tuple[Port, ...], outputs: tuple[Port, ...]) -> None:
    """Works in place; the weights, which have no data yet, stay initialisers.

    Args:
        prefix: of the names that the exporter gave weights and modules; removed.
    """
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
    for value in weights:
        value.name = str(value.name).removeprefix(prefix)
    constants = list(graph.initializers.values())
    graph.initializers.clear()
    _name(graph, prefix, inputs, outputs)
    for value in [*(value for value in weights if value.uses()), *constants]:
        graph.initializers[str(value.name)] = value
    _anonymous(model)


def _name(graph: ir.Graph, prefix: str, inputs: tuple[Port, ...], outputs: tuple[Port, ...]) -> None:
    """Nodes by module, operator and number, ``model.layers.0.mlp/Mul_0``; values by the node that makes them, and
    constants by the first that reads them. So the two graphs of a part share their names."""
    counts: Counter[str] = Counter()
    scope = ""
    for node in graph:
        # What a pass put in belongs to where it was put.
        scope = _scope(node, prefix) or scope
        base = f"{scope}/{node.op_type}"
        node.name = f"{base}_{counts[base]}"
        counts[base] += 1
        for index, value in enumerate(node.outputs):
            value.name = f"{node.name}:{index}"
        for index, constant in enumerate(node.inputs):
            if constant is not None and constant.const_value is not None and "<" not in str(constant.name):
                constant.name = f"{node.name}<{index}"
    for values, given in ((graph.inputs, inputs), (graph.outputs, outputs)):
        for value, port in zip(values, given, strict=True):
            value.name = port.name


def _scope(node: ir.Node, prefix: str) -> str:
    noted = node.metadata_props.get(SCOPES)
    if noted is None:
        return ""
    modules = [name for name in ast.literal_eval(noted)[:-1] if name]
    return modules[-1].removeprefix(prefix) if modules else "part"


def _anonymous(model: ir.Model) -> None:
    """The exporter notes the source lines, with the paths of this machine, at every node and value."""
    ClearMetadataAndDocStringPass()(model)
    for node in model.graph:
        for value in node.outputs:
            value.metadata_props.clear()
            value.doc_string = None
    for value in [*model.graph.inputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()
        value.doc_string = None
    model.metadata_props.clear()
    model.graph.name = "part"
    model.producer_name, model.producer_version, model.doc_string, model.domain = PRODUCER, None, None, None
