"""What one target will write, decided from headers alone: linears, grids, and everything an engine refuses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from calibrate.composition import METHODS, rewrites_of
from calibrate.grid import Grid, ZeroKind
from calibrate.quantize import Recipe
from calibrate.rewrite import Rewritten
from calibrate.rewrites import rewritten
from export.layout import LayoutOptions, resolve_group_size
from export.layouts import layout_of
from models.checkpoint import Checkpoint
from models.errors import BadInput
from models.family import Family, Linear
from models.opened import OpenedModel
from models.skeleton import is_derived

# Tried from the largest down by the `largest-fitting` policy.
GROUP_SIZES = (256, 128, 64, 32)
# Formats whose engine rounds a linear's inputs to int8, each token by its largest (formats of vLLM's W4A8 kernel).
INT8_INPUTS = ("gptq",)
BUDGET = "linears whose rounding costs most stay unquantised, as measured on the calibration text"
# What the rewrites do, for the ledger.
REWRITES: Mapping[str, str] = {
    "fold": "the norms' weights went into the linears that read them and are ones",
    "rotate": (
        "the norms' weights went into the linears that read them and are ones; the residual stream and the value heads"
        " are rotated, the embedding with them"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a user asks of one target of any format.

    Attributes:
        name: of the artifact's folder.
        method: names of methods.
        quality: the name that the user gave for the methods, where he gave one.
    """

    name: str
    format: str
    method: tuple[str, ...]
    quality: str = ""


@dataclass(frozen=True, kw_only=True)
class TargetSpec(Spec):
    """What a user asks of a target in 4 bits.

    Attributes:
        format: a layout's name.
        group_size: -1 is one group a row.
        fit_group_size: whether a smaller group size may be taken when this one does not divide every linear.
        zero: the grid's kind of zero.
        quantize_head: whether the head is quantised.
        skip: patterns of linears (fnmatch over full split names, or names inside a layer) that stay unquantised.
        fused: whether fused projections are written fused; None is as the family's engines want them.
        isa: of tinygemm's bytes.
        budget: bits per weight, on the mean over all linears that may be quantised, that linears which stay
            unquantised may take it to; None quantises all of them.
    """

    group_size: int
    zero: ZeroKind
    quantize_head: bool
    fit_group_size: bool = False
    skip: tuple[str, ...] = ()
    fused: bool | None = None
    isa: str = ""
    budget: float | None = None


@dataclass(frozen=True)
class Module:
    """A module of the artifact: one linear, or several stacked along N.

    Attributes:
        name: full name under which it is stored.
        source: full name of the checkpoint's module.
        linears: in stacking order.
    """

    name: str
    source: str
    linears: tuple[Linear, ...]

    @property
    def rows(self) -> int:
        return sum(linear.rows for linear in self.linears)

    @property
    def columns(self) -> int:
        return self.linears[0].columns


@dataclass(frozen=True)
class Plan(ABC):
    """A target of any format, resolved against a checkpoint.

    Attributes:
        quantized: modules that are written quantised, in the order of computation.
        kept: linears that stay in the model's dtype, with the reason.
        notes: what was downgraded, for the ledger and the summary.
        dtype: what the weights are rewritten to, and calibration computes in.
    """

    spec: Spec
    quantized: tuple[Module, ...]
    kept: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    dtype: torch.dtype

    @property
    @abstractmethod
    def group_size(self) -> int:
        """Weights that share a scale; -1 is one group a row."""

    @abstractmethod
    def grid(self, columns: int) -> Grid:
        """Of a linear's codes."""

    @abstractmethod
    def rewritten(self, model: OpenedModel) -> OpenedModel:
        """The model in the weights that are quantised, with all linears that may be."""

    @property
    @abstractmethod
    def uses_text(self) -> bool:
        """Whether a calibration text changes what is written."""

    @abstractmethod
    def key(self) -> dict[str, Any]:
        """What decides the bytes that are written, beside the codes, as JSON values."""

    @abstractmethod
    def quantized_bytes(self) -> int:
        """Exact bytes of the quantised modules' codes, scales and zeros."""

    @abstractmethod
    def kept_bytes(self, checkpoint: Checkpoint) -> int:
        """Bytes of everything else that is written."""

    def writing_bytes(self, states: int) -> int:
        """About what writing holds in memory beside a file's shard; ``states`` are the bytes of the calibration text's
        hidden states in fp32."""
        return 0

    def scratch_bytes(self, states: int) -> int:
        """What writing puts into the work folder."""
        return 0

    @property
    def recipe(self) -> Recipe:
        """What chooses the codes, in the weights that ``rewritten`` gives."""
        grids = tuple((linear.name, self.grid(linear.columns)) for linear in self.linears)
        return Recipe(grids, self.spec.method, self.dtype, int8_inputs=self.spec.format in INT8_INPUTS)

    @property
    def rewrites(self) -> list[str]:
        """The methods that change the model's weights before anything is quantised."""
        return rewrites_of(self.spec.method)

    @property
    def linears(self) -> list[Linear]:
        return [linear for module in self.quantized for linear in module.linears]

    @property
    def weights(self) -> int:
        """How many numbers the quantised linears have."""
        return sum(linear.weights for linear in self.linears)

    @property
    def skipped(self) -> tuple[Linear, ...]:
        """Linears that the target's `skip`, or a budget, leaves in the model's dtype."""
        return ()

    @property
    def counted(self) -> int:
        """How many numbers the quantised linears and the skipped ones have."""
        return self.weights + sum(linear.weights for linear in self.skipped)

    @property
    def bits_per_weight(self) -> float:
        """Of the grids (codes, scales, zeros) and of the skipped linears' numbers, on the mean over both."""
        bits: float = sum(self.grid(linear.columns).bits_per_weight * linear.weights for linear in self.linears)
        bits += torch.finfo(self.dtype).bits * (self.counted - self.weights)
        return bits / max(1, self.counted)


@dataclass(frozen=True)
class TargetPlan(Plan):
    """A target in 4 bits.

    Attributes:
        tied: whether the source's head shares the embedding.
        head: the head's name.
        skipped: linears that `skip`, or a budget, leaves.
    """

    spec: TargetSpec
    options: LayoutOptions
    tied: bool
    head: str
    skipped: tuple[Linear, ...] = ()

    @property
    def group_size(self) -> int:
        return self.options.group_size

    def grid(self, columns: int) -> Grid:
        return Grid(resolve_group_size(self.options.group_size, columns), self.options.zero)

    def rewritten(self, model: OpenedModel) -> OpenedModel:
        return rewritten(model, self.spec.method, self.dtype, values=True)

    @property
    def uses_text(self) -> bool:
        return self.recipe.uses_text or self.spec.budget is not None

    def key(self) -> dict[str, Any]:
        return {"options": asdict(self.options), "fused": self.spec.fused, "budget": self.spec.budget}

    def quantized_bytes(self) -> int:
        layout = layout_of(self.spec.format)
        return sum(layout.stored_bits(m.rows, m.columns, self.options.group_size) for m in self.quantized) // 8

    def kept_bytes(self, checkpoint: Checkpoint) -> int:
        """Exact, without what a budget will keep."""
        replaced = {f"{module.source}.weight" for module in self.quantized if module.linears[0].layer is not None}
        if not self.tied:
            replaced |= {f"{m.source}.weight" for m in self.quantized}
        return sum(
            info.elements * (self.dtype.itemsize if info.dtype.is_floating_point else info.dtype.itemsize)
            for name, info in checkpoint.tensors.items()
            if name not in replaced and not is_derived(name)
        )


def make_plan(
    spec: TargetSpec, checkpoint: Checkpoint, family: Family, linears: Sequence[Linear], dtype: torch.dtype
) -> TargetPlan:
    """Resolves a target against a checkpoint's headers.

    Args:
        checkpoint: the source, or the view of it that the method's rewrites give.

    Raises:
        BadInput: with every linear that the layout or its engines would refuse, every skip pattern that matches
            nothing, and methods that the family's data does not allow.
    """
    problems = [
        f"method: {name}: the data of a {family.model_types[0]} family names no links between norms and linears"
        for name in spec.method
        if METHODS[name].links and family.links is None
    ]
    tied = f"{family.head}.weight" not in checkpoint.tensors
    chosen, kept = _choose(spec, family, linears, tied, problems)
    group_size, notes = _group_size(spec, chosen, problems)
    fused = _fused(spec, family, problems)
    split = tuple(Module(linear.name, linear.module, (linear,)) for linear in chosen)
    modules = as_stored(chosen) if fused else split
    layout = layout_of(spec.format)
    for linear in chosen:
        for reason in layout.shape_problems(linear.rows, linear.columns, group_size):
            problems.append(f"{linear.name} [{linear.rows}, {linear.columns}]: {reason}")
    if not chosen:
        problems.append("no linear is left to quantise")
    problems += _shard_problems(family, linears, {linear.name for linear in chosen})
    names = _module_names(family, chosen) if family.engine_splits and fused else ()
    notes += _rewrite_notes(spec, checkpoint, family)
    if spec.budget is not None:
        notes += (f"bits_per_weight: at most {spec.budget:g}: {BUDGET}",)
    options = LayoutOptions(
        group_size=group_size,
        zero=spec.zero,
        lm_head=any(linear.layer is None for linear in chosen),
        kept=tuple(name for name, _ in kept),
        quantized_modules=names,
        isa=spec.isa,
    )
    if not problems:
        try:
            layout.quantization_config(options)
        except BadInput as error:
            problems += error.problems
    if problems:
        raise BadInput(f"target {spec.name} ({spec.format}): {problem}" for problem in problems)
    skipped = tuple(linear for linear in linears if _skipping(spec, family, linear))
    return TargetPlan(replace(spec, fused=fused), modules, kept, notes, dtype, options, tied, family.head, skipped)


def _skipping(spec: TargetSpec, family: Family, linear: Linear) -> list[str]:
    """The patterns that leave a linear unquantised."""
    return [pattern for pattern in spec.skip if _matches(linear, family, pattern)]


def _matches(linear: Linear, family: Family, pattern: str) -> bool:
    inside = linear.name if linear.layer is None else linear.name.removeprefix(f"{family.layers}.{linear.layer}.")
    return fnmatchcase(linear.name, pattern) or fnmatchcase(inside, pattern)


def _choose(
    spec: TargetSpec, family: Family, linears: Sequence[Linear], tied: bool, problems: list[str]
) -> tuple[list[Linear], tuple[tuple[str, str], ...]]:
    chosen: list[Linear] = []
    kept: list[tuple[str, str]] = []
    layers = {linear.layer for linear in linears if linear.layer is not None}
    for pattern in spec.skip:
        if not any(_matches(linear, family, pattern) for linear in linears):
            names = ", ".join(family.linears)
            problems.append(f"skip: {pattern!r} matches no linear; linears of a layer are {names}, and {family.head}")
    for linear in linears:
        if matching := _skipping(spec, family, linear):
            kept.append((linear.name, f"skip: {matching[0]}"))
        elif linear.layer is None and not spec.quantize_head:
            kept.append((linear.name, "lm_head: keep" + (" (tied to the embedding)" if tied else "")))
        else:
            chosen.append(linear)
    for name, reason in family.kept.items():
        kept += [(f"{family.layers}.{layer}.{name}", reason) for layer in sorted(layers)]
    return chosen, tuple(kept)


def _group_size(spec: TargetSpec, chosen: list[Linear], problems: list[str]) -> tuple[int, tuple[str, ...]]:
    """The artifact's one group size: engines read a single one from the configuration."""
    odd = [linear for linear in chosen if spec.group_size > 0 and linear.columns % spec.group_size]
    if not odd or not spec.fit_group_size:
        return spec.group_size, ()
    for size in GROUP_SIZES:
        if size < spec.group_size and all(linear.columns % size == 0 for linear in chosen):
            widths = sorted({linear.columns for linear in odd})
            note = (
                f"group size {size} instead of {spec.group_size}, which does not divide {widths} in features"
                f" of {len(odd)} linears"
            )
            return size, (note,)
    problems.append(f"no group size of {GROUP_SIZES} divides the in features of every linear")
    return spec.group_size, ()


def _rewrite_notes(spec: TargetSpec, checkpoint: Checkpoint, family: Family) -> tuple[str, ...]:
    rewrites = rewrites_of(spec.method)
    if not rewrites:
        return ()
    head = f"{family.head}.weight"
    notes = [f"{rewrites[0]}: {REWRITES[rewrites[0]]}"]
    if isinstance(checkpoint, Rewritten) and checkpoint.copied(head):
        size = checkpoint.tensors[head].nbytes
        more = "" if spec.quantize_head else f": {size:,} bytes more, which bits_per_weight does not count"
        notes.append(f"the head, which shares the embedding's tensor in the source, has a tensor of its own{more}")
    return tuple(notes)


def _fused(spec: TargetSpec, family: Family, problems: list[str]) -> bool:
    if spec.fused and not family.fusions:
        problems.append("qkv: fused: the source holds no fused projection, and engines fuse while they load")
    return family.fused_on_disk if spec.fused is None else spec.fused


def as_stored(linears: Sequence[Linear]) -> tuple[Module, ...]:
    """Linears in the modules that the source holds them in, fused ones together."""
    by_source: dict[str, list[Linear]] = {}
    for linear in linears:
        by_source.setdefault(linear.module, []).append(linear)
    return tuple(Module(source, source, tuple(parts)) for source, parts in by_source.items())


def _module_names(family: Family, chosen: list[Linear]) -> tuple[str, ...]:
    inside = {linear.name.removeprefix(f"{family.layers}.{linear.layer}.") for linear in chosen}
    return tuple(name for name in family.linears if name in inside)


def _shard_problems(family: Family, linears: Sequence[Linear], chosen: set[str]) -> list[str]:
    problems = []
    for layer in sorted({linear.layer for linear in linears if linear.layer is not None}):
        for shard in family.shards:
            names = [f"{family.layers}.{layer}.{name}" for name in shard]
            missing = [name for name in names if name not in chosen]
            if missing and len(missing) < len(names):
                problems.append(
                    f"{', '.join(missing)}: skipped, but engines load it as one with"
                    f" {', '.join(n for n in names if n in chosen)}: skip all of them or none"
                )
    return problems
