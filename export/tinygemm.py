"""The layout of torch's CPU int4 operator ("tinygemm"), whose bytes depend on the instruction set.

Tensors of one linear [N, K], group size g:

* ``weight_packed`` uint8 [N, K/2]: what ``torch.ops.aten._convert_weight_to_int4pack_for_cpu`` returns on the machine
  that the artifact is for;
* ``scales_and_zeros`` bf16 [K/g, N, 2]: w = (q - 8) * scale + zero.

The bytes are blocks of output channels, in order [N / block][K][block / 2]. In a block, byte d of row k holds two
channels: d and d + block / 2 (``halves``) or 2d and 2d + 1 (``pairs``), the first in the low nibble. A tail of N
shorter than the block is one smaller block of pairs. Bytes for another machine give wrong numbers without an error,
so the configuration carries the machine's tag and the fingerprint of its packing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from calibrate.grid import BITS, LEVELS, MIDDLE, Quantized, ZeroKind
from export.layout import (
    LayoutOptions,
    describe,
    expect,
    misread_problems,
    pack_problems,
    raise_problems,
    resolve_group_size,
    suffix_problems,
)
from models.errors import BadInput, EnvironmentProblem

FORMAT = "tinygemm"
SUFFIXES: tuple[str, ...] = ("weight_packed", "scales_and_zeros")
ZEROS: tuple[ZeroKind, ...] = ("float", "integer", "none")
GROUP_SIZES = (32, 64, 128, 256)
# The operator takes 2, 4 or 8 and ignores the value on CPU.
INNER_K_TILES = 2


@dataclass(frozen=True)
class Blocks:
    """How one instruction set's kernel groups output channels."""

    size: int
    halves: bool


ISAS: Mapping[str, Blocks] = {
    "avx512": Blocks(64, halves=True),
    "avx2": Blocks(32, halves=True),
    "default": Blocks(32, halves=False),
    "neon": Blocks(16, halves=False),
}


def pack_codes(codes: torch.Tensor, isa: str) -> torch.Tensor:
    """Codes uint8 [N, K], 0..15, as that machine's bytes uint8 [N, K/2]. Raises BadInput for an unknown tag."""
    blocks = _blocks(isa)
    rows, columns = codes.shape
    full = rows - rows % blocks.size
    parts = []
    if full:
        parts.append(_pack_blocks(codes[:full].reshape(-1, blocks.size, columns), blocks.halves))
    if full < rows:
        parts.append(_pack_blocks(codes[None, full:], halves=False))
    return torch.cat([part.flatten() for part in parts]).view(rows, columns // 2)


def unpack_codes(packed: torch.Tensor, isa: str) -> torch.Tensor:
    """The inverse of ``pack_codes``: uint8 [N, K/2] as codes uint8 [N, K]."""
    blocks = _blocks(isa)
    rows, columns = packed.shape[0], packed.shape[1] * 2
    full = rows - rows % blocks.size
    parts = []
    if full:
        parts.append(_unpack_blocks(packed[:full].reshape(-1, columns, blocks.size // 2), blocks.halves))
    if full < rows:
        parts.append(_unpack_blocks(packed[full:].reshape(1, columns, (rows - full) // 2), halves=False))
    return torch.cat([part.flatten(0, 1) for part in parts])


def restack(packed: torch.Tensor, rows: Sequence[int], isa: str, target: str) -> torch.Tensor:
    """Packed linears of one input as one packed linear, for another machine if need be.

    Bytes stay as they are, and the same tensor is returned, where the two machines pack alike and every linear but the
    last ends with a whole block; a tail in the middle is packed in another way than in the whole.

    Args:
        packed: uint8 [N, K/2], the linears' bytes one after another.
        rows: out features of each linear, N in all.
        isa, target: tags of the machines that the bytes are for, and that the result is for.

    Raises:
        BadInput: for an unknown tag.
    """
    blocks = _blocks(isa)
    if blocks == _blocks(target) and all(count % blocks.size == 0 for count in rows[:-1]):
        return packed
    return pack_codes(torch.cat([unpack_codes(part, isa) for part in packed.split(list(rows))]), target)


def dequantize_packed(packed: torch.Tensor, table: torch.Tensor, isa: str) -> torch.Tensor:
    """The weight bf16 [N, K], as ``unpack`` and ``dequantize`` give it, in few passes over memory.

    It is the transpose of a contiguous matrix, because bytes lie by in feature and a product takes either.

    Args:
        packed: uint8 [N, K/2]; N may be a part of a linear's channels that starts with a block.
        table: the same channels' ``scales_and_zeros``.
    """
    blocks = _blocks(isa)
    rows, columns = packed.shape[0], packed.shape[1] * 2
    full = rows - rows % blocks.size
    weight = torch.empty(columns, rows, dtype=torch.bfloat16)
    if full:
        _write_signed(packed[:full], weight[:, :full], blocks)
    if full < rows:
        _write_signed(packed[full:], weight[:, full:], Blocks(rows - full, halves=False))
    scales, zeros = table.permute(2, 0, 1).contiguous()[:, :, None]
    groups = weight.view(scales.shape[0], -1, rows)
    # bf16 arithmetic here computes in fp32 and rounds once; the product of 4 and 8 bits is exact in any case.
    torch.addcmul(zeros, groups, scales, out=groups)
    return weight.t()


def fingerprint(isa: str) -> str:
    """sha256 of the fixed codes packed for that machine. Raises BadInput for an unknown tag."""
    return _digest(pack_codes(_fixed_codes(), isa))


def host_isa() -> str:
    """This machine's tag, found by packing the fixed codes with torch's own operator.

    Raises EnvironmentProblem when torch packs in a way that is not known here.
    """
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(_fixed_codes().to(torch.int32), INNER_K_TILES)
    found = _digest(packed)
    for isa in ISAS:
        if fingerprint(isa) == found:
            return isa
    raise EnvironmentProblem(
        f"torch {torch.__version__} packs int4 weights here in an unknown layout (fingerprint {found}); "
        f"known: {', '.join(ISAS)}"
    )


def scales_and_zeros(q: Quantized) -> torch.Tensor:
    """bf16 [K/g, N, 2] of scale and zero. An integer zero point zp becomes bf16((8 - zp) * scale), none becomes 0."""
    zeros = q.zeros
    if q.zero_points is not None:
        zeros = ((MIDDLE - q.zero_points.float()) * q.scales.float()).to(torch.bfloat16)
    elif zeros is None:
        zeros = torch.zeros_like(q.scales)
    return torch.stack([q.scales.t(), zeros.t()], dim=-1).contiguous()


def quantized_problems(q: Quantized, group_size: int) -> list[str]:
    """Why the operator cannot compute with ``q``; it checks almost none of this itself.

    A code above 15 leaks into the neighbouring channel; too few groups read past the scales.
    """
    problems = pack_problems(q, ZEROS, group_size, shape_problems)
    for label, tensor in (("scales", q.scales), ("zeros", q.zeros)):
        if tensor is not None and tensor.dtype != torch.bfloat16:
            problems.append(f"{label}: expected bfloat16, found {describe(tensor)}")
    return problems


def shape_problems(rows: int, columns: int, group_size: int) -> list[str]:
    """See Layout.shape_problems."""
    problems = []
    if rows % 16:
        problems.append(f"{rows} out features: the operator needs a multiple of 16")
    if columns % 2:
        problems.append(f"{columns} in features: the operator needs an even number")
    size = resolve_group_size(group_size, columns)
    if size not in GROUP_SIZES:
        problems.append(f"group size {size}: the operator takes {', '.join(map(str, GROUP_SIZES))}")
    elif columns % size:
        problems.append(f"group size {size} does not divide {columns} in features")
    return problems


def pack(q: Quantized, options: LayoutOptions) -> dict[str, torch.Tensor]:
    """See Layout.pack. Symmetric grids and integer zero points are stored as float zeros."""
    raise_problems(quantized_problems(q, options.group_size))
    return {"weight_packed": pack_codes(q.codes, options.isa), "scales_and_zeros": scales_and_zeros(q)}


def unpack(tensors: Mapping[str, torch.Tensor], quantization_config: Mapping[str, Any]) -> Quantized:
    """See Layout.unpack. Zeros are always float. Raises BadInput for an unknown tag or another fingerprint."""
    raise_problems(config_problems(quantization_config))
    scales, zeros = tensors["scales_and_zeros"].permute(2, 1, 0).contiguous()
    return Quantized(unpack_codes(tensors["weight_packed"], quantization_config["isa"]), scales, zeros)


def tensor_problems(
    name: str, tensors: Mapping[str, torch.Tensor], quantization_config: Mapping[str, Any]
) -> list[str]:
    """See Layout.tensor_problems."""
    problems = config_problems(quantization_config) + suffix_problems(name, tensors, SUFFIXES)
    if problems:
        return problems
    packed, table = tensors["weight_packed"], tensors["scales_and_zeros"]
    if packed.dim() != 2 or packed.dtype != torch.uint8:
        return [f"{name}.weight_packed: expected uint8 [N, K/2], found {describe(packed)}"]
    rows, columns = packed.shape[0], packed.shape[1] * 2
    group_size = int(quantization_config["group_size"])
    problems = [f"{name}: {problem}" for problem in shape_problems(rows, columns, group_size)]
    if problems:
        return problems
    groups = columns // resolve_group_size(group_size, columns)
    problems += expect(f"{name}.weight_packed", packed, (torch.uint8,), (rows, columns // 2))
    problems += expect(f"{name}.scales_and_zeros", table, (torch.bfloat16,), (groups, rows, 2))
    if not problems and not bool(torch.isfinite(table).all()):
        problems.append(f"{name}.scales_and_zeros: not finite")
    return problems


def quantization_config(options: LayoutOptions) -> dict[str, Any]:
    """See Layout.quantization_config. Raises BadInput for an unknown tag."""
    return {
        "quant_method": "tinygemm",
        "bits": BITS,
        "group_size": options.group_size,
        "isa": options.isa,
        "fingerprint": fingerprint(options.isa),
        "lm_head": options.lm_head,
        "modules_to_not_convert": list(options.kept),
    }


def extra_files(quantization_config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """See Layout.extra_files."""
    return {}


def stored_bits(rows: int, columns: int, group_size: int) -> int:
    """See Layout.stored_bits."""
    groups = columns // resolve_group_size(group_size, columns)
    return BITS * rows * columns + groups * rows * 2 * 16


def _blocks(isa: str) -> Blocks:
    if isa not in ISAS:
        raise BadInput(f"{isa!r}: unknown machine tag of tinygemm weights; known: {', '.join(ISAS)}")
    return ISAS[isa]


def _pack_blocks(codes: torch.Tensor, halves: bool) -> torch.Tensor:
    """[blocks, size, K] codes as [blocks, K, size / 2] bytes."""
    half = codes.shape[1] // 2
    low, high = (codes[:, :half], codes[:, half:]) if halves else (codes[:, 0::2], codes[:, 1::2])
    return (low | (high << BITS)).transpose(1, 2).contiguous()


def _unpack_blocks(packed: torch.Tensor, halves: bool) -> torch.Tensor:
    """[blocks, K, size / 2] bytes as [blocks, size, K] codes."""
    low, high = (packed & (LEVELS - 1)).transpose(1, 2), (packed >> BITS).transpose(1, 2)
    if halves:
        return torch.cat([low, high], dim=1)
    return torch.stack([low, high], dim=2).flatten(1, 2)


def _write_signed(packed: torch.Tensor, weight: torch.Tensor, blocks: Blocks) -> None:
    """Writes codes minus 8 of whole blocks [N, K/2] into bf16 [K, N]."""
    half = blocks.size // 2
    values = packed.reshape(-1, weight.shape[0], half).transpose(0, 1)
    split = weight.unflatten(1, (-1, 2, half) if blocks.halves else (-1, half, 2))
    # The subtraction happens in bytes, which are the smallest to pass over.
    split.select(2 if blocks.halves else 3, 0).copy_((values & (LEVELS - 1)).view(torch.int8).sub_(MIDDLE))
    split.select(2 if blocks.halves else 3, 1).copy_((values >> BITS).view(torch.int8).sub_(MIDDLE))


def _fixed_codes() -> torch.Tensor:
    """uint8 [128, 2]: enough channels for two blocks of the largest size; squares, so that channels differ."""
    index = torch.arange(256)
    values: torch.Tensor = (index * index + 5 * index) // 7 % LEVELS
    return values.to(torch.uint8).view(128, 2)


def _digest(packed: torch.Tensor) -> str:
    return hashlib.sha256(packed.contiguous().numpy().tobytes()).hexdigest()


def config_problems(quantization_config: Mapping[str, Any]) -> list[str]:
    """Why the packed bytes cannot be told: an unknown tag, or a fingerprint that is not the tag's."""
    problems = misread_problems(quantization_config, {"bits": BITS})
    if problems:
        return problems
    isa = str(quantization_config.get("isa"))
    if isa not in ISAS:
        return [f"quantization_config.isa: expected one of {', '.join(ISAS)}, found {isa!r}"]
    expected, found = fingerprint(isa), quantization_config.get("fingerprint")
    if found != expected:
        owner = next((tag for tag in ISAS if fingerprint(tag) == found), "no known machine")
        return [f"quantization_config.fingerprint: expected {expected} for {isa}, found {found} of {owner}"]
    return []
