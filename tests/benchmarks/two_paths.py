"""Prefill by two paths over one set of weights against one path, and where the paths cross: run it, read the ratios.

    OMP_NUM_THREADS=1 python tests/benchmarks/two_paths.py

For the linears of one Spark-X2.5 1.7B layer. *one path* is torch's int4 operator for every input; *two paths* takes it
for a single row only and unpacks to bf16 for wider inputs; *bf16* is the linear with its weight expanded once.
Passes are interleaved, so that a busy machine slows all three; the ratios are medians over passes with the quartiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from export import tinygemm
from export.serving import linear

SHAPES = {"qkv_proj": (3072, 2048), "out_proj": (2048, 2048), "gate_up_proj": (13312, 2048), "down_proj": (2048, 6656)}
GROUP = 128
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
PASSES = 7


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = []
    for rows, columns in SHAPES.values():
        packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
        table = (torch.randn(columns // GROUP, rows, 2, generator=generator) / 100).to(torch.bfloat16)
        weights.append((packed, table, tinygemm.dequantize_packed(packed, table, linear.host()).contiguous()))
    operator = torch.ops.aten._weight_int4pack_mm_for_cpu
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, layout {linear.host()}, group size {GROUP}")
    print(f"{'rows':>5} {'one path ms':>12} {'two paths / one path':>24} {'two paths / bf16':>24}")
    for rows in ROWS:
        inputs = [torch.randn(rows, columns, generator=generator).to(torch.bfloat16) for _, columns in SHAPES.values()]

        def one(inputs: list[torch.Tensor] = inputs) -> None:
            for x, (packed, table, _) in zip(inputs, weights, strict=True):
                operator(x, packed, GROUP, table)

        def two(inputs: list[torch.Tensor] = inputs) -> None:
            for x, (packed, table, _) in zip(inputs, weights, strict=True):
                linear.multiply(x, packed, table, GROUP)

        def expanded(inputs: list[torch.Tensor] = inputs) -> None:
            for x, (_, _, weight) in zip(inputs, weights, strict=True):
                torch.nn.functional.linear(x, weight)

        times = [[seconds(action) for action in (one, two, expanded)] for _ in range(PASSES)]
        first = statistics.median(t[0] for t in times) * 1e3
        print(f"{rows:>5} {first:>12.2f} {ratio(times, 0):>24} {ratio(times, 2):>24}", flush=True)


def seconds(action: Callable[[], None]) -> float:
    action()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def ratio(times: list[list[float]], against: int) -> str:
    low, middle, high = statistics.quantiles([t[1] / t[against] for t in times], n=4)
    return f"{middle:.2f} ({low:.2f}..{high:.2f})"


if __name__ == "__main__":
    with torch.inference_mode():
        main()
