"""One target of a pipeline.yaml: what each format takes, its defaults, and the rules between a target's keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator

from calibrate.composition import METHODS, composition_problems
from convert.phone_target import PhoneKeys
from convert.yaml_lines import (
    Text,
    broken_rule,
    expected,
    explain,
    folder_of,
    list_of_one,
    resolve_path,
    suggestion,
)
from export.phone.options import METHODS as PHONE_METHODS
from models.errors import BadInput

Format = Literal["gptq", "awq", "tinygemm", "phone"]
ZeroKind = Literal["none", "float", "integer"]
HeadPolicy = Literal["quantize", "keep"]
# What each `quality` stands for; docs/fidelity.md has what they cost and leave.
QUALITY: Mapping[str, tuple[str, ...]] = {
    "fast": ("gptq",),
    "balanced": ("gptq", "refine"),
    "best": ("fisher", "gptq", "refine"),
}
# What all but `fast` begin with where the engine rounds activations to int8.
SMOOTHED: Mapping[str, tuple[str, ...]] = {"gptq": ("awq",)}


@dataclass(frozen=True)
class FormatRules:
    """What a format takes, and what it gets where the file says nothing.

    Attributes:
        group_sizes: the group sizes its engines run; -1 is one group a row.
        group_size, symmetric, lm_head: defaults.
        zero: default of an asymmetric grid.
    """

    group_sizes: tuple[int, ...]
    group_size: int
    symmetric: bool
    zero: ZeroKind
    lm_head: HeadPolicy


FORMATS: Mapping[str, FormatRules] = {
    # The AMX path wants a quantised head: an unquantised one costs more than the 4-bit layers save.
    "gptq": FormatRules((32, 64, 128, -1), 128, True, "none", "quantize"),
    "awq": FormatRules((32, 64, 128, -1), 64, False, "integer", "keep"),
    "tinygemm": FormatRules((32, 64, 128, 256), 64, False, "float", "keep"),
    # Fixed: int8 weights with one scale an output channel, head included.
    "phone": FormatRules((-1,), -1, True, "none", "quantize"),
}


class Target(PhoneKeys):
    """One artifact to write.

    A target of format `auto` shows tinygemm's defaults until `resolve` is told the format.

    Attributes:
        name: its folder under the output; the format unless given.
        group_size: weights per scale along the input; -1 is one group a row.
        group_size_policy: what happens to a linear that `group_size` does not divide.
        symmetric, zero: the grid; `zero` is `none` exactly when symmetric.
        quality: a list of methods by what it costs and leaves, instead of `method`.
        method: how codes and scales are chosen, in the order of `calibrate.composition`.
        bits_per_weight: a budget on the mean over the linears, above the grid's own, that linears which stay
            unquantised are chosen under; None quantises all of them.
        lm_head: whether the head is quantised.
        skip: patterns (fnmatch) of linears that stay as they are.
        qkv: how fused projections are written; None is as the family's engines want it.
        isa: of tinygemm's packed bytes.
        priority, device: of format auto: what to choose for, and a `convert probe --json` file of the device.
    """

    name: Annotated[str, Field(default_factory=lambda data: data["format"])]
    group_size: int = Field(default_factory=lambda data: _rules(data["format"]).group_size)
    group_size_policy: Literal["error", "largest-fitting"] = "error"
    symmetric: bool = Field(default_factory=lambda data: _rules(data["format"]).symmetric)
    zero: ZeroKind = Field(default_factory=lambda data: "none" if data["symmetric"] else _rules(data["format"]).zero)
    quality: Literal["fast", "balanced", "best"] | None = None
    method: Annotated[list[str], Field(min_length=1), BeforeValidator(list_of_one)] = Field(
        default_factory=lambda data: (
            quality_methods(data["quality"], data["format"]) if data.get("quality") else ["search"]
        )
    )
    bits_per_weight: Annotated[float, Field(gt=4, lt=16)] | None = None
    lm_head: HeadPolicy = Field(default_factory=lambda data: _rules(data["format"]).lm_head)
    skip: list[Text] = []
    qkv: Literal["split", "fused"] | None = None
    isa: Literal["auto", "avx512", "avx2", "default", "neon"] = "auto"
    priority: Literal["speed", "fidelity"] = "speed"
    device: Text | None = None

    def resolve(self, format: str) -> Target:
        """This target with the format that `auto` came to: that format's defaults under what the file says.

        Raises BadInput when the file's values do not suit the format.
        """
        if self.format != "auto":
            return self
        if format not in FORMATS:
            raise BadInput(
                f"target '{self.name}': format auto came to {format}, which no writer makes yet; "
                f"name one of {', '.join(FORMATS)}"
            )
        dropped = {"format", "name", "priority", "device"} | (set() if format == "tinygemm" else {"isa"})
        given = self.model_dump(include=self.model_fields_set - dropped)
        try:
            return Target.model_validate({"format": format, "name": self.name, **given})
        except ValidationError as error:
            where = f"target '{self.name}' (format auto came to {format})"
            raise BadInput([f"{where}: {loc[0]}: {what}" for loc, what in explain(error, Target)]) from error

    @field_validator("name")
    @classmethod
    def _folder_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise expected("a folder name of letters, digits, '.', '_' and '-' that starts with a letter or digit")
        return name

    @field_validator("group_size")
    @classmethod
    def _engines_run_group_size(cls, group_size: int, info: ValidationInfo) -> int:
        format = info.data.get("format")
        sizes = _group_sizes(format) if format else (group_size,)
        if group_size not in sizes:
            raise expected(f"one of {', '.join(map(str, sizes))} for {format}")
        return group_size

    @field_validator("symmetric")
    @classmethod
    def _format_takes_symmetry(cls, symmetric: bool, info: ValidationInfo) -> bool:
        format = info.data.get("format")
        if format == "gptq" and not symmetric:
            raise broken_rule(
                "vLLM's AMX kernel takes symmetric GPTQ only; for an asymmetric grid use format awq or tinygemm"
            )
        if format == "awq" and symmetric:
            raise broken_rule("AWQ's engines always read integer zero points; for a symmetric grid use format gptq")
        return symmetric

    @field_validator("zero")
    @classmethod
    def _zero_fits_grid(cls, zero: str, info: ValidationInfo) -> str:
        format = info.data.get("format")
        if format is None:
            return zero
        symmetric = info.data.get("symmetric", _rules(format).symmetric)
        if symmetric and zero != "none":
            raise broken_rule(f"a symmetric grid has no zero, so '{zero}' would be ignored; leave the key out")
        if not symmetric and zero == "none":
            raise broken_rule("an asymmetric grid has a zero: expected 'float' or 'integer', found 'none'")
        if format == "awq" and zero == "float":
            raise broken_rule("AWQ files hold 4-bit integer zero points; for float zeros use format tinygemm")
        return zero

    @field_validator("method")
    @classmethod
    def _methods_known(cls, method: list[str], info: ValidationInfo) -> list[str]:
        quality = info.data.get("quality")
        if quality is not None:
            methods = ", ".join(quality_methods(quality, info.data.get("format", "auto")))
            raise broken_rule(f"`quality: {quality}` stands for [{methods}] already: leave one of the two keys out")
        known = PHONE_METHODS if info.data.get("format") == "phone" else tuple(METHODS)
        for name in method:
            if name not in known:
                elsewhere = f" for format {info.data.get('format')}" if name in METHODS else ""
                raise broken_rule(f"unknown method '{name}'{elsewhere}{suggestion(name, known)}")
        problems = composition_problems(method)
        if problems:
            raise broken_rule("; ".join(problems))
        return method

    @field_validator("device")
    @classmethod
    def _device_file_exists(cls, device: str | None, info: ValidationInfo) -> str | None:
        if device is not None and not resolve_path(device, folder_of(info)).is_file():
            raise broken_rule(f"no such file: {resolve_path(device, folder_of(info))}")
        return device


def quality_methods(quality: str, format: str) -> list[str]:
    """What a `quality` stands for."""
    before = () if quality == "fast" else SMOOTHED.get(format, ())
    return [*before, *QUALITY[quality]]


def _rules(format: str) -> FormatRules:
    return FORMATS["tinygemm" if format == "auto" else format]


def _group_sizes(format: str) -> tuple[int, ...]:
    """Of auto: those that some format takes; `resolve` checks again."""
    rules = FORMATS.values() if format == "auto" else [FORMATS[format]]
    return tuple(dict.fromkeys(size for rule in rules for size in rule.group_sizes))
