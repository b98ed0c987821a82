"""Linears and attention of 16-bit numbers where torch's own are slow: their products in fp32, rounded once.

Where oneDNN has no product for the dtype, torch's own loops are several times slower than fp32; and the attention of
one new token is so with AVX-512's products too (measured by `tests/benchmarks/wide.py`; not with AMX). Linears sum in
fp32 both ways, so that only the order of the sum differs; torch's attention of 16-bit numbers rounds its weights to 16
bits too, which this one does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

# transformers' name for `attend`.
ATTENTION = "sdpa_in_fp32"

NARROW = (torch.bfloat16, torch.float16)
# Rows of inputs from which on converting the weight costs less than the slow product.
ROWS = 4
# Weights converted at a time: they stay in cache until they are multiplied.
BLOCK = 1 << 18


def multiplies(dtype: torch.dtype) -> bool:
    """Whether this processor's matrix products of a dtype are at least as fast as fp32's."""
    if dtype not in NARROW:
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


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention by torch's scaled dot product, of fp32 copies where those are faster; differentiable.

    Args:
        query: [batch, heads, tokens, head_dim].
        key, value: [batch, kv heads, tokens so far, head_dim].
        attention_mask: as `sdpa_mask` makes it.

    Returns:
        [batch, tokens, heads, head_dim] in the query's dtype, and None for the weights.
    """
    if multiplies(query.dtype) and query.shape[2] > 1:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return output, None
    batch, rows = len(key), max(1, BLOCK // key[0].numel())
    if attention_mask is not None:
        attention_mask = attention_mask.expand(batch, -1, -1, -1)
    parts = []
    for start in range(0, batch, rows):
        part = slice(start, start + rows)
        mask = None if attention_mask is None else attention_mask[part]
        output, _ = sdpa_attention_forward(module, *(t[part].float() for t in (query, key, value)), mask, **kwargs)
        parts.append(output.to(query.dtype))
    return torch.cat(parts), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)


def widen(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Gives a model of 16-bit parameters the faster products: its linears where this processor multiplies none of
    ``dtype``, and its attention where that is torch's."""
    if dtype not in NARROW:
        return
    if not multiplies(dtype):
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = WideLinear
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(ATTENTION)
