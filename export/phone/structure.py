"""What a model's real forward passes to its layers: masks, rotary embeddings and caches, found by running it once.

Nothing is known here of any family: the forward runs on recorders in place of the layers, without weights, and what
was recorded must be of the kinds that a phone graph takes as inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from calibrate.replay import Arguments, Recorder
from export.phone.manifest import CacheType, Rotary
from export.phone.modules import is_norm
from models.checkpoint import Checkpoint
from models.errors import BadInput
from models.family import Dimensions, Family, family_of
from models.skeleton import skeleton

FULL, SLIDING = "full_attention", "sliding_attention"
# What takes a layer argument's place in a graph; everything else is passed on as it was recorded.
Place = Literal["mask", "rotary", "cache"]
# Rotary angles are fp32 numbers up to the context's length.
ROTARY_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Layer:
    """How the model calls one decoder layer.

    Attributes:
        type: of its mask, cache and rotary embedding.
        arguments: the keyword arguments beside the hidden states, with the names of places instead of values.
        places: which of them are places.
        norms: how many root mean square norms it has.
    """

    type: str
    arguments: dict[str, Any]
    places: dict[str, Place]
    norms: int


@dataclass(frozen=True)
class Structure:
    """A model as a phone graph needs it.

    Attributes:
        caches, rotary: by layer type.
    """

    family: Family
    dimensions: Dimensions
    model_type: str
    vocabulary: int
    layers: tuple[Layer, ...]
    caches: dict[str, CacheType]
    rotary: dict[str, Rotary]


def structure_of(checkpoint: Checkpoint, context: int) -> Structure:
    """Runs the model's forward on recorders.

    Raises:
        BadInput: when the model passes its layers something that a phone graph of ``context`` positions cannot hold.
    """
    family = family_of(checkpoint.config, checkpoint.name)
    if not family.phone:
        raise BadInput(
            f"{checkpoint.name}: model_type {checkpoint.config['model_type']!r}: there is no phone export for this"
            " family: its graph was never compared with the model"
        )
    model = skeleton(checkpoint, torch.float32, "eager")
    config = model.config
    window = getattr(config, "sliding_window", None) or 0
    tokens = min(context, max(window + 2, 8))
    recorded = _record(family, model, tokens, 0, checkpoint.name)
    start = _frequencies(model)
    late = _record(family, model, tokens, context - tokens, checkpoint.name)
    if not all(torch.equal(value, start[name]) for name, value in _frequencies(model).items()):
        raise BadInput(
            f"{checkpoint.name}: its rotary frequencies change with the length of the text before {context} positions;"
            " choose a smaller context"
        )
    windows = [_window(arguments, checkpoint.name) for _, arguments in recorded]
    types = _types(config, windows)
    stack = model.get_submodule(family.layers)
    norms = [sum(is_norm(module) for module in layer.modules()) for layer in stack.children()]
    layers = [_layer(types[i], recorded[i][1], norms[i], checkpoint.name) for i in range(len(recorded))]
    caches = {types[i]: _cache(windows[i], context) for i in range(len(layers))}
    rotary = {}
    for index, (_, arguments) in enumerate(late):
        type = types[index]
        if type not in rotary:
            rotary[type] = _rotary(model, type)
        _check_rotary(rotary[type], arguments, context - tokens, checkpoint.name)
    return Structure(family, Dimensions.of(config), config.model_type, config.vocab_size, tuple(layers), caches, rotary)


@torch.no_grad()
def _record(
    family: Family, model: PreTrainedModel, tokens: int, position: int, name: str
) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Every layer's hidden states and keyword arguments for a text whose first token is at ``position``."""
    stack = model.get_submodule(family.layers)
    assert isinstance(stack, nn.ModuleList)
    layers = list(stack)
    recorders = [Recorder(layer) for layer in layers]
    parent, _, leaf = family.norm.rpartition(".")
    owner, norm = model.get_submodule(parent), model.get_submodule(family.norm)
    for index, recorder in enumerate(recorders):
        stack[index] = recorder
    setattr(owner, leaf, nn.Identity())
    embedded = torch.ones(1, tokens, model.config.hidden_size)
    try:
        positions = torch.arange(position, position + tokens)[None]
        output = model.base_model(inputs_embeds=embedded, position_ids=positions, use_cache=True)
    finally:
        setattr(owner, leaf, norm)
        for index, layer in enumerate(layers):
            stack[index] = layer
    if not torch.equal(output.last_hidden_state, embedded):
        raise BadInput(f"{name}: the model changes the embeddings before its first layer, or the last layer's output")
    return [
        (embedded, _by_name(layer, recorder.arguments, name)) for layer, recorder in zip(layers, recorders, strict=True)
    ]


def _by_name(layer: nn.Module, arguments: Arguments | None, name: str) -> dict[str, Any]:
    if arguments is None or arguments[0]:
        raise BadInput(f"{name}: expected every layer to be called with keyword arguments, found {arguments}")
    return arguments[1]


def _window(arguments: dict[str, Any], name: str) -> int | None:
    """How many positions, its own included, a token sees; None for all before it."""
    mask = arguments.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4:
        raise BadInput(f"{name}: expected attention masks of four dimensions, found {mask!r:.80}")
    seen = mask[0, 0] == 0
    tokens = seen.shape[0]
    window = int(seen[-1].sum())
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None]
    if not torch.equal(seen, (distance >= 0) & (distance < window)):
        raise BadInput(f"{name}: expected causal attention, to a sliding window or to everything, found another mask")
    return window if window < tokens else None


def _types(config: Any, windows: list[int | None]) -> list[str]:
    """The configuration's layer types, where each stands for one window; else a name by the window."""
    given = getattr(config, "layer_types", None)
    if given and len(set(zip(given, windows, strict=True))) == len(set(given)):
        return list(given)
    distinct = sorted({window for window in windows if window is not None})
    names = {window: SLIDING if len(distinct) == 1 else f"{SLIDING}_{window}" for window in distinct}
    return [FULL if window is None else names[window] for window in windows]


def _cache(window: int | None, context: int) -> CacheType:
    if window is None:
        return CacheType("full", context, None)
    return CacheType("ring", window - 1, window)


def _layer(type: str, arguments: dict[str, Any], norms: int, name: str) -> Layer:
    places: dict[str, Place] = {}
    values: dict[str, Any] = {}
    for key, value in arguments.items():
        if key == "attention_mask":
            places[key] = "mask"
        elif key == "position_embeddings":
            places[key] = "rotary"
        elif isinstance(value, Cache):
            places[key] = "cache"
        elif key == "position_ids":
            # Layers pass it on to attention that computes masks itself, which the graph's does not.
            values[key] = None
        elif isinstance(value, torch.Tensor | list | tuple | dict):
            raise BadInput(f"{name}: the model passes its layers {key}, which a phone graph has no input for")
        else:
            values[key] = value
    missing = {"mask", "rotary", "cache"} - set(places.values())
    if missing:
        raise BadInput(f"{name}: the model passes its layers no {' and no '.join(sorted(missing))}")
    return Layer(type, values, places, norms)


def _rotary_module(model: PreTrainedModel) -> nn.Module:
    found: nn.Module = model.base_model.rotary_emb
    return found


def _frequencies(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    module = _rotary_module(model)
    return {name: value.clone() for name, value in module.named_buffers() if name.endswith("inv_freq")}


def _rotary(model: PreTrainedModel, type: str) -> Rotary:
    module = _rotary_module(model)
    prefix = f"{type}_" if hasattr(module, f"{type}_inv_freq") else ""
    frequencies = getattr(module, f"{prefix}inv_freq").float().tolist()
    return Rotary(tuple(frequencies), float(getattr(module, f"{prefix}attention_scaling", 1.0)))


def _check_rotary(rotary: Rotary, arguments: dict[str, Any], position: int, name: str) -> None:
    cos, sin = arguments["position_embeddings"]
    positions = torch.arange(position, position + cos.shape[1], dtype=torch.float32)
    angles = positions[:, None] * torch.tensor(rotary.inverse_frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    for found, expected in ((cos, angles.cos() * rotary.scaling), (sin, angles.sin() * rotary.scaling)):
        if found.shape[1:] != expected.shape or not torch.allclose(found[0], expected, rtol=0, atol=ROTARY_TOLERANCE):
            raise BadInput(f"{name}: its rotary embedding is not one that a host computes from frequencies alone")
