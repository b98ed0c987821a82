"""The small operations of Spark-X2.5 that engines have no layer for; torch only, so that they are tested anywhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first dims of each head in fp32 (half-rotation style); the rest pass.

    x [tokens, heads, head_dim]; cos and sin fp32 [tokens, 1, rotated dims / 2].
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x fp32 [tokens, hidden], normed and scaled in fp32; returns the weight's dtype."""
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (weight.float() * x).to(weight.dtype)


def rms_norm_fused(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``rms_norm`` by vLLM's compiled kernel, which takes one dtype for all: here fp32."""
    y: torch.Tensor = torch.ops.edge_convert.rms_norm(x, weight, eps)
    return y


def gate_scores(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The head gate's projection as a GEMM: x bf16 [tokens, hidden], weight bf16 [heads, hidden]."""
    return functional.linear(x, weight)


def gate_scores_traced(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``gate_scores`` as a sum of products in fp32, which a compiler makes one loop of; the weight is fp32."""
    if torch.compiler.is_compiling():
        return (x.float().unsqueeze(1) * weight).sum(-1).to(x.dtype)
    return _reduce(x, weight)


def gate_scores_operator(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``gate_scores_traced`` as one opaque node of a traced graph."""
    y: torch.Tensor = torch.ops.edge_convert.gate_scores(x, weight)
    return y


def apply_gate(output: torch.Tensor, scores: torch.Tensor, activation: str) -> torch.Tensor:
    """output [tokens, heads, head_dim] times sigmoid (or silu) of the scores [tokens, heads], that in fp32."""
    scores = scores.float()
    gate = torch.sigmoid(scores) if activation == "sigmoid" else functional.silu(scores)
    return output * gate.to(output.dtype).unsqueeze(-1)


# By the name of the choice; all but the GEMM take the weight in fp32, which holds a bf16 checkpoint exactly.
GATES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "gemm": gate_scores,
    "traced": gate_scores_traced,
    "operator": gate_scores_operator,
}


def _reduce(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if x.shape[0] == 1:
        # A bf16 GEMM of one row and eight columns costs more in setup than in work.
        return torch.mv(weight, x[0].float()).to(x.dtype)[None]
    return functional.linear(x.float(), weight).to(x.dtype)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = torch.empty_like(x)
    torch.ops._C.rms_norm(y, x, weight.float(), eps)
    return y.to(weight.dtype)


_LIBRARY = torch.library.Library("edge_convert", "FRAGMENT")
_LIBRARY.define("gate_scores(Tensor x, Tensor weight) -> Tensor")
_LIBRARY.impl("gate_scores", _reduce, "CPU")
_LIBRARY.define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor")
_LIBRARY.impl("rms_norm", _rms_norm, "CPU")


@torch.library.register_fake("edge_convert::gate_scores", lib=_LIBRARY)
def _gate_shape(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.register_fake("edge_convert::rms_norm", lib=_LIBRARY)
def _norm_shape(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x, dtype=weight.dtype)
