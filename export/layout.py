"""What every weight layout of an artifact offers, and the checks and nibble packing that the layouts share.

A layout is a module: it turns a ``Quantized`` linear into named tensors and back, exactly, and knows what the engine
that reads those tensors refuses. It decides no number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from calibrate.grid import BITS, LEVELS, Quantized, ZeroKind
from models.errors import BadInput

NIBBLES = 32 // BITS


@dataclass(frozen=True)
class LayoutOptions:
    """What an artifact's configuration file says about all of its linears.

    Attributes:
        group_size: weights per group along K; -1 is one group a row.
        zero: the grid's kind of zero.
        lm_head: the head is quantised too.
        kept: full module names of the linears left in bf16.
        quantized_modules: names inside a decoder layer of the quantised linears, as the engine splits them
            (``self_attn.q_proj`` even where the file holds a fused projection). Empty leaves it to the engine to
            recognise them from the tensors' dtypes.
        isa: tag of the machine that tinygemm bytes are for; other layouts ignore it.
    """

    group_size: int
    zero: ZeroKind = "none"
    lm_head: bool = False
    kept: tuple[str, ...] = ()
    quantized_modules: tuple[str, ...] = ()
    isa: str = ""


class Layout(Protocol):
    """The members of a layout module. N is out features, K in features; tensors are keyed by suffix."""

    @property
    def FORMAT(self) -> str:  # noqa: N802 - a module constant
        """Name of the layout."""

    @property
    def SUFFIXES(self) -> tuple[str, ...]:  # noqa: N802
        """Suffixes of the tensors that hold one quantised linear, its bias excluded."""

    @property
    def ZEROS(self) -> tuple[ZeroKind, ...]:  # noqa: N802
        """The grids that the layout can hold."""

    def pack(self, q: Quantized, options: LayoutOptions) -> dict[str, torch.Tensor]:
        """Contiguous tensors by suffix. Raises BadInput for what the layout or its engine cannot hold."""

    def unpack(self, tensors: Mapping[str, torch.Tensor], quantization_config: Mapping[str, Any]) -> Quantized:
        """The inverse of ``pack``. Expects tensors in which ``tensor_problems`` found nothing."""

    def shape_problems(self, rows: int, columns: int, group_size: int) -> list[str]:
        """Why the engine would refuse a linear [rows, columns] = [N, K]; empty when it would not."""

    def tensor_problems(
        self, name: str, tensors: Mapping[str, torch.Tensor], quantization_config: Mapping[str, Any]
    ) -> list[str]:
        """What is wrong with one linear's stored tensors, each line naming the tensor; empty when nothing is."""

    def quantization_config(self, options: LayoutOptions) -> dict[str, Any]:
        """The ``quantization_config`` entry of config.json."""

    def extra_files(self, quantization_config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Contents of further JSON files that engines look for, by file name."""

    def stored_bits(self, rows: int, columns: int, group_size: int) -> int:
        """Exact bits of all tensors of one linear [rows, columns]."""


def resolve_group_size(group_size: int, columns: int) -> int:
    """The weights per group in a row of ``columns``: -1 stands for the whole row."""
    return columns if group_size == -1 else group_size


def raise_problems(problems: Iterable[str]) -> None:
    """Raises BadInput when there are problems."""
    found = list(problems)
    if found:
        raise BadInput(found)


def grid_problems(q: Quantized, zeros: tuple[ZeroKind, ...], group_size: int) -> list[str]:
    """Why ``q`` does not describe a linear on one of the grids ``zeros`` with ``group_size`` (-1: one group a row)."""
    if q.codes.dim() != 2 or q.codes.dtype != torch.uint8:
        return [f"codes: expected uint8 [N, K], found {describe(q.codes)}"]
    problems = []
    rows, columns = q.codes.shape
    size = resolve_group_size(group_size, columns)
    if q.codes.numel() and int(q.codes.max()) >= LEVELS:
        problems.append(f"codes: expected 0..{LEVELS - 1}, found {int(q.codes.max())}")
    if size < 1 or columns % size:
        return [*problems, f"group size {size} does not divide {columns} in features"]
    kind = q.grid.zero if q.scales.dim() == 2 and q.scales.shape[1] else "none"
    if kind not in zeros:
        problems.append(f"zero: expected one of {', '.join(zeros)}, found {kind}")
    for label, tensor in (("scales", q.scales), ("zeros", q.zeros), ("zero_points", q.zero_points)):
        if tensor is None:
            continue
        if tuple(tensor.shape) != (rows, columns // size):
            problems.append(
                f"{label}: expected {[rows, columns // size]} for group size {size}, found {list(tensor.shape)}"
            )
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            problems.append(f"{label}: not finite")
    if q.zero_points is not None and q.zero_points.numel() and int(q.zero_points.max()) >= LEVELS:
        problems.append(f"zero_points: expected 0..{LEVELS - 1}, found {int(q.zero_points.max())}")
    return problems


def pack_problems(
    q: Quantized,
    zeros: tuple[ZeroKind, ...],
    group_size: int,
    shape_problems: Callable[[int, int, int], list[str]],
) -> list[str]:
    """Why a layout with those grids and shape rules cannot hold ``q``, each reason once."""
    problems = grid_problems(q, zeros, group_size)
    if q.codes.dim() == 2:
        problems += shape_problems(q.codes.shape[0], q.codes.shape[1], group_size)
    return list(dict.fromkeys(problems))


def describe(tensor: torch.Tensor) -> str:
    """Dtype and shape, for a message."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def suffix_problems(name: str, tensors: Mapping[str, torch.Tensor], suffixes: tuple[str, ...]) -> list[str]:
    """Tensors of one linear that are missing or that the layout does not know."""
    problems = [f"{name}.{suffix}: missing" for suffix in suffixes if suffix not in tensors]
    return problems + [f"{name}.{suffix}: unexpected in this layout" for suffix in tensors if suffix not in suffixes]


def expect(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> list[str]:
    """A problem unless the tensor has one of the dtypes, that shape and contiguous storage."""
    if tensor.dtype not in dtypes or tuple(tensor.shape) != shape:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return [f"{name}: expected {kinds} {list(shape)}, found {describe(tensor)}"]
    return [] if tensor.is_contiguous() else [f"{name}: not contiguous"]


def misread_problems(quantization_config: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """What `quantization_config` says otherwise than the layout's bytes are: they would be read as something else."""
    problems = [
        f"quantization_config.{key}: expected {json.dumps(value)}, found {json.dumps(quantization_config.get(key))}"
        for key, value in expected.items()
        if quantization_config.get(key) != value
        or isinstance(quantization_config.get(key), bool) is not isinstance(value, bool)
    ]
    size = quantization_config.get("group_size")
    if not isinstance(size, int) or isinstance(size, bool):
        problems.append(f"quantization_config.group_size: expected a whole number, found {json.dumps(size)}")
    return problems


def positive_problems(name: str, scales: torch.Tensor) -> list[str]:
    """A problem unless all scales are finite and above zero."""
    bad = ~(torch.isfinite(scales) & (scales > 0))
    return [f"{name}: {int(bad.sum())} of {bad.numel()} scales are not positive and finite"] if bad.any() else []


def nonzero_problems(name: str, scales: torch.Tensor) -> list[str]:
    """A problem unless all scales are finite and other than zero; a negative one turns the grid's longer side round."""
    bad = ~(torch.isfinite(scales) & (scales != 0))
    return [f"{name}: {int(bad.sum())} of {bad.numel()} scales are zero or not finite"] if bad.any() else []


def vllm_shape_problems(rows: int, columns: int, group_size: int) -> list[str]:
    """What vLLM's CPU kernels refuse of an int32-packed linear [rows, columns] = [N, K].

    The multiples of 32 are its own messages' words; the group sizes are those it was seen to load.
    """
    problems = [
        f"{count} {what} features: the engine needs a multiple of 32"
        for what, count in (("out", rows), ("in", columns))
        if count % 32
    ]
    if group_size not in (32, 64, 128, -1):
        return [*problems, f"group size {group_size}: the engine takes 32, 64, 128 and -1"]
    size = resolve_group_size(group_size, columns)
    if columns % size:
        problems.append(f"group size {size} does not divide {columns} in features")
    # Its AMX kernel cuts K into blocks of min(group size, 128) and reshapes by that, so a whole row must divide too.
    elif size > 128 and size % 128:
        problems.append(f"one group of {size} in features: the engine needs a multiple of 128, or at most 128")
    return problems


def pack_words(values: torch.Tensor, order: Sequence[int] = range(NIBBLES)) -> torch.Tensor:
    """uint8 [..., 8n] of values 0..15 as int32 [..., n]: nibble i of a word holds the word's value ``order[i]``."""
    grouped = values.reshape(*values.shape[:-1], -1, NIBBLES)
    words = torch.zeros(grouped.shape[:-1], dtype=torch.int32, device=values.device)
    for nibble, source in enumerate(order):
        words |= grouped[..., source].to(torch.int32) << (BITS * nibble)
    return words


def unpack_words(words: torch.Tensor, order: Sequence[int] = range(NIBBLES)) -> torch.Tensor:
    """The inverse of ``pack_words``: int32 [..., n] as uint8 [..., 8n]."""
    values = torch.empty((*words.shape, NIBBLES), dtype=torch.uint8, device=words.device)
    for nibble, target in enumerate(order):
        values[..., target] = (words >> (BITS * nibble)) & (LEVELS - 1)
    return values.flatten(-2)
