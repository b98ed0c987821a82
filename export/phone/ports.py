"""The parts of a model, and the inputs and outputs of their graphs."""

from __future__ import annotations

from dataclasses import dataclass

from export.phone.manifest import GRAPHS, Graph, Manifest, Part, Port
from export.phone.options import PhoneOptions
from export.phone.structure import Structure
from models.errors import BadInput


@dataclass(frozen=True)
class Span:
    """A run of layers that one pair of graphs computes.

    Attributes:
        name: of its files, in front of ``.data``.
        start, stop: its layers.
        embedding, head: whether it begins with token ids, and ends with the final norm and the logits.
    """

    name: str
    start: int
    stop: int
    embedding: bool
    head: bool

    def file(self, kind: str) -> str:
        """The graph's file name."""
        return f"{kind}{self.name.removeprefix('model')}.onnx"

    @property
    def data(self) -> str:
        """The name of the file with the weights."""
        return f"{self.name}.data"


def spans(layers: int, parts: int) -> list[Span]:
    """One span of everything, or the embedding, ``parts - 2`` groups of layers whose sizes differ by one at most, and
    the head.

    Raises:
        BadInput: for a number of parts that cannot be.
    """
    if parts == 1:
        return [Span("model", 0, layers, True, True)]
    groups = parts - 2
    if not 1 <= groups <= layers:
        raise BadInput(
            f"split: parts: expected at least 3 (embedding, layers, head) and at most {layers + 2} for {layers} layers,"
            f" found {parts}"
        )
    bounds = [layers * index // groups for index in range(groups + 1)]
    between = [Span(f"model-{index + 1}", bounds[index], bounds[index + 1], False, False) for index in range(groups)]
    return [
        Span("model-0", 0, 0, True, False),
        *between,
        Span(f"model-{groups + 1}", layers, layers, False, True),
    ]


def ports(structure: Structure, span: Span, tokens: int) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    """Inputs and outputs of a span's graph for so many tokens, in order, as the float graph has them."""
    hidden = (1, tokens, structure.dimensions.hidden)
    kv_heads, head_dim = structure.dimensions.kv_heads, structure.dimensions.head_dim
    layers = range(span.start, span.stop)
    if span.embedding:
        inputs = [Port("input_ids", "input_ids", (1, tokens), "int32")]
    else:
        inputs = [Port("hidden_states", "hidden", hidden, "float32")]
    for type in layer_types(structure, span):
        slots = structure.caches[type].slots
        rotary = (1, tokens, 2 * len(structure.rotary[type].inverse_frequencies))
        inputs += [
            Port(f"mask_{type}", "mask", (1, 1, tokens, slots + tokens), "float32", layer_type=type),
            Port(f"cos_{type}", "cos", rotary, "float32", layer_type=type),
            Port(f"sin_{type}", "sin", rotary, "float32", layer_type=type),
        ]
    if span.head:
        outputs = [Port("logits", "logits", (1, tokens, structure.vocabulary), "float32")]
    else:
        outputs = [Port("hidden_states_out", "hidden", hidden, "float32")]
    for layer in layers:
        type = structure.layers[layer].type
        slots = structure.caches[type].slots
        inputs += [
            Port(f"past_key_{layer}", "past_key", (1, kv_heads, head_dim, slots), "float32", layer, type),
            Port(f"past_value_{layer}", "past_value", (1, kv_heads, slots, head_dim), "float32", layer, type),
        ]
        outputs += [
            Port(f"new_key_{layer}", "new_key", (1, kv_heads, head_dim, tokens), "float32", layer, type),
            Port(f"new_value_{layer}", "new_value", (1, kv_heads, tokens, head_dim), "float32", layer, type),
        ]
    return tuple(inputs), tuple(outputs)


def layer_types(structure: Structure, span: Span) -> list[str]:
    """Those of a span's layers, in order of appearance."""
    return list(dict.fromkeys(layer.type for layer in structure.layers[span.start : span.stop]))


def manifest_of(structure: Structure, options: PhoneOptions, mask_value: float) -> Manifest:
    """The manifest of the float graphs."""
    tokens = {"prefill": options.prefill, "decode": 1}
    parts = []
    for span in spans(len(structure.layers), options.parts):
        graphs = {kind: Graph(span.file(kind), *ports(structure, span, tokens[kind])) for kind in GRAPHS}
        norms = sum(layer.norms for layer in structure.layers[span.start : span.stop]) + int(span.head)
        parts.append(Part(span.data, (span.start, span.stop), norms, graphs["prefill"], graphs["decode"]))
    return Manifest(
        model_type=structure.model_type,
        vocabulary=structure.vocabulary,
        context=options.context,
        prefill=options.prefill,
        activations="float32",
        mask_value=mask_value,
        kv_heads=structure.dimensions.kv_heads,
        head_dim=structure.dimensions.head_dim,
        layers=tuple(layer.type for layer in structure.layers),
        caches=structure.caches,
        rotary=structure.rotary,
        parts=tuple(parts),
    )
