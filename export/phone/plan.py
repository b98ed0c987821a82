"""What a phone target will write, decided from headers alone, and everything that its graphs cannot hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from calibrate.grid import Grid
from calibrate.quantize import Recipe
from export.phone.options import I_KNOW, REWRITES, PhoneOptions
from export.phone.ports import spans
from export.phone.structure import structure_of
from export.phone.weights import int8_grid, phone_linears, phone_recipe, rewritten
from export.sizes import bits_per_weight, weights_of
from models.checkpoint import Checkpoint
from models.errors import BadInput
from models.family import Linear
from models.opened import OpenedModel
from models.skeleton import is_derived

FORMAT = "phone"
# Of a table or a head in fp32 while it is read, rewritten and coded.
TABLE_COPIES = 4
TABLE_BYTES = {"int8": 1, "uint16": 2, "float": 4}


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
        linears: all are written in int8; by split name, in the order of computation.
        recipe: what chooses their codes, in the model that the rewrites give.
        kept: nothing: other formats keep linears.
        notes: what was downgraded, for the ledger and the summary.
        embedding: module name.
    """

    spec: PhoneSpec
    linears: tuple[Linear, ...]
    recipe: Recipe
    notes: tuple[str, ...]
    embedding: str
    kept: tuple[tuple[str, str], ...] = ()

    @property
    def options(self) -> PhoneOptions:
        return self.spec.options

    def grid(self, columns: int) -> Grid:
        """Of a linear: symmetric int8 with one fp32 scale per output channel."""
        return int8_grid(columns)

    @property
    def rewrites(self) -> list[str]:
        """The methods that change the model's weights before their codes are chosen."""
        return [name for name in self.spec.method if name in REWRITES]

    def rewritten(self, model: OpenedModel) -> OpenedModel:
        """The model in the weights that the graphs hold."""
        return rewritten(model, self.spec.method)

    @property
    def uses_text(self) -> bool:
        """Whether a calibration text changes what is written: the activations' ranges come from it."""
        return True

    @property
    def weights(self) -> int:
        return weights_of(self.linears)

    @property
    def bits_per_weight(self) -> float:
        """Of codes and scales, over the linears."""
        return bits_per_weight(self.linears, self.grid)

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
        """About what writing holds in memory: prefill and decode map a part's float weights each, beside what enters
        and leaves it; a table is rewritten in fp32 and coded from there.

        Args:
            states: bytes of the calibration text's hidden states in fp32.
        """
        return max(2 * self.part_bytes + 2 * states, TABLE_COPIES * 4 * self.linears[-1].weights)

    def quantized_bytes(self) -> int:
        """Of the linears' codes and scales."""
        return sum(linear.weights + 4 * linear.rows for linear in self.linears)

    def kept_bytes(self, checkpoint: Checkpoint) -> int:
        """Of everything else, fp32 but for a table of codes; about, because a graph has small tensors too."""
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
        rewritten(model, spec.method)
        spans(model.dimensions.layers, spec.options.parts)
    except BadInput as error:
        raise BadInput(f"target {spec.name} ({spec.format}): {problem}" for problem in error.problems) from error
    return PhonePlan(
        spec=spec,
        linears=tuple(phone_linears(model)),
        recipe=phone_recipe(model, spec.method),
        notes=_notes(spec.options),
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
