"""The modules that stand in for transformers' while a graph is exported: each becomes the operators that phones run."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import nn
from transformers.activations import GELUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "phone_graph"


class Product(nn.Module):
    """A linear whose weight is stored as the graph multiplies it, [in features, out features].

    A transposed weight would be a Transpose of a constant in the graph, which quantisers do not look through.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        shape = linear.in_features, linear.out_features
        self.weight = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.matmul(x, self.weight)
        return y if self.bias is None else y + self.bias


class Norm(nn.Module):
    """A root mean square norm as the one operator that ONNX has for it since opset 23."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        assert isinstance(norm.weight, nn.Parameter)
        self.weight = norm.weight
        self.eps = float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Table(nn.Module):
    """An embedding table, read by int32 ids."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a root mean square norm, by the name that transformers' conventions give it."""
    return type(module).__name__.endswith("RMSNorm")


def substitute(module: nn.Module, prefix: str, tanh: bool) -> set[str]:
    """Puts the stand-ins in a module's place, in place.

    Args:
        prefix: the module's full name.
        tanh: approximates GELU by tanh.

    Returns:
        The full names of the weights that are now stored transposed.
    """
    transposed = set()
    for name, child in list(module.named_children()):
        full = f"{prefix}.{name}" if prefix else name
        if isinstance(child, nn.Linear):
            setattr(module, name, Product(child))
            transposed.add(f"{full}.weight")
        elif isinstance(child, nn.Embedding):
            setattr(module, name, Table(child))
        elif is_norm(child):
            setattr(module, name, Norm(child))
        elif isinstance(child, GELUActivation) and tanh:
            setattr(module, name, nn.GELU("tanh"))
        else:
            transposed |= substitute(child, full, tanh)
    return transposed


class PhoneCache:
    """Past entries that come in, and new ones that go out; both are one tensor to attention.

    Keys are [1, kv_heads, head_dim, slots], as attention multiplies them: a step then transposes one new key instead of
    the whole cache. Values are [1, kv_heads, slots, head_dim].
    """

    def __init__(self, past: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.past = past
        self.new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads, for new entries [1, kv_heads, tokens, head_dim]."""
        key = key.transpose(2, 3)
        self.new[layer] = key, value
        past_key, past_value = self.past[layer]
        return torch.cat((past_key, key), 3), torch.cat((past_value, value), 2)


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Softmax attention without copies of the grouped keys and values: a group's queries are rows of one product.

    query [1, heads, tokens, head_dim]; key and value as `PhoneCache` gives them; attention_mask additive
    [1, 1, groups * tokens, slots + tokens].
    """
    _, heads, tokens, head_dim = query.shape
    kv_heads = value.shape[1]
    rows = (query * scaling).reshape(1, kv_heads, heads // kv_heads * tokens, head_dim)
    weights = torch.softmax(torch.matmul(rows, key) + attention_mask, dim=-1)
    output = torch.matmul(weights, value).reshape(1, heads, tokens, head_dim)
    return output.transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)
