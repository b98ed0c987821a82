"""The one call of torch's exporter: a model's embedding, its head and a layer of each kind, for prefill and decode."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from transformers import PreTrainedModel

from export.phone.manifest import GRAPHS, Port
from export.phone.modules import ATTENTION, PhoneCache, substitute
from export.phone.options import PhoneOptions
from export.phone.ports import Span, ports
from export.phone.structure import Structure
from export.phone.units import Unit, cut, fold
from models.checkpoint import Checkpoint
from models.skeleton import skeleton

# The module that holds the model inside the exported one; names in the graphs are without it.
HOLDER = "source"


@dataclass(frozen=True)
class Traced:
    """A model's units.

    Attributes:
        stack: name of the module that holds the layers.
        samples: for every layer, the one that its units were cut from.
        embedding: unit by kind of graph.
        transposed: weights that the model stores the other way round.
        shapes: of every weight of a unit, in the graph.
    """

    stack: str
    samples: tuple[int, ...]
    embedding: dict[str, Unit]
    layers: dict[tuple[int, str], Unit]
    heads: dict[str, Unit]
    transposed: frozenset[str]
    shapes: dict[str, tuple[int, ...]]

    def layer(self, layer: int, kind: str, hidden: str, output: str | None) -> Unit:
        """A layer's unit that reads ``hidden`` and writes ``output`` (None for a name of its own)."""
        sample = self.samples[layer]
        unit = self.layers[sample, kind]
        ends = {unit.inputs[0]: hidden}
        for side, roles in (
            (unit.inputs[-2:], ("past_key", "past_value")),
            (unit.outputs[1:], ("new_key", "new_value")),
        ):
            ends |= {name: f"{role}_{layer}" for name, role in zip(side, roles, strict=True)}
        if output is not None:
            ends[unit.outputs[0]] = output
        return unit.copy(lambda name: ends.get(name) or self._moved(name, sample, layer))

    def head(self, kind: str, hidden: str) -> Unit:
        """The final norm and the head, reading ``hidden``."""
        unit = self.heads[kind]
        ends = {unit.inputs[0]: hidden, unit.outputs[0]: "logits"}
        return unit.copy(lambda name: ends.get(name, name))

    def weight(self, name: str) -> tuple[tuple[int, ...], bool]:
        """A weight's shape in the graph, and whether the model stores it the other way round."""
        sampled = name
        if name.startswith(f"{self.stack}."):
            layer = int(name.removeprefix(f"{self.stack}.").partition(".")[0])
            sampled = self._moved(name, layer, self.samples[layer])
        return self.shapes[sampled], sampled in self.transposed

    def _moved(self, name: str, old: int, new: int) -> str:
        for end in (".", "/"):
            if name.startswith(f"{self.stack}.{old}{end}"):
                return f"{self.stack}.{new}{name.removeprefix(f'{self.stack}.{old}')}"
        return name


def trace(checkpoint: Checkpoint, structure: Structure, options: PhoneOptions) -> Traced:
    """Exports the units of a checkpoint's model."""
    model = skeleton(checkpoint, torch.float32, ATTENTION)
    samples = _samples(model, structure)
    distinct = sorted(set(samples))
    stack = model.get_submodule(structure.family.layers)
    assert isinstance(stack, nn.ModuleList)
    for index in range(len(stack)):
        if index not in distinct:
            stack[index] = nn.Identity()
    transposed = substitute(model, "", options.gelu == "tanh")
    sections = [
        _Section(kind, name, structure, tokens) for kind, tokens in _tokens(options) for name in _names(distinct)
    ]
    program = _export(_Sections(model, structure, sections).eval(), sections, options.opset)
    fold(program)
    graph = program.graph
    inputs, outputs = iter(graph.inputs), iter(graph.outputs)
    units: dict[tuple[str, str], Unit] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for section in sections:
        given = {next(inputs): port.name for port in section.inputs}
        made = [next(outputs) for _ in section.outputs]
        units[section.name, section.kind] = cut(graph, f"{HOLDER}.", given, made)
    for name, value in graph.initializers.items():
        if value.const_value is None and value.shape is not None:
            shapes[name.removeprefix(f"{HOLDER}.")] = tuple(int(size) for size in value.shape.numpy())
    return Traced(
        stack=structure.family.layers,
        samples=samples,
        embedding={kind: units["embedding", kind] for kind in GRAPHS},
        layers={(index, kind): units[str(index), kind] for index in distinct for kind in GRAPHS},
        heads={kind: units["head", kind] for kind in GRAPHS},
        transposed=frozenset(transposed),
        shapes=shapes,
    )


def _tokens(options: PhoneOptions) -> list[tuple[str, int]]:
    return list(zip(GRAPHS, (options.prefill, 1), strict=True))


def _names(distinct: list[int]) -> list[str]:
    return ["embedding", *map(str, distinct), "head"]


def _samples(model: PreTrainedModel, structure: Structure) -> tuple[int, ...]:
    """For every layer the first that is like it: of one type, called alike, with equal modules and settings."""
    first: dict[str, int] = {}
    found = []
    for index, layer in enumerate(structure.layers):
        module = model.get_submodule(f"{structure.family.layers}.{index}")
        settings = [
            (name, {key: value for key, value in vars(child).items() if _is_setting(key, value)})
            for name, child in module.named_modules()
        ]
        shapes = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
        found.append(first.setdefault(repr((layer, module, settings, shapes)), index))
    return tuple(found)


def _is_setting(key: str, value: Any) -> bool:
    return key != "layer_idx" and isinstance(value, bool | int | float | str | type(None))


class _Section:
    """A piece of the model that becomes a unit: its name, and its ports for one number of tokens."""

    def __init__(self, kind: str, name: str, structure: Structure, tokens: int) -> None:
        self.kind, self.name = kind, name
        layers = len(structure.layers)
        spans = {"embedding": Span("", 0, 0, True, False), "head": Span("", layers, layers, False, True)}
        self.span = spans[name] if name in spans else Span("", int(name), int(name) + 1, False, False)
        self.inputs, self.outputs = ports(structure, self.span, tokens)


class _Mask(nn.Module):
    """A mask with one row for each query of a group of heads."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, mask: torch.Tensor) -> torch.Tensor:
        return torch.cat([mask] * self.groups, dim=2) if self.groups > 1 else mask


class _Sections(nn.Module):
    """Every section as a function of its own ports."""

    def __init__(self, model: nn.Module, structure: Structure, sections: list[_Section]) -> None:
        super().__init__()
        setattr(self, HOLDER, model)
        groups = structure.dimensions.heads // structure.dimensions.kv_heads
        self.masks = nn.ModuleDict({type: _Mask(groups) for type in structure.caches})
        self.structure, self.sections = structure, sections

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        remaining = iter(inputs)
        outputs = []
        for section in self.sections:
            outputs += self._section(section, [next(remaining) for _ in section.inputs])
        return outputs

    def _section(self, section: _Section, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        family = self.structure.family
        model = getattr(self, HOLDER)
        if section.name == "embedding":
            return [model.get_submodule(family.embedding)(inputs[0])]
        if section.name == "head":
            return [model.get_submodule(family.head)(model.get_submodule(family.norm)(inputs[0]))]
        hidden, mask, cos, sin, *past = inputs
        index = int(section.name)
        layer = self.structure.layers[index]
        cache = PhoneCache({index: (past[0], past[1])})
        places = {"mask": self.masks[layer.type](mask), "rotary": (cos, sin), "cache": cache}
        arguments = layer.arguments | {name: places[place] for name, place in layer.places.items()}
        output = model.get_submodule(f"{family.layers}.{index}")(hidden, **arguments)
        return [output[0] if isinstance(output, tuple) else output, *cache.new[index]]


@torch.no_grad()
def _export(module: nn.Module, sections: list[_Section], opset: int) -> ir.Model:
    arguments = tuple(_example(port) for section in sections for port in section.inputs)
    with _quiet():
        program = torch.onnx.export(
            module, arguments, dynamo=True, opset_version=opset, optimize=False, verbose=False, external_data=False
        )
    assert program is not None
    return program.model


def _example(port: Port) -> torch.Tensor:
    return torch.zeros(port.shape, dtype=getattr(torch, port.dtype), device="meta")


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of packages that it would support and of its own deprecated calls."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
