"""An engine's kernel in the place of a model's quantised linears, inside our scorer."""

from __future__ import annotations

import torch
from torch import nn

from calibrate.grid import concatenate
from export.artifact import Artifact
from models.checkpoint import Checkpoint
from models.errors import BadInput
from validate.score import Swap


class UnsuitedKernelError(Exception):
    """The kernel cannot compute with this artifact's linears."""


def kernel_swap(artifact: Artifact, expansion: Checkpoint, kernel: type[nn.Module], dtype: torch.dtype) -> Swap:
    """Gives the kernel's module for every linear of the model whose weight the artifact stores quantised."""
    rows = {row.tensor: row for row in artifact.ledger.tensors}

    def swap(module: str) -> nn.Module | None:
        row = rows.get(f"{module}.weight")
        if row is None or row.outcome != "quantized":
            return None
        if dtype != torch.bfloat16:
            raise UnsuitedKernelError(f"the kernel computes in bfloat16, the model in {dtype}")
        quantized = concatenate([artifact.quantized(stored) for stored in row.stored_as])
        bias = f"{module}.bias"
        try:
            return kernel(quantized, expansion.read(bias) if bias in expansion.tensors else None)
        except BadInput as error:
            raise UnsuitedKernelError(f"{module}: {error}") from error

    return swap
