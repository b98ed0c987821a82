"""Linears of 16-bit numbers on processors that multiply none: their products in fp32, rounded once.

Where oneDNN has no product for the dtype, torch's own loop is several times slower than fp32 (measured by
`tests/benchmarks/wide.py`). Both sum in fp32, so that only the order of the sum differs.
"""

from __future__ import annotations

import torch
from torch import nn

# Rows of inputs from which on converting the weight costs less than the slow product.
ROWS = 4
# Weights converted at a time: they stay in cache until they are multiplied.
BLOCK = 1 << 18


def multiplies(dtype: torch.dtype) -> bool:
    """Whether this processor's matrix products of a dtype are at least as fast as fp32's."""
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return bool(supported[dtype]())


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] @ weight.T [K, N] + bias [N] in x's dtype, by the faster of both ways; differentiable."""
    if multiplies(x.dtype) or x.numel() < ROWS * x.shape[-1]:
        return nn.functional.linear(x, weight, bias)
    return through_fp32(x, weight, bias)


def through_fp32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `linear`, on any processor: sums in fp32, rounded once to x's dtype."""
    wide, rows = x.float(), max(1, BLOCK // weight.shape[1])
    parts = []
    for start in range(0, len(weight), rows):
        part = nn.functional.linear(wide, weight[start : start + rows].float())
        parts.append((part if bias is None else part + bias[start : start + rows].float()).to(x.dtype))
    return torch.cat(parts, -1)


class WideLinear(nn.Linear):
    """An `nn.Linear` whose product is `linear`'s."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


def widen(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives a model's linears the faster product, where parameters of ``dtype`` need another than torch's."""
    if multiplies(dtype):
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = WideLinear
