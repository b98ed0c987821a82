"""Sums over tokens of products of channels, in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Rows of one product of `gram`: the half below the diagonal is not computed, apart from the blocks on it.
BLOCK = 384


def gram(x: torch.Tensor) -> torch.Tensor:
    """X^T X, fp32 [K, K] and symmetric to the last bit, of inputs [T, K]."""
    columns = x.shape[1]
    total = torch.empty(columns, columns)
    wide = x.float()
    with _matrix_unit(x.dtype):
        for start in range(0, columns, BLOCK):
            stop = min(start + BLOCK, columns)
            total[start:stop, start:] = wide[:, start:stop].t() @ wide[:, start:]
    return total.triu_().add_(total.triu(1).t())


def cross(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A^T B, fp32 [K, L], of inputs [T, K] and [T, L] of one dtype."""
    with _matrix_unit(a.dtype):
        return a.float().t() @ b.float()


@contextmanager
def _matrix_unit(dtype: torch.dtype) -> Iterator[None]:
    """Lets AMX multiply fp32 tensors that hold bf16 numbers: their products are exact in fp32, and so are their sums'
    roundings those of any fp32 product."""
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # torch sets it at run time
    before = settings.fp32_precision
    if dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before
