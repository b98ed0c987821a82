"""A phone artifact seen as a plain checkpoint: the graphs' weights dequantised, in the model's own layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import torch

from export.phone.artifact import PhoneArtifact
from export.phone.files import load_graph
from export.phone.int8 import unpack
from export.phone.manifest import FILE
from export.phone.quantize import QUANTIZED, SCALE, ZERO_POINT
from export.phone.write import RANGES, stored_constant
from models.checkpoint import Checkpoint, TensorInfo
from models.errors import BadInput


class PhoneExpansion(Checkpoint):
    """The weights that the graphs hold, read when they are asked for.

    Norms stay folded and the residual stream rotated as in the graphs; the configuration says that the head is untied.
    """

    def __init__(self, artifact: PhoneArtifact) -> None:
        self.artifact = artifact
        self.name = str(artifact.folder)
        ledger = artifact.ledger
        self.config = {k: v for k, v in ledger.source_config.items() if k not in ("torch_dtype", "quantization_config")}
        self.config["dtype"] = str(artifact.dtype).removeprefix("torch.")
        # The graphs hold a head of their own.
        self.config["tie_word_embeddings"] = False
        self._rows = {row.tensor: row for row in ledger.tensors if row.outcome in ("quantized", "kept")}
        self.tensors = {name: TensorInfo(artifact.dtype, tuple(row.shape)) for name, row in self._rows.items()}
        self._graphs = [load_graph(artifact.folder, part.prefill.file) for part in artifact.manifest.parts]
        self._part = {tensor.name: graph for graph in self._graphs for tensor in graph.graph.initializer}

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in the artifact's dtype. Raises BadInput naming it when the graphs do not hold it whole."""
        row = self._rows[name]
        if row.outcome == "quantized":
            try:
                value = unpack(self._stored(name + QUANTIZED), self._stored(name + SCALE)).dequantize(torch.float32)
            except BadInput as error:
                raise BadInput(f"{self.name}: {name}: {problem}" for problem in error.problems) from error
        elif name in self._part:
            value = torch.from_numpy(self._stored(name).copy())
        else:
            codes, scale, zero = (self._stored(name + suffix) for suffix in (QUANTIZED, SCALE, ZERO_POINT))
            real = (codes.astype(np.float32) - zero.astype(np.float32)) * scale
            value = torch.from_numpy(np.ascontiguousarray(real, dtype=np.float32))
        if tuple(value.shape) != tuple(row.shape):
            raise BadInput(f"{self.name}: {name}: expected shape {list(row.shape)}, found {list(value.shape)}")
        return value.to(self.artifact.dtype)

    def _stored(self, name: str) -> np.ndarray:
        graph = self._part.get(name, onnx.ModelProto())
        return stored_constant(self.artifact.folder, graph, name)

    def side_files(self) -> dict[str, Path]:
        own = {FILE, RANGES, *(path.name for path in self.artifact.weight_files)}
        return {name: self.artifact.folder / name for name in self.artifact.ledger.files if name not in own}

    def skipped_files(self) -> dict[str, str]:
        return dict(self.artifact.ledger.skipped_files)

    def hashes(self) -> dict[str, str]:
        return dict(self.artifact.ledger.files)
