"""What a quantised pair of graphs must be like; every rule was broken once and measured (see tests)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper

from export.phone.manifest import GRAPHS, Graph, Part
from export.phone.products import SIGNED
from export.phone.quantize import QUANTIZED, grids, readers

# They make codes of numbers and numbers of codes.
PAIRS = ("QuantizeLinear", "DequantizeLinear")


@dataclass(frozen=True)
class Counts:
    """What a quantised graph must hold, counted in the float graph.

    Attributes:
        products: with int8 weights.
        codes: initialisers of codes, by their dtype.
    """

    products: int
    codes: Mapping[str, int]


def expected_counts(model: onnx.ModelProto, weights: int, table: str | None, activations: str) -> Counts:
    """Counts for a float graph's part.

    Args:
        weights: how many of its initialisers become int8 weights.
        table: dtype of an embedding's codes; ``float`` for a table that stays as it is, None where there is none.
        activations: their dtype, which all other constants get too.
    """
    floats = sum(tensor.data_type == onnx.TensorProto.FLOAT for tensor in model.graph.initializer)
    codes = Counter({"int8": weights, activations: floats - weights - int(table is not None)})
    if table is not None and table != "float":
        codes[table] += 1
    return Counts(weights, codes)


def is_quantized(model: onnx.ModelProto) -> bool:
    """Whether a graph has quantisers at all."""
    return any(node.op_type in PAIRS for node in model.graph.node)


def quantized_problems(
    models: Mapping[str, onnx.ModelProto], part: Part, activations: str, counts: Counts | None = None
) -> list[str]:
    """Where a part's two graphs break the rules, each named by file and tensor.

    Args:
        activations: dtype that all activations have.
        counts: what there must be; None does not count.
    """
    problems: list[str] = []
    for kind in GRAPHS:
        model, graph = models[kind], part.graph(kind)
        found = [
            *_weight_problems(model, counts),
            *_code_problems(model, counts),
            *_activation_problems(model, activations),
            *_product_problems(model, SIGNED[activations]),
            *_port_problems(model, graph),
        ]
        problems += [f"{graph.file}: {problem}" for problem in found]
    prefill, decode = (_read_grids(models[kind]) for kind in GRAPHS)
    for name in sorted(prefill.keys() | decode.keys()):
        if prefill.get(name) != decode.get(name):
            problems.append(f"{part.data}: {name}: {prefill.get(name)} in prefill, {decode.get(name)} in decode")
    return problems


def _code_problems(model: onnx.ModelProto, counts: Counts | None) -> Iterator[str]:
    """As many constants of codes as there were numbers to code: none was left in float, none is there twice."""
    if counts is None:
        return
    found: Counter[str] = Counter()
    for tensor in model.graph.initializer:
        if tensor.name.endswith(QUANTIZED):
            found[str(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)))] += 1
    for dtype in sorted(found.keys() | counts.codes.keys()):
        expected = counts.codes.get(dtype, 0)
        if found[dtype] != expected:
            yield f"expected {expected} constants in {dtype} codes, found {found[dtype]}"


def _weight_problems(model: onnx.ModelProto, counts: Counts | None) -> Iterator[str]:
    """Every product with a constant: int8, symmetric, one scale per output channel."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    producers = {name: node for node in model.graph.node for name in node.output}
    count = 0
    for node in model.graph.node:
        if node.op_type != "MatMul":
            continue
        right = node.input[1]
        source = producers.get(right)
        if right in tensors:
            yield f"{node.name}: {right} is a float weight"
        if source is None or source.op_type != "DequantizeLinear" or source.input[0] not in tensors:
            continue
        count += 1
        codes, scale, zero = (tensors[name] for name in source.input)
        axis = next((attribute.i for attribute in source.attribute if attribute.name == "axis"), None)
        if codes.data_type != onnx.TensorProto.INT8:
            yield f"{right}: expected int8 codes, found {onnx.TensorProto.DataType.Name(codes.data_type)}"
        if axis != 1 or tuple(scale.dims) != (codes.dims[-1],):
            yield f"{right}: expected a scale for each of {codes.dims[-1]} output channels, found {list(scale.dims)}"
        values = numpy_helper.to_array(scale)
        if not (np.isfinite(values) & (values > 0)).all():
            yield f"{right}: scales: expected positive finite ones, found {values.min()} to {values.max()}"
        if numpy_helper.to_array(zero).any():
            yield f"{right}: expected a symmetric grid, found zero points"
    if counts is not None and count != counts.products:
        yield f"expected {counts.products} products with int8 weights, found {count}"


def _activation_problems(model: onnx.ModelProto, activations: str) -> Iterator[str]:
    """Between operators there are codes only."""
    tensors = {tensor.name for tensor in model.graph.initializer}
    producers = {name: node for node in model.graph.node for name in node.output}
    floats = {
        value.name
        for value in [*model.graph.input, *model.graph.value_info, *model.graph.output]
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    }
    for node in model.graph.node:
        # A float table is read as it is; what is read is quantised then.
        if node.op_type in PAIRS or node.op_type == "Gather":
            continue
        for name in node.input:
            source = producers.get(name)
            if name in floats and (source is None or source.op_type != "DequantizeLinear") and name not in tensors:
                yield f"{node.name}: reads {name} in float"
            elif name in tensors and name in floats:
                yield f"{node.name}: reads the constant {name} in float"
    # Rows of a table of codes are on the table's grid.
    rows = {name for node in model.graph.node if node.op_type == "Gather" for name in node.output}
    coded = {node.output[0] for node in model.graph.node if node.op_type == "QuantizeLinear" and node.input[0] in rows}
    sides = _sides(model)
    for name, grid in grids(model).items():
        signed = name in sides and grid.dtype == SIGNED[activations]
        if grid.dtype != activations and not signed and not (name in coded and grid.dtype in ("int8", "uint16")):
            yield f"{name}: expected {activations}, found {grid.dtype}"
        if not (math.isfinite(grid.scale) and grid.scale > 0):
            yield f"{name}: expected a positive finite scale, found {grid.scale}"


def _sides(model: onnx.ModelProto) -> dict[str, list[str]]:
    """Codes that are a side of a product of two activations, or are joined to one; the products' names by them."""
    constants = {tensor.name for tensor in model.graph.initializer}
    producers = {name: node for node in model.graph.node for name in node.output}

    def codes(name: str) -> str:
        source = producers.get(name)
        return source.input[0] if source is not None and source.op_type in PAIRS else name

    found: dict[str, list[str]] = {}
    for node in model.graph.node:
        sides = [codes(name) for name in node.input]
        if node.op_type == "MatMul" and not constants.intersection(sides):
            for side in sides:
                found.setdefault(side, []).append(node.name)
    for node in model.graph.node:
        if node.op_type == "Concat":
            for reader in readers(model, node.output[0]):
                for side in (codes(name) for name in node.input if reader.output[0] in found):
                    found.setdefault(side, []).append(node.name)
    return found


def _product_problems(model: onnx.ModelProto, signed: str) -> Iterator[str]:
    """Qualcomm's HTP takes the right side of a product of unsigned 16-bit activations in 8 bits."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    sides = _sides(model)
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in sides:
            zero = numpy_helper.to_array(constants[node.input[2]])
            if str(zero.dtype) != signed or zero.any():
                where = ", ".join(sides[node.input[0]])
                yield f"{where}: reads {node.input[0]} as {zero.dtype} around {zero}: expected {signed} around 0"


def _port_problems(model: onnx.ModelProto, graph: Graph) -> Iterator[str]:
    """A cache's past and new entries are codes of one grid, and the graph's grid is the manifest's."""
    by_layer: dict[tuple[int, str], list[tuple[str, float | None, int | None]]] = {}
    for port in (*graph.inputs, *graph.outputs):
        if port.layer is not None:
            what = port.role.removeprefix("past_").removeprefix("new_")
            by_layer.setdefault((port.layer, what), []).append((port.name, port.scale, port.zero_point))
    for entries in by_layer.values():
        if len({entry[1:] for entry in entries}) > 1 or entries[0][1] is None:
            grids_found = " and ".join(str(entry[1:]) for entry in entries)
            yield f"{', '.join(entry[0] for entry in entries)}: expected one grid, found {grids_found}"
    read = _read_grids(model)
    for port in (*graph.inputs, *graph.outputs):
        if port.scale is not None:
            for scale, zero in read.get(port.name, set()):
                if (scale, zero) != (np.float32(port.scale), port.zero_point):
                    stated = f"({port.scale}, {port.zero_point}) in the manifest"
                    yield f"{port.name}: on ({scale}, {zero}) in the graph, {stated}"


def _read_grids(model: onnx.ModelProto) -> dict[str, set[tuple[np.float32, int]]]:
    """Scale and zero point that codes are read or written with, by their tensor's name; per-tensor grids only."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    found: dict[str, set[tuple[np.float32, int]]] = {}
    for node in model.graph.node:
        if node.op_type in PAIRS and not any(constants[name].dims for name in node.input[1:3]):
            scale, zero = (numpy_helper.to_array(constants[name]) for name in node.input[1:3])
            codes = node.output[0] if node.op_type == "QuantizeLinear" else node.input[0]
            found.setdefault(codes, set()).add((np.float32(scale), int(zero)))
    return found
