"""What a phone target will write, decided from headers alone, and everything that its graphs cannot hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch

from calibrate.grid import Grid
from export.phone.options import I_KNOW, PhoneOptions
from export.phone.ports import spans
from export.phone.structure import structure_of
from export.phone.weights import int8_grid, rewritten
from export.plan import Plan, Spec, as_stored
from models.checkpoint import Checkpoint
from models.errors import BadInput
from models.opened import OpenedModel
from models.skeleton import is_derived

FORMAT = "phone"
# Of a table or a head in fp32 while it is read, rewritten and coded.
TABLE_COPIES = 4
TABLE_BYTES = {"int8": 1, "uint16": 2, "float": 4}


@dataclass(frozen=True, kw_only=True)
class PhoneSpec(Spec):
    """What a user asks of a phone target."""

    options: PhoneOptions
    format: str = FORMAT


@dataclass(frozen=True)
class PhonePlan(Plan):
    """A phone target: every linear is written in int8, none is kept.

    Attributes:
        embedding: module name.
    """

    spec: PhoneSpec
    embedding: str

    @property
    def options(self) -> PhoneOptions:
        return self.spec.options

    @property
    def group_size(self) -> int:
        return -1

    def grid(self, columns: int) -> Grid:
        return int8_grid(columns)

    def rewritten(self, model: OpenedModel) -> OpenedModel:
        return rewritten(model, self.spec.method)

    @property
    def uses_text(self) -> bool:
        """The activations' ranges come from it."""
        return True

    def key(self) -> dict[str, Any]:
        return {"options": asdict(self.options)}

    @property
    def part_bytes(self) -> int:
        """Of the largest part's weights in fp32, as the float graphs hold them that ranges are seen in."""
        layers: Counter[int] = Counter()
        for linear in self.linears:
            if linear.layer is not None:
                layers[linear.layer] += linear.weights
        sizes = []
        for span in spans(len(layers), self.options.parts):
            # Table and head are of one shape.
            ends = (span.embedding + span.head) * self.linears[-1].weights
            sizes.append(ends + sum(layers[index] for index in range(span.start, span.stop)))
        return 4 * max(sizes)

    def writing_bytes(self, states: int) -> int:
        """Prefill and decode map a part's float weights each, beside what enters and leaves it; a table is rewritten in
        fp32 and coded from there."""
        return max(2 * self.part_bytes + 2 * states, TABLE_COPIES * 4 * self.linears[-1].weights)

    def scratch_bytes(self, states: int) -> int:
        """One part's float graphs at a time, and the states between two parts."""
        return self.part_bytes + 2 * states

    def quantized_bytes(self) -> int:
        return sum(linear.weights + 4 * linear.rows for linear in self.linears)

    def kept_bytes(self, checkpoint: Checkpoint) -> int:
        """Fp32 but for a table of codes; about, because a graph has small tensors too."""
        replaced = {f"{linear.module}.weight" for linear in self.linears}
        table = f"{self.embedding}.weight"
        total = 0
        for name, info in checkpoint.tensors.items():
            if name == table:
                total += info.elements * TABLE_BYTES[self.options.embedding]
            elif name not in replaced and not is_derived(name):
                total += info.elements * 4
        return total


def make_phone_plan(spec: PhoneSpec, model: OpenedModel) -> PhonePlan:
    """Resolves a phone target against a checkpoint's headers.

    Raises:
        BadInput: with everything that keeps the model from becoming a phone graph of these options.
    """
    try:
        structure_of(model.checkpoint, spec.options.context)
        view = rewritten(model, spec.method)
        spans(model.dimensions.layers, spec.options.parts)
    except BadInput as error:
        raise BadInput(f"target {spec.name} ({spec.format}): {problem}" for problem in error.problems) from error
    return PhonePlan(
        spec=spec,
        quantized=as_stored(view.linears),
        kept=(),
        notes=_notes(spec.options),
        dtype=torch.float32,
        embedding=model.family.embedding,
    )


def _notes(options: PhoneOptions) -> tuple[str, ...]:
    notes = [f"i_know: {name}: {I_KNOW[name]}" for name in options.i_know]
    if options.embedding == "float" and options.parts == 1:
        notes.append(
            "embedding: float: Qualcomm's HTP does not compile a Gather from a float table: with `split` the table is a"
            " part of its own for the CPU; or `embedding: uint16`"
        )
    return tuple(notes)
