"""Linears of bf16 numbers by torch's own product and through fp32 (`models.wide`), on this processor.

    python tests/benchmarks/wide.py

Prints CPU milliseconds of both ways on one thread, for the shapes of SmolLM2-135M and of a 1.7B model, alternating the
two in one run. Where torch's own is the faster one (AVX-512, AMX), `models.wide` leaves it alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from models import wide  # noqa: E402

SHAPES = ((576, 576), (576, 1536), (2048, 2048), (2048, 8192))
ROWS = (1, 4, 8, 16, 128, 1024)
SECONDS = 0.4


def cost(product: Callable[[], torch.Tensor]) -> float:
    """CPU seconds of one call."""
    calls, start = 0, time.process_time()
    while (spent := time.process_time() - start) < SECONDS or calls < 2:
        product()
        calls += 1
    return spent / calls


def main() -> None:
    torch.set_num_threads(1)
    print(f"this processor multiplies bf16 at least as fast as fp32: {wide.multiplies(torch.bfloat16)}")
    print("      K      N   rows   torch ms    fp32 ms   ratio", flush=True)
    for columns, outputs in SHAPES:
        weight = torch.randn(outputs, columns).bfloat16()
        for rows in ROWS:
            x = torch.randn(rows, columns).bfloat16()
            own = cost(lambda x=x, weight=weight: functional.linear(x, weight))
            fp32 = cost(lambda x=x, weight=weight: wide.through_fp32(x, weight))
            print(f"{columns:7}{outputs:7}{rows:7}{own * 1e3:11.3f}{fp32 * 1e3:11.3f}{own / fp32:8.2f}", flush=True)


if __name__ == "__main__":
    main()
