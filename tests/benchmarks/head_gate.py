"""Spark-X2.5's head gate in a decode step, in each way that there is, eager and compiled: run it, read the times.

    OMP_NUM_THREADS=1 python tests/benchmarks/head_gate.py

28 layers of the 1.7B model's 2048 x 8 projection on one row, each with its own weight; interleaved passes, medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from export.serving.spark_ops import GATES

LAYERS, HIDDEN, HEADS = 28, 2048, 8
PASSES, REPEATS = 15, 20


def step(project: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        total = x
        for weight in weights:
            gate = torch.sigmoid(project(total, weight).float()).to(x.dtype)
            total = (total.view(HEADS, -1) * gate.view(HEADS, 1)).view(1, -1)
        return total

    return run


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, HIDDEN, generator=generator).to(torch.bfloat16)
    narrow = [torch.randn(HEADS, HIDDEN, generator=generator).to(torch.bfloat16) for _ in range(LAYERS)]
    wide = [weight.float() for weight in narrow]
    ways: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = {}
    for name, project in GATES.items():
        weights = narrow if name == "gemm" else wide
        ways[f"{name}, eager"] = step(project), weights
        ways[f"{name}, compiled"] = torch.compile(step(project)), weights
    ways |= {
        "no gate projection, compiled": (torch.compile(step(lambda x, weight: x[:, :HEADS])), narrow),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(PASSES):
        for name, (run, weights) in ways.items():
            run(x, weights)
            start = time.perf_counter()
            for _ in range(REPEATS):
                run(x, weights)
            times[name].append((time.perf_counter() - start) / REPEATS * 1e3)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; ms for {LAYERS} layers")
    for name, found in times.items():
        low, middle, high = statistics.quantiles(found, n=4)
        print(f"{name:>30} {middle:.3f} ({low:.3f}..{high:.3f})")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
