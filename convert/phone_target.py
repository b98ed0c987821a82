"""The keys of a phone target, and which keys each format reads; `convert.target` adds those of the other formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from convert.yaml_lines import Section, Text, broken_rule, expected, suggestion
from export.phone.options import I_KNOW, OPSET, PhoneOptions

Positions = Annotated[int, Field(ge=2)]
# Keys that not every format reads.
_GRIDS = ("gptq", "awq", "tinygemm", "auto")
READERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("group_size", "group_size_policy", "symmetric", "zero", "quality", "lm_head", "skip", "qkv"), _GRIDS
    ),
    "isa": ("tinygemm", "auto"),
    **dict.fromkeys(("priority", "device"), ("auto",)),
    **dict.fromkeys(
        ("context", "prefill", "i_know", "activations", "weights", "embedding", "gelu", "split", "opset"), ("phone",)
    ),
}


class Split(Section):
    """Parts of a large model: 1, or the embedding, groups of layers and the head."""

    parts: Annotated[int, Field(ge=3)]


def _split(value: Any) -> Any:
    if value == "none":
        return None
    if not isinstance(value, dict):
        raise expected("none, or {parts: N}")
    return value


class PhoneKeys(Section):
    """The format, and the keys that only format phone reads.

    Attributes:
        context: positions that the graphs' caches hold.
        prefill: tokens of the prefill graph; at most the context.
        i_know: choices that were measured broken, by name, and are wanted all the same.
        activations, weights, embedding: dtypes.
        gelu: whether GELU is approximated by tanh.
        split: None is one pair of graphs.
    """

    format: Literal["gptq", "awq", "tinygemm", "phone", "auto"]
    context: Positions = 1024
    prefill: Annotated[int, Field(ge=1)] = Field(default_factory=lambda data: min(128, data["context"]))
    i_know: list[Text] = []
    activations: Literal["uint16", "uint8"] = "uint16"
    weights: Literal["int8"] = "int8"
    embedding: Literal["uint16", "int8", "float"] = "uint16"
    gelu: Literal["exact", "tanh"] = "exact"
    split: Annotated[Split | None, BeforeValidator(_split)] = None
    opset: int = OPSET

    @field_validator(*READERS, check_fields=False)
    @classmethod
    def _key_used_by_format(cls, value: Any, info: ValidationInfo) -> Any:
        readers = READERS[str(info.field_name)]
        format = info.data.get("format", readers[0])
        if format not in readers:
            raise broken_rule(f"only for format {' or '.join(readers)}; this target's format is {format}")
        return value

    @field_validator("prefill")
    @classmethod
    def _chunk_fits(cls, prefill: int, info: ValidationInfo) -> int:
        context = info.data.get("context", prefill)
        if prefill > context:
            raise broken_rule(f"expected at most context ({context}), found {prefill}")
        return prefill

    @field_validator("i_know")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in I_KNOW:
                raise broken_rule(f"unknown name '{name}'{suggestion(name, I_KNOW)}")
        return names

    @field_validator("activations")
    @classmethod
    def _measured_broken(cls, activations: str, info: ValidationInfo) -> str:
        name = "uint8-activations"
        if activations == "uint8" and name not in info.data.get("i_know", [name]):
            raise broken_rule(f"measured broken: {I_KNOW[name]}; where it is wanted all the same: `i_know: [{name}]`")
        return activations

    @field_validator("opset")
    @classmethod
    def _norm_is_one_operator(cls, opset: int) -> int:
        if opset != OPSET:
            raise broken_rule(
                f"expected {OPSET}, found {opset}: before {OPSET} the norm is taken apart, which quantised breaks on"
                " HTP (2 dB); later ones were not run"
            )
        return opset

    @property
    def phone_options(self) -> PhoneOptions:
        """As the export stage takes them."""
        return PhoneOptions(
            context=self.context,
            prefill=self.prefill,
            activations=self.activations,
            weights=self.weights,
            embedding=self.embedding,
            gelu=self.gelu,
            parts=1 if self.split is None else self.split.parts,
            opset=self.opset,
            i_know=tuple(self.i_know),
        )
