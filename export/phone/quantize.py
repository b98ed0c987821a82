"""Quantised graphs of a part: int8 weights, uint16 activations, quantiser and dequantiser pairs around every operator.

ONNX Runtime's quantiser puts the pairs around activations; the weights come already in int8, so that the numbers that
a phone reads are the ones that calibration chose, and no weight passes through the quantiser's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QDQQuantizer, QuantType, TensorData, TensorsData
from onnxruntime.quantization.calibrate import CalibrationMethod
from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config
from onnxruntime.quantization.onnx_model import ONNXModel

from calibrate.ranges import Ranges
from export.phone.manifest import Graph, Port
from export.phone.products import joined_caches, signed_overrides
from export.phone.table import TableGrid

# Of ONNX Runtime's quantiser, so that all names in a graph follow one rule.
QUANTIZED, SCALE, ZERO_POINT = "_quantized", "_scale", "_zero_point"
# Ports that hold codes: what a phone keeps between steps and passes from part to part.
CODED_ROLES = ("past_key", "past_value", "new_key", "new_value", "hidden")
ACTIVATIONS = {"uint16": QuantType.QUInt16, "uint8": QuantType.QUInt8}
MOVING = ("Reshape", "Transpose", "Split", "Slice", "Unsqueeze")
# Marks a model whose shapes are known, which the quantiser would else save, load and infer.
INFERRED = ("onnx.infer", "onnxruntime.quant")


@dataclass(frozen=True)
class Grid:
    """A per-tensor grid: code q stands for (q - zero_point) * scale."""

    scale: float
    zero_point: int
    dtype: str

    def on(self, port: Port) -> Port:
        """A float port that now holds codes."""
        return replace(port, dtype=self.dtype, scale=self.scale, zero_point=self.zero_point)


def quantize_graph(
    model: onnx.ModelProto,
    graph: Graph,
    scales: Mapping[str, np.ndarray],
    constants: Mapping[str, np.ndarray],
    ranges: Ranges,
    activations: str,
    table: TableGrid | None = None,
) -> tuple[onnx.ModelProto, Graph]:
    """One graph of a part, quantised.

    Args:
        model: the float graph; not changed. Its weights are external tensors.
        graph: its entry in the manifest.
        scales: fp32 [N] of every int8 weight by initialiser name.
        constants: the other weights that are quantised (norms, biases), fp32, by initialiser name.
        ranges: of every float tensor that is no constant, tied as `tied_tensors` says.
        activations: ``uint16`` or ``uint8``.
        table: of the embedding; None leaves it in float.

    Returns:
        The graph with its int8 weights as external tensors without a place yet, and its entry in the manifest.
    """
    overrides = signed_overrides(model, ranges, activations)
    model = _with_int8(model, scales, constants)
    if table is not None:
        _code_table(model, table)
    mark = model.metadata_props.add()
    mark.key, mark.value = INFERRED
    tables = [node.name for node in model.graph.node if node.op_type == "Gather"]
    type = ACTIVATIONS[activations]
    config = get_qnn_qdq_config(
        model,
        None,
        activation_type=type,
        weight_type=QuantType.QInt8,
        per_channel=True,
        init_overrides=overrides,
        add_qtype_converts=False,
        nodes_to_exclude=tables,
    )
    quantizer = QDQQuantizer(
        model,
        per_channel=True,
        reduce_range=False,
        weight_qType=QuantType.QInt8,
        activation_qType=type,
        tensors_range=_tensors_data(ranges),
        nodes_to_quantize=None,
        nodes_to_exclude=tables,
        op_types_to_quantize=config.op_types_to_quantize,
        # An operator that only moves numbers moves codes, even where no other operator asked for them yet.
        extra_options=config.extra_options | {"ForceQuantizeNoInputCheck": True},
    )
    producer = model.producer_name
    quantized = quantizer.quantize_model()
    del quantized.metadata_props[:]
    quantized.producer_name, quantized.producer_version = producer, ""
    coded, entry = _coded_ports(quantized, graph)
    if table is not None:
        _code_rows(coded, table.name)
    # The quantiser puts its pairs at the end.
    ONNXModel(coded).topological_sort()
    return onnx.shape_inference.infer_shapes(coded, check_type=True, strict_mode=True), entry


def _tensors_data(ranges: Ranges) -> TensorsData:
    data = {
        name: TensorData(lowest=np.float32(found.low), highest=np.float32(found.high))
        for name, found in sorted(ranges.by_name.items())
    }
    return TensorsData(CalibrationMethod.MinMax, data)


def _with_int8(
    model: onnx.ModelProto, scales: Mapping[str, np.ndarray], constants: Mapping[str, np.ndarray]
) -> onnx.ModelProto:
    """A copy with the weights in int8 behind dequantisers, and the constants' numbers inside the graph."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    kept = []
    nodes = []
    for tensor in copy.graph.initializer:
        name = tensor.name
        if name in scales:
            codes = TensorProto(name=name + QUANTIZED, data_type=TensorProto.INT8, dims=tensor.dims)
            codes.data_location = TensorProto.EXTERNAL
            kept += [
                codes,
                numpy_helper.from_array(scales[name], name + SCALE),
                numpy_helper.from_array(np.zeros(len(scales[name]), dtype=np.int8), name + ZERO_POINT),
            ]
            inputs = [name + QUANTIZED, name + SCALE, name + ZERO_POINT]
            nodes.append(helper.make_node("DequantizeLinear", inputs, [name], name=f"{name}_DequantizeLinear", axis=1))
            copy.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, tensor.dims))
        elif name in constants:
            kept.append(numpy_helper.from_array(np.ascontiguousarray(constants[name], dtype=np.float32), name))
        else:
            kept.append(tensor)
    kept = [_copied(tensor) for tensor in kept]
    del copy.graph.initializer[:]
    copy.graph.initializer.extend(kept)
    operators = [_copied_node(node) for node in copy.graph.node]
    del copy.graph.node[:]
    copy.graph.node.extend([*nodes, *operators])
    return copy


def _code_table(model: onnx.ModelProto, grid: TableGrid) -> None:
    """Puts a table of codes behind a dequantiser in a float table's place."""
    name = grid.name
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    model.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, tensor.dims))
    tensor.name, tensor.data_type = name + QUANTIZED, helper.np_dtype_to_tensor_dtype(np.dtype(grid.dtype))
    model.graph.initializer.append(numpy_helper.from_array(np.array(grid.scale, dtype=np.float32), name + SCALE))
    model.graph.initializer.append(numpy_helper.from_array(grid.zero_point, name + ZERO_POINT))
    inputs = [name + QUANTIZED, name + SCALE, name + ZERO_POINT]
    model.graph.node.insert(0, helper.make_node("DequantizeLinear", inputs, [name], name=f"{name}_DequantizeLinear"))


def _code_rows(model: onnx.ModelProto, table: str) -> None:
    """Puts what is read from a table of codes on its own grid, as Qualcomm's compiler wants a Gather's output."""
    gather = next(node for node in model.graph.node if node.op_type == "Gather" and node.input[0] == table)
    rows = gather.output[0]
    gather.output[0] = f"{rows}_rows"
    grid = [table + SCALE, table + ZERO_POINT]
    codes = f"{rows}_rows{QUANTIZED}"
    model.graph.node.extend(
        [
            helper.make_node("QuantizeLinear", [gather.output[0], *grid], [codes], name=f"{rows}_rows_QuantizeLinear"),
            helper.make_node("DequantizeLinear", [codes, *grid], [rows], name=f"{rows}_rows_DequantizeLinear"),
        ]
    )


def _copied(tensor: TensorProto) -> TensorProto:
    copy = TensorProto()
    copy.CopyFrom(tensor)
    return copy


def _copied_node(node: onnx.NodeProto) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy


def grids(model: onnx.ModelProto) -> dict[str, Grid]:
    """The grid of every quantised activation, by the name of the tensor of its codes."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            scale, zero = (numpy_helper.to_array(constants[name]) for name in node.input[1:3])
            found[node.output[0]] = Grid(float(scale), int(zero), str(zero.dtype))
    return found


def _coded_ports(model: onnx.ModelProto, graph: Graph) -> tuple[onnx.ModelProto, Graph]:
    """Takes the quantiser after a coded input and the dequantiser before a coded output away: the host passes codes."""
    known = grids(model)
    inputs = tuple(_coded_input(model, port, known) for port in graph.inputs)
    outputs = tuple(_coded_output(model, port, known) for port in graph.outputs)
    for port, value in zip((*inputs, *outputs), (*model.graph.input, *model.graph.output), strict=True):
        value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(port.dtype))
    return model, Graph(graph.file, inputs, outputs)


def _coded_input(model: onnx.ModelProto, port: Port, known: Mapping[str, Grid]) -> Port:
    if port.role not in CODED_ROLES:
        return port
    (quantizer,) = readers(model, port.name)
    if quantizer.op_type != "QuantizeLinear":
        return port
    codes = quantizer.output[0]
    for node in readers(model, codes):
        _rename(node.input, codes, port.name)
    model.graph.node.remove(quantizer)
    return known[codes].on(port)


def _coded_output(model: onnx.ModelProto, port: Port, known: Mapping[str, Grid]) -> Port:
    if port.role not in CODED_ROLES:
        return port
    (dequantizer,) = (node for node in model.graph.node if port.name in node.output)
    if dequantizer.op_type != "DequantizeLinear":
        # Rows of a float table, which are not quantised before a part reads them.
        return port
    codes = dequantizer.input[0]
    others = readers(model, port.name)
    # The quantiser's rule for names; one that converts has a dequantiser of either grid.
    real = f"{dequantizer.name}_Output"
    for node in model.graph.node:
        # What reads the new entries inside the graph still reads real numbers.
        _rename(node.input, port.name, real)
        _rename(node.input, codes, port.name)
        _rename(node.output, codes, port.name)
    dequantizer.output[0] = real
    if not others:
        model.graph.node.remove(dequantizer)
    return known[codes].on(port)


def _rename(names: MutableSequence[str], old: str, new: str) -> None:
    for index, name in enumerate(names):
        if name == old:
            names[index] = new


def tied_tensors(model: onnx.ModelProto) -> list[list[str]]:
    """Groups of tensors that one grid must hold, in a float graph.

    Past entries of a cache and what attention reads of them; new ones are converted to that grid. And what an operator
    only moves, which the quantiser gives its input's grid.
    """
    above: dict[str, str] = {}

    def top(name: str) -> str:
        while name in above:
            name = above[name]
        return name

    moved = [[node.input[0], *node.output] for node in model.graph.node if node.op_type in MOVING]
    for together in [[cache.past, cache.whole] for cache in joined_caches(model)] + moved:
        for name in together[1:]:
            if top(name) != top(together[0]):
                above[top(name)] = top(together[0])
    groups: dict[str, list[str]] = {}
    for name in above:
        groups.setdefault(top(name), [top(name)]).append(name)
    return list(groups.values())


def readers(model: onnx.ModelProto, name: str) -> list[onnx.NodeProto]:
    """The nodes that read a tensor."""
    return [node for node in model.graph.node if name in node.input]
