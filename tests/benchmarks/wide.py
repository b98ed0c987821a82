"""Linears and attention of bf16 numbers by torch's own code and through fp32 (`models.wide`), on this processor.

    python tests/benchmarks/wide.py

Prints CPU milliseconds of both ways on one thread, for the shapes of SmolLM2-135M and of a 1.7B model, alternating the
two in one run: products, then attention of whole windows, of one new token each, and of whole windows with gradients.
Where torch's own is the faster one (AVX-512, AMX: all but one new token), `models.wide` leaves it alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from models import wide  # noqa: E402

SHAPES = ((576, 576), (576, 1536), (2048, 2048), (2048, 8192))
ROWS = (1, 4, 8, 16, 128, 1024)
# Heads, key and value heads, head_dim.
HEADS = ((9, 3, 64), (16, 8, 128))
# Windows, new tokens, tokens so far.
WINDOWS = ((8, 512, 512), (2, 2048, 2048), (1, 1, 256), (32, 1, 256))
SECONDS = 0.4


def cost(product: Callable[[], torch.Tensor]) -> float:
    """CPU seconds of one call."""
    calls, start = 0, time.process_time()
    while (spent := time.process_time() - start) < SECONDS or calls < 2:
        product()
        calls += 1
    return spent / calls


def attended(attention: Callable[..., tuple[torch.Tensor, None]], qkv: list[torch.Tensor], gradients: bool) -> None:
    """One call, and where ``gradients``, the way back."""
    module = nn.Module()
    module.is_causal, module.num_key_value_groups = True, qkv[0].shape[1] // qkv[1].shape[1]  # type: ignore[assignment]
    with torch.set_grad_enabled(gradients):
        output, _ = attention(module, *[t.detach().requires_grad_(gradients) for t in qkv], None, scaling=0.1)
    if gradients:
        output.backward(torch.ones_like(output))


def show_attention() -> None:
    print("  heads   dim windows    new so far gradients   torch ms    fp32 ms   ratio", flush=True)
    for heads, kv_heads, head_dim in HEADS:
        for windows, new, tokens in WINDOWS:
            qkv = [
                torch.randn(windows, h, t, head_dim).bfloat16() for h, t in ((heads, new), *[(kv_heads, tokens)] * 2)
            ]
            for gradients in (False, True) if new > 1 else (False,):
                own, fp32 = (
                    cost(partial(attended, attention, qkv, gradients))
                    for attention in (sdpa_attention_forward, wide.attend)
                )
                shape = f"{f'{heads}/{kv_heads}':>7}{head_dim:6}{windows:8}{new:7}{tokens:7}"
                print(
                    f"{shape}{'yes' if gradients else 'no':>10}{own * 1e3:11.3f}{fp32 * 1e3:11.3f}{own / fp32:8.2f}",
                    flush=True,
                )


def main() -> None:
    torch.set_num_threads(1)
    print(f"this processor multiplies bf16 at least as fast as fp32: {wide.multiplies(torch.bfloat16)}")
    print("      K      N   rows   torch ms    fp32 ms   ratio", flush=True)
    for columns, outputs in SHAPES:
        weight = torch.randn(outputs, columns).bfloat16()
        for rows in ROWS:
            x = torch.randn(rows, columns).bfloat16()
            own = cost(partial(functional.linear, x, weight))
            fp32 = cost(partial(wide.through_fp32, x, weight))
            print(f"{columns:7}{outputs:7}{rows:7}{own * 1e3:11.3f}{fp32 * 1e3:11.3f}{own / fp32:8.2f}", flush=True)
    show_attention()


if __name__ == "__main__":
    main()
