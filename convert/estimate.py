"""What a run would write and need, from headers alone, as ``convert plan`` shows it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from calibrate.composition import rewrites_of
from calibrate.fisher import SPAN
from calibrate.generated import batch_sizes
from convert.prepare import Prepared
from export.plan import Plan, TargetPlan
from models.errors import EnvironmentProblem

# Python holds 430 MB with torch, transformers and all else imported; a tokenizer of 49,152 tokens from a GGUF takes
# 170, and a megabyte of text on its way through it and `datasets` 250.
BASE_MEMORY = 850 * 2**20
# Of tuning, for a scale and a zero: shift, best shift and two moments on disk; in memory their start and units too.
STATE_BYTES, TRAINED_BYTES = 2 * 16, 2 * 24


@dataclass(frozen=True)
class TargetEstimate:
    """One target's sizes in bytes.

    Attributes:
        quantized_bytes, kept_bytes: of the artifact's tensors, exact.
        work_bytes: codes and scales in the work folder.
    """

    plan: Plan
    quantized_bytes: int
    kept_bytes: int
    work_bytes: int

    @property
    def file_bytes(self) -> int:
        return self.quantized_bytes + self.kept_bytes


@dataclass(frozen=True)
class Estimate:
    """The whole run's needs in bytes.

    Attributes:
        memory_bytes: the larger of calibration's peak and validation's.
        output_bytes, work_bytes: of disk, in the output and in the work folder.
    """

    targets: tuple[TargetEstimate, ...]
    memory_bytes: int
    output_bytes: int
    work_bytes: int

    @property
    def disk_bytes(self) -> int:
        return self.output_bytes + self.work_bytes


def estimate(prepared: Prepared) -> Estimate:
    """Sizes of every target, and peak memory and disk of the run."""
    checkpoint = prepared.model.checkpoint
    targets = tuple(_target(prepared, plan) for plan in prepared.plans)
    reference = _hidden_bytes(prepared, validation=True)
    output = sum(t.file_bytes for t in targets)
    # Hidden states stand there twice around a layer's commit, and go with a target's last layer.
    streams = max((plan.recipe.streams for plan in prepared.plans), default=0)
    hidden = 2 * _hidden_bytes(prepared, validation=False) * streams
    work = sum(t.work_bytes for t in targets) + hidden + reference
    largest_layer, hidden_once = _largest_layer(prepared), _hidden_bytes(prepared, validation=False)
    embedding = checkpoint.tensors[f"{prepared.model.family.embedding}.weight"].elements * _itemsize(prepared)
    shard = min(prepared.pipeline.output.shard_bytes, max((t.file_bytes for t in targets), default=0))
    calibration = largest_layer * 3 + embedding + max(1, streams) * hidden_once * 2
    read = _read_columns(prepared)
    width = _tokens(prepared, validation=False) * prepared.dtype.itemsize
    if streams:
        # What the last linear of a finished part reads, and what the parts before it gave.
        calibration += max((max(columns.values()) for columns in read), default=0) * width + hidden_once
    if any(plan.recipe.compares for plan in prepared.plans):
        # What the source's linears read, or give where that is added to its residual stream; and the stream there.
        kept = (sum(_compared(prepared, columns)) for columns in read)
        calibration += max(kept, default=0) * width + 2 * hidden_once
    weighing = [plan for plan in prepared.plans if plan.recipe.weighs]
    if weighing:
        # Each layer's inputs on the way, and the products of the gradients of every layer that quantises other weights.
        outputs = _output_bytes(prepared)
        layers = prepared.model.dimensions.layers
        work += (layers + 2) * _hidden_bytes(prepared, validation=False)
        work += sum(outputs) * len({tuple(rewrites_of(plan.recipe.method)) for plan in weighing})
        calibration += max(outputs, default=0) + hidden_once * 2
    trained = [plan for plan in prepared.plans if plan.recipe.trains]
    if trained:
        # Table and head of the reference and of the model.
        calibration += embedding * 3 + max(TRAINED_BYTES * _groups(plan) for plan in trained)
    model_bytes = sum(info.elements for info in checkpoint.tensors.values()) * prepared.dtype.itemsize
    validation = max(reference * 2 + largest_layer + embedding * 3, model_bytes) if prepared.pipeline.validation else 0
    own = _generating_bytes(prepared, model_bytes)
    writing = [own, shard * 2, *(plan.writing_bytes(hidden_once) for plan in prepared.plans)]
    return Estimate(targets, BASE_MEMORY + max(calibration, validation, *writing), output, work)


def check_room(needs: Estimate, output: Path, work: Path) -> None:
    """Raises EnvironmentProblem when a disk or the memory is too small for the run.

    What an earlier run has left in the two folders counts as room: this run uses or replaces it.
    """
    problems = []
    disks: dict[int, list[tuple[Path, int]]] = {}
    for folder, needed in ((output, needs.output_bytes), (work, needs.work_bytes)):
        disks.setdefault(_existing(folder).stat().st_dev, []).append((folder, needed))
    for parts in disks.values():
        needed = sum(bytes_ for _, bytes_ in parts)
        free = shutil.disk_usage(_existing(parts[0][0])).free
        held = sum(_bytes_below(folder) for folder, _ in parts)
        if free + held < needed:
            where = " and ".join(str(folder) for folder, _ in parts)
            problems.append(f"{where}: the run needs {size(needed)} of disk, found {size(free)} free")
    available = psutil.virtual_memory().available
    if available < needs.memory_bytes:
        problems.append(f"the run needs about {size(needs.memory_bytes)} of memory, found {size(available)} available")
    if problems:
        raise EnvironmentProblem(problems)


def size(count: float) -> str:
    """Bytes for people (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.3g} TB"


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def _bytes_below(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def _target(prepared: Prepared, plan: Plan) -> TargetEstimate:
    # Codes and integer zero points take a byte each in the work folder, so a scale with its zero at most four.
    groups = _groups(plan)
    kept = plan.kept_bytes(plan.rewritten(prepared.model).checkpoint)
    work = plan.weights + 4 * groups + plan.scratch_bytes(_hidden_bytes(prepared, validation=False))
    if isinstance(plan, TargetPlan) and plan.spec.budget is not None:
        # At most, and the layers that sensitivity is measured on.
        kept += int((plan.spec.budget - plan.bits_per_weight) * plan.counted / 8)
        work *= 2
    if plan.recipe.trains:
        # The layers once more as they were tuned, and the state of an unfinished training.
        work = 2 * work + STATE_BYTES * groups
    return TargetEstimate(plan, plan.quantized_bytes(), kept, work)


def _groups(plan: Plan) -> int:
    return sum(linear.weights // plan.grid(linear.columns).group_size for linear in plan.linears)


def _hidden_bytes(prepared: Prepared, validation: bool) -> int:
    """Of one pass's hidden states; the residual stream is at most fp32."""
    return _tokens(prepared, validation) * prepared.model.dimensions.hidden * 4


def _tokens(prepared: Prepared, validation: bool) -> int:
    config = prepared.pipeline
    if validation:
        return config.validation.tokens if config.validation else 0
    text = config.calibration
    return (text.samples + text.generated) * text.sequence_length if text else 0


def _generating_bytes(prepared: Prepared, model_bytes: int) -> int:
    """Of the model while it writes text of its own, and of a batch's keys and values."""
    text, sizes = prepared.pipeline.calibration, prepared.model.dimensions
    if text is None or not text.generated or not any(plan.uses_text for plan in prepared.plans):
        return 0
    tokens = batch_sizes(text.generated, text.sequence_length)[0] * text.sequence_length
    # `generate` lays a layer's cache anew for every token, so that one layer's is there twice.
    cache = 2 * tokens * sizes.kv_heads * sizes.head_dim * prepared.dtype.itemsize * (sizes.layers + 1)
    return model_bytes + cache


def _read_columns(prepared: Prepared) -> list[dict[str, int]]:
    """The input channels of each layer's linears, by the name of the first of those that read the same input."""
    family = prepared.model.family
    layers: dict[int, dict[str, int]] = {}
    for linear in prepared.model.linears:
        if linear.layer is not None:
            name = linear.name.removeprefix(f"{family.layers}.{linear.layer}.")
            shard = next((shard[0] for shard in family.shards if name in shard), name)
            layers.setdefault(linear.layer, {})[shard] = linear.columns
    return list(layers.values())


def _compared(prepared: Prepared, columns: Mapping[str, int]) -> Iterator[int]:
    """The channels of a layer's linears that are compared with the source's."""
    links = prepared.model.family.links
    for name, count in columns.items():
        yield prepared.model.dimensions.hidden if links is not None and name in links.residual else count


def _output_bytes(prepared: Prepared) -> list[int]:
    """Of the products of the gradients at the outputs of each layer's linears."""
    layers: dict[int, int] = {}
    for linear in prepared.model.linears:
        if linear.layer is not None:
            layers[linear.layer] = layers.get(linear.layer, 0) + 4 * linear.rows * min(linear.rows, SPAN)
    return list(layers.values())


def _itemsize(prepared: Prepared) -> int:
    """Of the widest dtype that any target's calibration computes in."""
    return max([prepared.dtype.itemsize, *(plan.recipe.dtype.itemsize for plan in prepared.plans)])


def _largest_layer(prepared: Prepared) -> int:
    prefix = prepared.model.family.layers + "."
    layers: dict[str, int] = {}
    for name, info in prepared.model.checkpoint.tensors.items():
        if name.startswith(prefix):
            layer = name.removeprefix(prefix).partition(".")[0]
            layers[layer] = layers.get(layer, 0) + info.elements * max(_itemsize(prepared), info.dtype.itemsize)
    return max(layers.values(), default=0)
