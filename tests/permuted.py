"""A copy of a Llama-shaped model with permuted channels: the same function, without its weights' grouping by blocks.

Weights that were themselves quantised in blocks lie on a few levels a block, which flatters a grid with the same
blocks. A permutation of the channels takes that away: of the residual stream, of every MLP's inner channels, and of
every value head's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from models.checkpoint import Writer
from models.files import to_json
from models.opened import OpenedModel


def permute_channels(model: OpenedModel, folder: Path, seed: int = 0) -> Path:
    """Writes the permuted copy into a new folder and returns it. The family must be Llama's, without biases or fusions.

    Args:
        seed: of the permutations.
    """
    sizes, family = model.dimensions, model.family
    generator = torch.Generator().manual_seed(seed)
    residual = torch.randperm(sizes.hidden, generator=generator)
    heads = {
        layer: torch.stack([torch.randperm(sizes.head_dim, generator=generator) for _ in range(sizes.kv_heads)])
        for layer in range(sizes.layers)
    }
    inner = {layer: torch.randperm(_rows(model, layer), generator=generator) for layer in range(sizes.layers)}

    def permuted(name: str, value: torch.Tensor) -> torch.Tensor:
        if not name.startswith(f"{family.layers}."):
            # The table, the final norm and an untied head: channels are last.
            return value[..., residual]
        layer, _, rest = name.removeprefix(f"{family.layers}.").partition(".")
        values = heads[int(layer)] + torch.arange(sizes.kv_heads)[:, None] * sizes.head_dim
        if rest.endswith("layernorm.weight"):
            return value[residual]
        if rest in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
            return value[:, residual]
        if rest == "self_attn.v_proj.weight":
            return value[values.flatten()][:, residual]
        if rest == "self_attn.o_proj.weight":
            # Query heads in groups read one value head.
            shared = heads[int(layer)].repeat_interleave(sizes.heads // sizes.kv_heads, 0)
            columns = shared + torch.arange(sizes.heads)[:, None] * sizes.head_dim
            return value[residual][:, columns.flatten()]
        if rest in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
            return value[inner[int(layer)]][:, residual]
        if rest == "mlp.down_proj.weight":
            return value[residual][:, inner[int(layer)]]
        raise ValueError(f"{name}: not a tensor of a plain Llama")

    return write_copy(model, folder, permuted)


def write_copy(
    model: OpenedModel, folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, value: value
) -> Path:
    """Writes a model's tensors, each as ``change`` makes it, into a new Hugging Face folder and returns that."""
    source = model.checkpoint
    folder.mkdir(parents=True)
    writer = Writer(folder, 2**31)
    for name in source.tensors:
        writer.add(name, change(name, source.read(name)).contiguous())
    writer.finish()
    (folder / "config.json").write_bytes(to_json(source.config))
    for name, path in source.side_files().items():
        (folder / name).write_bytes(path.read_bytes())
    return folder


def _rows(model: OpenedModel, layer: int) -> int:
    name = f"{model.family.layers}.{layer}.mlp.gate_proj.weight"
    return model.checkpoint.tensors[name].shape[0]
