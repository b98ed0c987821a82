"""What a phone's compiler refuses, or computes wrongly, in a graph: every rule was broken once and measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from export.phone.files import PROTOBUF_LIMIT
from export.phone.manifest import Graph, Manifest

# Qualcomm's HTP ran all of these; ScatterND and GatherND, for two, it does not.
OPERATORS = frozenset(
    {
        *("Add", "Concat", "Gather", "Gelu", "MatMul", "Mul", "Neg", "RMSNormalization", "Reshape", "Sigmoid"),
        *("Slice", "Softmax", "Split", "Transpose", "Unsqueeze"),
        *("DequantizeLinear", "QuantizeLinear"),
    }
)
# A quantised mask of the dtype's minimum leaves no step for the scores; one that is too small lets tokens through.
MASKS = (-100.0, -50.0)
# Far above any constant of a model, below every dtype's minimum that stands for minus infinity.
HUGE = 1e30


def manifest_problems(manifest: Manifest) -> list[str]:
    """What a host could not run."""
    low, high = MASKS
    if low <= manifest.mask_value <= high:
        return []
    return [f"mask_value: expected {low:g} to {high:g}, found {manifest.mask_value:g}"]


def graph_problems(model: onnx.ModelProto, graph: Graph, opset: int, norms: int) -> list[str]:
    """Where a graph breaks the rules, each with the graph's file name.

    Args:
        graph: its entry in the manifest.
        norms: how many root mean square norms the part has.
    """
    found = [
        *_size_problems(model),
        *_operator_problems(model, opset, norms),
        *_name_problems(model),
        *_constant_problems(model),
        *_shape_problems(model, graph),
        *_metadata_problems(model),
    ]
    return [f"{graph.file}: {problem}" for problem in found]


def pair_problems(prefill: onnx.ModelProto, decode: onnx.ModelProto, name: str) -> list[str]:
    """Where a part's two graphs differ in more than their shapes: they share weights, and names of tensors."""
    problems = []
    sides = [[(node.op_type, node.name, *node.output) for node in model.graph.node] for model in (prefill, decode)]
    if sides[0] != sides[1]:
        odd = next((pair for pair in zip(*sides, strict=False) if pair[0] != pair[1]), ("", ""))
        problems.append(f"{name}: prefill and decode differ in their nodes: {odd[0]} and {odd[1]}")
    weights = [
        {t.name: (t.data_type, tuple(t.dims), *((e.key, e.value) for e in t.external_data)) for t in _external(model)}
        for model in (prefill, decode)
    ]
    names = sorted(key for key in weights[0].keys() | weights[1].keys() if weights[0].get(key) != weights[1].get(key))
    problems += [f"{name}: prefill and decode do not share {key}" for key in names]
    return problems


def _size_problems(model: onnx.ModelProto) -> Iterator[str]:
    if model.ByteSize() > PROTOBUF_LIMIT:
        yield f"{model.ByteSize()} bytes; a protobuf message holds less than 2 GB"


def _operator_problems(model: onnx.ModelProto, opset: int, norms: int) -> Iterator[str]:
    versions = {entry.domain: entry.version for entry in model.opset_import}
    if versions.get("", versions.get("ai.onnx")) != opset:
        yield f"expected opset {opset}, found {versions}"
    if model.functions:
        yield f"{len(model.functions)} functions of its own"
    counts = Counter((node.domain, node.op_type) for node in model.graph.node)
    for (domain, operator), count in sorted(counts.items()):
        if domain not in ("", "ai.onnx") or operator not in OPERATORS:
            yield f"{count} x {domain + '.' if domain else ''}{operator}: not an operator that phones were seen to run"
    found = counts["", "RMSNormalization"]
    if found != norms:
        yield f"expected {norms} RMSNormalization operators, found {found}: a decomposed norm breaks when quantised"


def _name_problems(model: onnx.ModelProto) -> Iterator[str]:
    graph = model.graph
    names = [value.name for value in [*graph.input, *graph.initializer]]
    names += [name for node in graph.node for name in node.output]
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{name}: defined {count} times"


def _constant_problems(model: onnx.ModelProto) -> Iterator[str]:
    constants = {tensor.name for tensor in model.graph.initializer}
    constants |= {name for node in model.graph.node if node.op_type == "Constant" for name in node.output}
    for node in model.graph.node:
        if node.op_type == "Transpose" and node.input[0] in constants:
            yield f"{node.name}: transposes the constant {node.input[0]}, which quantisers do not look through"
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL or tensor.data_type != TensorProto.FLOAT:
            continue
        values = numpy_helper.to_array(tensor)
        if values.size and not np.abs(values).max() < HUGE:
            yield f"{tensor.name}: holds {values.ravel()[np.abs(values).argmax()]}, the mask of a float model"


def _shape_problems(model: onnx.ModelProto, graph: Graph) -> Iterator[str]:
    values = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    known = {value.name for value in values}
    for name in (name for node in model.graph.node for name in node.output if name not in known):
        yield f"{name}: has no shape"
    for value in values:
        shape = value.type.tensor_type.shape
        if not value.type.tensor_type.HasField("shape"):
            yield f"{value.name}: has no shape"
        elif any(not dimension.HasField("dim_value") for dimension in shape.dim):
            yield f"{value.name}: has a symbolic dimension"
        elif any(dimension.dim_value < 1 for dimension in shape.dim):
            yield f"{value.name}: has an empty dimension"
    for ports, values in ((graph.inputs, model.graph.input), (graph.outputs, model.graph.output)):
        expected = [(port.name, port.shape, port.dtype) for port in ports]
        found = [_described(value) for value in values]
        for wanted, given in zip(expected, found, strict=False):
            if wanted != given:
                yield f"expected {wanted} as the manifest says, found {given}"
        if len(expected) != len(found):
            yield f"expected {len(expected)} ports as the manifest says, found {len(found)}"


def _described(value: onnx.ValueInfoProto) -> tuple[str, tuple[int, ...], str]:
    tensor = value.type.tensor_type
    dtype = str(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)))
    return value.name, tuple(dimension.dim_value for dimension in tensor.shape.dim), dtype


def _metadata_problems(model: onnx.ModelProto) -> Iterator[str]:
    holders = [model, model.graph, *model.graph.node, *_external(model)]
    holders += [*model.graph.input, *model.graph.output, *model.graph.value_info, *model.graph.initializer]
    for holder in holders:
        if holder.metadata_props or holder.doc_string:
            yield f"{getattr(holder, 'name', '') or 'the model'}: carries metadata of the machine that exported it"


def _external(model: onnx.ModelProto) -> list[TensorProto]:
    return [tensor for tensor in model.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]
