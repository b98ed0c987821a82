"""A phone artifact opened from its bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from export.ledger import Ledger
from export.phone.check import graph_problems, manifest_problems, pair_problems
from export.phone.files import external, load_graph
from export.phone.manifest import FILE, GRAPHS, Manifest
from export.phone.options import OPSET
from export.phone.quantized import is_quantized, quantized_problems
from models.checkpoint import TensorInfo
from models.errors import BadInput

FORMAT = "phone"
# Bits of a weight's code, and of the scale that a row shares.
CODE_BITS, SCALE_BITS = 8, 32


def is_phone(folder: Path) -> bool:
    """Whether a folder holds a phone artifact, whole or damaged."""
    return (folder / FILE).is_file()


class PhoneArtifact:
    """Graphs, manifest and ledger.

    Raises:
        BadInput: when there is no ledger, or no manifest that this version reads.
    """

    format = FORMAT

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = Ledger.read(folder)
        try:
            self.manifest = Manifest.read(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInput(f"{folder / FILE}: expected the graphs' manifest, found {error!r}") from error
        self.dtype: torch.dtype = getattr(torch, self.ledger.dtype)

    @property
    def model_config(self) -> dict[str, Any]:
        """The configuration of the model that it was made from."""
        return self.ledger.source_config

    @property
    def graph_files(self) -> list[Path]:
        """In the order of the parts, prefill before decode."""
        return [self.folder / part.graph(kind).file for part in self.manifest.parts for kind in GRAPHS]

    @property
    def weight_files(self) -> list[Path]:
        """Graphs and weights."""
        return [*self.graph_files, *(self.folder / part.data for part in self.manifest.parts)]

    @property
    def float_tables(self) -> list[str]:
        """Graphs that look rows up in a float table beside layers, which Qualcomm's HTP does not compile."""
        found = []
        for part in self.manifest.parts:
            graph = load_graph(self.folder, part.prefill.file)
            tables = {tensor.name for tensor in external(graph) if tensor.data_type == onnx.TensorProto.FLOAT}
            reads = any(node.op_type == "Gather" and node.input[0] in tables for node in graph.graph.node)
            if reads and part.layers[0] < part.layers[1]:
                found.append(part.prefill.file)
        return found

    def operators(self) -> Iterator[tuple[Path, Counter[str]]]:
        """How many of each operator every graph has."""
        for path in self.graph_files:
            yield path, Counter(node.op_type for node in load_graph(self.folder, path.name).graph.node)

    def stored(self) -> dict[str, TensorInfo]:
        """Dtype and shape of what the weights' files hold, by the name of the initialiser."""
        found = {}
        for part in self.manifest.parts:
            for tensor in external(load_graph(self.folder, part.decode.file)):
                dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
                found[tensor.name] = TensorInfo(getattr(torch, str(dtype)), tuple(tensor.dims))
        return found

    @property
    def bits_per_weight(self) -> float:
        """Bits of codes and scales over the quantised linears."""
        bits, weights = 0.0, 0
        for row in self.ledger.tensors:
            for linear in row.linears:
                rows = linear.rows[1] - linear.rows[0]
                bits += rows * (CODE_BITS * row.shape[1] + SCALE_BITS)
                weights += rows * row.shape[1]
        return bits / max(1, weights)

    def check(self) -> None:
        """Raises BadInput listing every file that is not as it was written, and every rule that a graph breaks."""
        problems = self.ledger.file_problems(self.folder)
        if not problems:
            problems = self._graph_problems()
        if problems:
            raise BadInput(f"{self.folder}: {problem}" for problem in problems)

    def _graph_problems(self) -> list[str]:
        problems = manifest_problems(self.manifest)
        for part in self.manifest.parts:
            graphs = {kind: load_graph(self.folder, part.graph(kind).file) for kind in GRAPHS}
            for kind, graph in graphs.items():
                problems += graph_problems(graph, part.graph(kind), OPSET, part.norms)
            problems += pair_problems(graphs["prefill"], graphs["decode"], part.data)
            if any(is_quantized(graph) for graph in graphs.values()):
                problems += quantized_problems(graphs, part, self.manifest.activations)
        return problems
