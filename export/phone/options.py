"""What a phone target may choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Activations = Literal["uint16", "uint8"]
Weights = Literal["int8"]
Embedding = Literal["uint16", "int8", "float"]
Gelu = Literal["exact", "tanh"]

# The first opset with RMSNormalization. Decomposed at 21 and quantised, the norm breaks on Qualcomm's HTP (2 dB).
OPSET = 23
# Of `calibrate.composition`: those that a phone target may name.
METHODS = ("fold", "rotate", "rtn", "search", "gptq", "refine")
# Of a calibration text's tokens, how many go through decode: its activations are those of prefill but for the last few
# bits.
STEPS = 16
# Other texts go beyond what calibration saw: clipping cost more than a third of a bit of 16 does (docs/phone.md).
MARGIN = 1.25
# Choices that were measured broken, and what was measured.
I_KNOW: Mapping[str, str] = {
    "uint8-activations": (
        "8-bit activations gave 5.1 dB where 16 bits gave 36.9 dB (Spark on a phone), and perplexity 43,747 where"
        " 16 bits gave 10.7 (SmolLM2)"
    ),
    "uncalibrated-ranges": "without a calibration text, ranges gave -1.6 dB (Spark on a phone)",
}


@dataclass(frozen=True)
class PhoneOptions:
    """The shape of the graphs, and how they are quantised.

    Attributes:
        context: positions that a cache of a full layer holds.
        prefill: tokens of the prefill graph.
        activations: dtype of activations and of the caches.
        weights: dtype of the linears' weights.
        embedding: dtype of the table. Qualcomm's HTP compiles no Gather from a float one: that needs a part of
            its own, which the phone's CPU runs.
        gelu: the tanh form is faster on NPUs and is another function: only where its fidelity was measured.
        parts: 1 for one pair of graphs; else at least 3: the embedding, ``parts - 2`` groups of layers, the head.
        opset: of the graphs.
        i_know: names of choices that were measured broken and are wanted all the same.
        margin: what the grids of activations span, times what was seen on the calibration text.
    """

    context: int = 1024
    prefill: int = 128
    activations: Activations = "uint16"
    weights: Weights = "int8"
    embedding: Embedding = "uint16"
    gelu: Gelu = "exact"
    parts: int = 1
    opset: int = OPSET
    i_know: tuple[str, ...] = ()
    margin: float = MARGIN
