"""A model family is data: its linears, how fused ones split, and what stays unquantised.

Names inside a decoder layer are relative to it (``self_attn.q_proj``); a *linear* always has its split name, and the
*module* is what the checkpoint holds, which for a fused projection serves several linears.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from models.checkpoint import TensorInfo
from models.errors import BadInput


@dataclass(frozen=True)
class Fusion:
    """A projection that holds several linears stacked along their output channels.

    Attributes:
        fused: the module's name in the checkpoint.
        parts: the linears in stacking order.
        rows: ``heads``: query, key and value heads times head size; ``equal``: equal parts.
    """

    fused: str
    parts: tuple[str, ...]
    rows: Literal["heads", "equal"]


@dataclass(frozen=True)
class Links:
    """Modules of a decoder layer that can share a factor per channel, or a rotation, without changing the function.

    Attributes:
        norms: each RMS norm, and every linear that reads its output.
        residual: linears whose output is added to the residual stream, each to what the norm of the same place in
            ``norms`` reads; nothing else is.
        values: the value projection and the linear that reads the heads' mixed values, heads in order.
        product: the linear whose output is a plain factor of what the other one reads, channel by channel.
    """

    norms: tuple[tuple[str, tuple[str, ...]], ...]
    residual: tuple[str, ...]
    values: tuple[str, str]
    product: tuple[str, str]

    def norm_before(self, linear: str) -> str | None:
        """The norm that reads the residual stream to which a linear's output is added; None for others."""
        return dict(zip(self.residual, (norm for norm, _ in self.norms), strict=True)).get(linear)


# RMS norms before attention and MLP, and nothing else on the residual stream.
PRE_NORM = Links(
    norms=(
        ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ),
    residual=("self_attn.o_proj", "mlp.down_proj"),
    values=("self_attn.v_proj", "self_attn.o_proj"),
    product=("mlp.up_proj", "mlp.down_proj"),
)


@dataclass(frozen=True)
class Family:
    """What the pipeline knows about a family.

    Attributes:
        model_types: the ``model_type`` values of ``config.json`` that belong to it.
        linears: the linears of a decoder layer that are quantised, by split name.
        kept: linears of a decoder layer that stay in bf16, with the reason.
        fusions: which linears the checkpoint stores fused.
        fused_on_disk: whether the engines want quantised projections fused as in the source.
        engine_splits: whether engines give fused projections their split names, so that a configuration which lists
            quantised modules must list the split ones.
        shards: linears that engines load as one; all of such a group are quantised, or none.
        links: what may be rewritten without changing the function; None where nothing is known to be.
        phone: whether the phone graph of such a model was compared with the model.
        layers, embedding, norm, head: module names.
    """

    model_types: tuple[str, ...]
    linears: tuple[str, ...]
    kept: Mapping[str, str] = field(default_factory=dict)
    fusions: tuple[Fusion, ...] = ()
    fused_on_disk: bool = False
    engine_splits: bool = False
    shards: tuple[tuple[str, ...], ...] = (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
    )
    links: Links | None = None
    phone: bool = False
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"

    def module_of(self, linear: str) -> str:
        """The checkpoint's module that holds a layer's linear."""
        return next((f.fused for f in self.fusions if linear in f.parts), linear)


@dataclass(frozen=True)
class Dimensions:
    """The sizes that splitting needs, read by optimum's normalised configurations."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int

    @staticmethod
    def of(config: Any) -> Dimensions:
        """From a transformers configuration object."""
        from optimum.utils import NormalizedConfigManager
        from optimum.utils.normalized_config import NormalizedTextConfigWithGQA

        known = NormalizedConfigManager._conf
        normal = known.get(config.model_type.replace("_", "-"), NormalizedTextConfigWithGQA)(config)
        heads = normal.num_attention_heads
        return Dimensions(
            layers=normal.num_layers,
            hidden=normal.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or normal.hidden_size // heads,
        )


@dataclass(frozen=True)
class Linear:
    """One linear of a checkpoint.

    Attributes:
        name: full split name, ``model.layers.0.self_attn.q_proj``.
        layer: index of its decoder layer; None for the head.
        module: full name of the module that holds it in the checkpoint.
        start, stop: its output channels within that module.
        columns: in features K.
    """

    name: str
    layer: int | None
    module: str
    start: int
    stop: int
    columns: int

    @property
    def rows(self) -> int:
        """Out features N."""
        return self.stop - self.start

    @property
    def weights(self) -> int:
        return self.rows * self.columns


@cache
def families() -> dict[str, Family]:
    """Every known ``model_type`` and its family."""
    package = importlib.import_module("models.families")
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(package.__path__):
        family: Family = importlib.import_module(f"models.families.{module.name}").FAMILY
        found |= dict.fromkeys(family.model_types, family)
    return found


def family_of(config: Mapping[str, Any], name: str) -> Family:
    """The family of a ``config.json``. Raises BadInput for an unknown ``model_type``: nothing is guessed."""
    model_type = config.get("model_type")
    known = families()
    if not isinstance(model_type, str) or model_type not in known:
        raise BadInput(
            f"{name}: config.json: model_type: expected one of {', '.join(sorted(known))}, found {model_type!r};"
            " a family is one short file in models/families/"
        )
    return known[model_type]


def part_rows(fusion: Fusion, rows: int, dimensions: Dimensions) -> list[int]:
    """How many output channels each part of a fused module with ``rows`` has.

    Raises:
        BadInput: when the rule does not give ``rows`` in all.
    """
    if fusion.rows == "heads":
        d = dimensions
        parts = [d.heads * d.head_dim, d.kv_heads * d.head_dim, d.kv_heads * d.head_dim]
        rule = f"({d.heads} query + 2 x {d.kv_heads} key/value heads) x {d.head_dim}"
    else:
        parts = [rows // len(fusion.parts)] * len(fusion.parts)
        rule = f"{len(fusion.parts)} equal parts"
    if sum(parts) != rows:
        raise BadInput(f"{fusion.fused}: expected {rule} = {sum(parts)} output channels, found {rows}")
    return parts


def find_linears(family: Family, dimensions: Dimensions, tensors: Mapping[str, TensorInfo]) -> list[Linear]:
    """Every quantisable linear of a checkpoint in the order of computation, the head last.

    A tied head has no tensor of its own: it gets the embedding's shape.

    Raises:
        BadInput: for every linear that is missing or does not split.
    """
    problems: list[str] = []
    found: list[Linear] = []
    for layer in range(dimensions.layers):
        prefix = f"{family.layers}.{layer}."
        for linear in family.linears:
            module = family.module_of(linear)
            info = tensors.get(f"{prefix}{module}.weight")
            if info is None or len(info.shape) != 2:
                shape = None if info is None else info.shape
                problems.append(f"{prefix}{module}.weight: expected a matrix, found {shape or 'no such tensor'}")
                continue
            start, stop = 0, info.shape[0]
            fusion = next((f for f in family.fusions if linear in f.parts), None)
            if fusion is not None:
                try:
                    rows = part_rows(fusion, info.shape[0], dimensions)
                except BadInput as error:
                    problems += [f"{prefix}{problem}" for problem in error.problems]
                    continue
                index = fusion.parts.index(linear)
                start, stop = sum(rows[:index]), sum(rows[: index + 1])
            found.append(Linear(prefix + linear, layer, prefix + module, start, stop, info.shape[1]))
    if problems:
        raise BadInput(dict.fromkeys(problems))
    head = tensors.get(f"{family.head}.weight", tensors[f"{family.embedding}.weight"])
    found.append(Linear(family.head, None, family.head, 0, head.shape[0], head.shape[1]))
    return found
