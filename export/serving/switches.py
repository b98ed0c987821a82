"""Every environment variable that the serving code reads, and the one place that reads them.

A switch is here because a measurement went one way on one machine and may go the other way elsewhere.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from models.errors import BadInput


@dataclass(frozen=True)
class Switch:
    """One environment variable.

    Attributes:
        default: its value when it is not set.
        choices: what it may be; empty for a whole number of at least one.
        why: what it decides.
        measured: the evidence for the default.
    """

    name: str
    default: str
    choices: tuple[str, ...]
    why: str
    measured: str

    def read(self) -> str:
        """The value in force. Raises BadInput for one that the switch does not have."""
        value = os.environ.get(self.name, self.default)
        if self.choices and value not in self.choices:
            raise BadInput(f"{self.name}: expected one of {', '.join(self.choices)}, found {value!r}")
        if not self.choices and not (value.isdecimal() and int(value) >= 1):
            raise BadInput(f"{self.name}: expected a whole number of at least 1, found {value!r}")
        return value

    def on(self) -> bool:
        """Whether an ``on``/``off`` switch is on."""
        return self.read() == "on"


ON_OFF = ("on", "off")

WIDE_ROWS = Switch(
    name="EDGE_CONVERT_WIDE_ROWS",
    default="2",
    choices=(),
    why="Inputs with at least this many rows unpack the weights to bf16 and multiply with the ordinary GEMM;"
    " narrower ones take torch's int4 operator, whose time grows with the rows.",
    measured="Linears of a 1.7B Spark layer, Xeon with AMX, one thread: two paths over the operator alone 0.15 at 512"
    " rows, 0.59 at 128 and 0.89 at 64, but 1.7 at 32, 2.9 at 16 and 13 at 2, where unpacking dominates. With 2 every"
    " wide batch has the numbers of the expanded weights; raise it (48) where batches are small."
    " tests/benchmarks/two_paths.py",
)
HEAD_GATE = Switch(
    name="EDGE_CONVERT_HEAD_GATE",
    default="traced",
    choices=("traced", "operator", "gemm"),
    why="How Spark-X2.5's head gate projects 2048 features to 8 heads: as a sum of products that the compiler sees,"
    " the same behind an opaque operator, or as a bf16 GEMM.",
    measured="28 layers, one row, Xeon: compiled 0.68 ms traced, 1.18 operator, 1.78 GEMM; eager 1.13, 1.25,"
    " 1.90. Published: operator 0.444 ms, GEMM 1.155, traced slower than both; the traced sum here is over fp32"
    " weights. tests/benchmarks/head_gate.py",
)
FUSED_RMS_NORM = Switch(
    name="EDGE_CONVERT_FUSED_RMS_NORM",
    default="off",
    choices=ON_OFF,
    why="Spark-X2.5's norms by vLLM's compiled rms_norm kernel instead of torch operations.",
    measured="57 norms of 2048 on one row, Xeon, one thread: compiled 0.18 ms without it, 1.89 with it (eager 1.48 and"
    " 1.13); on 256 rows compiled 9 ms and 35. Published end to end: 74.0 tokens/s without it, 72.7 with it.",
)
COMPILE_CACHE = Switch(
    name="EDGE_CONVERT_COMPILE_CACHE",
    default="on",
    choices=ON_OFF,
    why="Lets vLLM's CPU backend load the graphs that it compiled at an earlier start (see compile_cache.py).",
    measured="vLLM 0.32, two layers: the engine starts in 5.3 s with it and in 14.8 s without. Published for 1.7B: 14.9"
    " s and 49.8 s.",
)

SWITCHES = (WIDE_ROWS, HEAD_GATE, FUSED_RMS_NORM, COMPILE_CACHE)
