"""A part on disk: two graph files, and one file with the weights that both name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from export.phone.ports import Span
from models.errors import BadInput

# Of a weight in its file; a runtime maps large ones page by page.
ALIGNMENT, PAGE, LARGE = 64, 4096, 2**20
# A protobuf message that is larger cannot be read.
PROTOBUF_LIMIT = 2**31 - 1

ReadWeight = Callable[[str], np.ndarray]


def save_part(folder: Path, span: Span, graphs: Mapping[str, onnx.ModelProto], read: ReadWeight) -> None:
    """Writes a part's graphs (by kind) and its weights, one weight in memory at a time.

    The graphs' external initialisers get their places; every weight is written once.

    Args:
        read: a weight by its initialiser's name, in the initialiser's dtype and shape.

    Raises:
        RuntimeError: when graphs disagree on a weight, or ``read`` gives another dtype or shape: a bug.
        BadInput: when a graph without its weights is larger than a protobuf message may be.
    """
    weights: dict[str, list[TensorProto]] = {}
    for graph in graphs.values():
        for tensor in external(graph):
            weights.setdefault(tensor.name, []).append(tensor)
    with (folder / span.data).open("wb") as file:
        for name in sorted(weights):
            value = np.ascontiguousarray(read(name))
            for tensor in weights[name]:
                expected = (onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type), tuple(tensor.dims))
                if len(weights[name]) != len(graphs) or expected != (value.dtype, value.shape):
                    raise RuntimeError(
                        f"{span.data}: {name}: in {len(weights[name])} of {len(graphs)} graphs as {expected},"
                        f" read as {(value.dtype, value.shape)}"
                    )
            step = PAGE if value.nbytes >= LARGE else ALIGNMENT
            file.write(b"\0" * (-file.tell() % step))
            for tensor in weights[name]:
                place(tensor, span.data, file.tell(), value.nbytes)
            file.write(value.data)
    for kind, graph in graphs.items():
        size = graph.ByteSize()
        if size > PROTOBUF_LIMIT:
            raise BadInput(f"{span.file(kind)}: {size} bytes without its weights; a protobuf message holds 2 GB: split")
        (folder / span.file(kind)).write_bytes(graph.SerializeToString(deterministic=True))


def external(graph: onnx.ModelProto) -> list[TensorProto]:
    """The initialisers whose data is in another file."""
    return [tensor for tensor in graph.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]


def place(tensor: TensorProto, file: str, offset: int, length: int) -> None:
    """Says where an external tensor's data is."""
    del tensor.external_data[:]
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", file), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))


def load_graph(folder: Path, file: str) -> onnx.ModelProto:
    """A graph without its weights. Raises BadInput when the file is not one."""
    try:
        return onnx.load(folder / file, load_external_data=False)
    # protobuf's own error is no subclass of a common one.
    except Exception as error:
        raise BadInput(f"{folder / file}: expected an ONNX graph, found {type(error).__name__}: {error}") from error


def read_external(folder: Path, tensor: TensorProto) -> np.ndarray:
    """An external initialiser's data. Raises BadInput when its file is not there or too short."""
    where = {entry.key: entry.value for entry in tensor.external_data}
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    count = int(np.prod(tensor.dims, dtype=np.int64))
    path = folder / where["location"]
    try:
        value = np.fromfile(path, dtype, count, offset=int(where["offset"]))
    except OSError as error:
        raise BadInput(f"{path}: {tensor.name}: {error}") from error
    if value.size != count:
        raise BadInput(f"{path}: {tensor.name}: expected {count} numbers, found {value.size}: truncated")
    return value.reshape(tuple(tensor.dims))
