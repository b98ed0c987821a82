"""What a phone target will write, decided from headers alone, and everything that its graphs cannot hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from calibrate.grid import PHONE_BITS, Grid
from calibrate.quantize import Recipe
from export.phone.options import I_KNOW, PhoneOptions
from export.phone.ports import spans
from export.phone.structure import Structure, structure_of
from models.errors import BadInput
from models.family import Linear
from models.opened import OpenedModel
from models.skeleton import is_derived

FORMAT = "phone"


@dataclass(frozen=True)
class PhoneSpec:
    """What a user asks of a phone target.

    Attributes:
        name: of the artifact's folder.
        method: names of methods for the int8 weights.
    """

    name: str
    method: tuple[str, ...]
    options: PhoneOptions
    format: str = FORMAT


@dataclass(frozen=True)
class PhonePlan:
    """A phone target, resolved against a checkpoint.

    Attributes:
        linears: that are written in int8, by split name, in the order of computation; the head is always one.
        kept: linears that are quantised otherwise than by the methods, with the reason.
        notes: what was downgraded, for the ledger and the summary.
        tied: whether the source's head shares the embedding.
        head, embedding: module names.
        dtype: what calibration computes in.
    """

    spec: PhoneSpec
    structure: Structure
    linears: tuple[Linear, ...]
    kept: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    tied: bool
    head: str
    embedding: str
    dtype: torch.dtype

    @property
    def options(self) -> PhoneOptions:
        return self.spec.options

    def grid(self, columns: int) -> Grid:
        """Of a linear: symmetric int8 with one fp32 scale per output channel."""
        return Grid(columns, "none", torch.float32, PHONE_BITS)

    @property
    def recipe(self) -> Recipe:
        grids = tuple((linear.name, self.grid(linear.columns)) for linear in self.linears)
        return Recipe(grids, self.spec.method, self.dtype)

    @property
    def weights(self) -> int:
        return sum(linear.weights for linear in self.linears)

    @property
    def bits_per_weight(self) -> float:
        """Of codes and scales, over the linears."""
        bits = sum(self.grid(linear.columns).bits_per_weight * linear.weights for linear in self.linears)
        return bits / max(1, self.weights)

    def quantized_bytes(self) -> int:
        """Of the linears' codes and scales."""
        return sum(linear.weights + 4 * linear.rows for linear in self.linears)

    def kept_bytes(self, model: OpenedModel) -> int:
        """Of everything else, fp32 but for an int8 embedding table; about, because a graph has small tensors too."""
        replaced = {f"{linear.module}.weight" for linear in self.linears}
        table = f"{self.embedding}.weight"
        total = 0
        for name, info in model.checkpoint.tensors.items():
            if name == table:
                total += info.elements * (1 if self.options.embedding == "int8" else 4)
            elif name not in replaced and not is_derived(name):
                total += info.elements * 4
        return total


def make_phone_plan(spec: PhoneSpec, model: OpenedModel, dtype: torch.dtype) -> PhonePlan:
    """Resolves a phone target against a checkpoint's headers.

    Raises:
        BadInput: with everything that keeps the model from becoming a phone graph of these options.
    """
    problems: list[str] = []
    structure = None
    for check in (
        lambda: structure_of(model.checkpoint, spec.options.context),
        lambda: spans(model.dimensions.layers, spec.options.parts),
    ):
        try:
            found = check()
            structure = found if isinstance(found, Structure) else structure
        except BadInput as error:
            problems += error.problems
    if problems or structure is None:
        raise BadInput(f"target {spec.name} ({spec.format}): {problem}" for problem in problems)
    family = model.family
    kept = tuple(
        (f"{family.layers}.{layer}.{name}", "small, and no method's linear: int8 by its largest weight")
        for layer in range(model.dimensions.layers)
        for name in family.kept
    )
    return PhonePlan(
        spec=spec,
        structure=structure,
        linears=tuple(model.linears),
        kept=kept,
        notes=tuple(f"i_know: {name}: {I_KNOW[name]}" for name in spec.options.i_know),
        tied=f"{family.head}.weight" not in model.checkpoint.tensors,
        head=family.head,
        embedding=family.embedding,
        dtype=dtype,
    )
