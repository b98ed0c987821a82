"""Error and speed of the methods on each grid, side by side: python tests/benchmarks/methods.py

The weight is random with heavy tails and the inputs have a few loud channels, as in a real model. The error is the
relative output error (see calibrate.search.error), the speed is weights per second.
"""

from __future__ import annotations

import statistics
import time

import torch

from calibrate.grid import Grid, ZeroKind
from calibrate.methods import CHOOSE
from calibrate.search import error
from calibrate.statistics import Inputs

ROWS, COLUMNS, REPEATS = 2048, 2048, 3


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS, generator=generator) * 0.02
    weight *= torch.rand(ROWS, COLUMNS, generator=generator).clamp(min=0.05).rsqrt()
    weight = weight.bfloat16()
    moments = torch.randn(COLUMNS, generator=generator).exp().square()
    kinds: tuple[ZeroKind, ...] = ("none", "integer", "float")
    print(f"[{ROWS}, {COLUMNS}], {torch.get_num_threads()} threads, median of {REPEATS}")
    print(f"{'zero':8} {'group':>5} {'bits':>6} {'method':8} {'error':>8} {'to rtn':>7} {'Mweights/s':>11}")
    for zero in kinds:
        for group_size in (32, 64, 128):
            grid = Grid(group_size, zero)
            plain = None
            for name, choose in CHOOSE.items():
                seconds = []
                for _ in range(REPEATS):
                    began = time.perf_counter()
                    quantized = choose(weight, grid, Inputs(moments))
                    seconds.append(time.perf_counter() - began)
                found = error(weight, quantized, moments)
                plain = plain or found
                speed = weight.numel() / statistics.median(seconds) / 1e6
                print(
                    f"{zero:8} {group_size:5} {grid.bits_per_weight:6.3f} {name:8}"
                    f" {found:8.4f} {found / plain:7.3f} {speed:11.1f}"
                )


if __name__ == "__main__":
    main()
