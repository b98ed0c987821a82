"""The GPTQ checkpoint layout, "v1": symmetric, eight codes a word along K. vLLM, GPTQModel and transformers read it.

Tensors of one linear [N, K], group size g:

* ``qweight`` int32 [K/8, N]: code k in bits 4 * (k % 8);
* ``qzeros`` int32 [K/g, N/8]: the zero point *minus one*, so a symmetric grid (zero point 8) stores 7 in every
  nibble; "v2" stores the zero point itself. vLLM ignores these words, so a wrong convention shows only elsewhere;
* ``scales`` [K/g, N]: w = (q - 8) * scale; a negative scale is a number like any other to every kernel, and puts -8,
  the grid's longer side, on a group's positive extreme;
* ``g_idx`` int32 [K]: k // g. vLLM drops it unless ``desc_act`` is set, so any other order would be silently wrong.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

import torch

from calibrate.grid import BITS, MIDDLE, Quantized, ZeroKind
from export.layout import (
    NIBBLES,
    LayoutOptions,
    describe,
    expect,
    misread_problems,
    nonzero_problems,
    pack_problems,
    pack_words,
    raise_problems,
    resolve_group_size,
    suffix_problems,
    unpack_words,
    vllm_shape_problems,
)

FORMAT = "gptq"
SUFFIXES: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")
ZEROS: tuple[ZeroKind, ...] = ("none",)
SCALE_DTYPES = (torch.bfloat16, torch.float16)
# What the configuration must say, or engines read other numbers from these bytes.
READ_AS: Mapping[str, Any] = {"bits": BITS, "sym": True, "desc_act": False, "checkpoint_format": "gptq"}
# Zero point minus one (v1) and zero point (v2), eight nibbles of it.
QZEROS = 0x11111111 * (MIDDLE - 1)
QZEROS_V2 = 0x11111111 * MIDDLE - 2**32


def shape_problems(rows: int, columns: int, group_size: int) -> list[str]:
    """See Layout.shape_problems."""
    return vllm_shape_problems(rows, columns, group_size)


def pack(q: Quantized, options: LayoutOptions) -> dict[str, torch.Tensor]:
    """See Layout.pack."""
    raise_problems(pack_problems(q, ZEROS, options.group_size, shape_problems))
    rows, columns = q.codes.shape
    groups = q.scales.shape[1]
    tensors = {
        "qweight": pack_words(q.codes).t().contiguous(),
        "qzeros": torch.full((groups, rows // NIBBLES), QZEROS, dtype=torch.int32),
        "scales": q.scales.t().contiguous(),
        "g_idx": _g_idx(columns, q.group_size),
    }
    raise_problems(tensor_problems("linear", tensors, quantization_config(options)))
    return tensors


def unpack(tensors: Mapping[str, torch.Tensor], quantization_config: Mapping[str, Any]) -> Quantized:
    """See Layout.unpack."""
    codes = unpack_words(tensors["qweight"].t().contiguous())
    return Quantized(codes, tensors["scales"].t().contiguous())


def tensor_problems(
    name: str, tensors: Mapping[str, torch.Tensor], quantization_config: Mapping[str, Any]
) -> list[str]:
    """See Layout.tensor_problems."""
    problems = misread_problems(quantization_config, READ_AS) + suffix_problems(name, tensors, SUFFIXES)
    if problems:
        return problems
    qweight = tensors["qweight"]
    if qweight.dim() != 2 or qweight.dtype != torch.int32:
        return [f"{name}.qweight: expected int32 [K/8, N], found {describe(qweight)}"]
    rows, columns = qweight.shape[1], qweight.shape[0] * NIBBLES
    group_size = int(quantization_config["group_size"])
    problems = [f"{name}: {problem}" for problem in shape_problems(rows, columns, group_size)]
    if problems:
        return problems
    size = resolve_group_size(group_size, columns)
    groups = columns // size
    problems += expect(f"{name}.qweight", qweight, (torch.int32,), (columns // NIBBLES, rows))
    problems += expect(f"{name}.qzeros", tensors["qzeros"], (torch.int32,), (groups, rows // NIBBLES))
    problems += expect(f"{name}.scales", tensors["scales"], SCALE_DTYPES, (groups, rows))
    problems += expect(f"{name}.g_idx", tensors["g_idx"], (torch.int32,), (columns,))
    return problems or _content_problems(name, tensors, size)


def quantization_config(options: LayoutOptions) -> dict[str, Any]:
    """See Layout.quantization_config.

    ``modules_in_block_to_quantize`` is a list of lists: transformers documents it so, and vLLM flattens it. vLLM
    matches its entries as substrings of module names and then stops recognising bf16 layers by their dtype, so it
    must name the head as well, and no bf16 layer may match.

    Raises BadInput when a kept linear has the name of a quantised one.
    """
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": BITS,
        "group_size": options.group_size,
        "sym": True,
        "desc_act": False,
        "lm_head": options.lm_head,
        "checkpoint_format": "gptq",
        "meta": {"quantizer": [f"edge-convert:{_version()}"]},
    }
    if options.quantized_modules:
        raise_problems(
            f"{kept}: kept in bf16, but the engine would take it for a quantised {module}"
            for kept in options.kept
            for module in options.quantized_modules
            if module in kept
        )
        modules = [*options.quantized_modules, *(["lm_head"] if options.lm_head else [])]
        config["modules_in_block_to_quantize"] = [[module] for module in modules]
    return config


def extra_files(quantization_config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """See Layout.extra_files."""
    return {"quantize_config.json": dict(quantization_config)}


def stored_bits(rows: int, columns: int, group_size: int) -> int:
    """See Layout.stored_bits."""
    groups = columns // resolve_group_size(group_size, columns)
    return BITS * rows * columns + groups * rows * (BITS + 16) + 32 * columns


def _g_idx(columns: int, size: int) -> torch.Tensor:
    return torch.arange(columns, dtype=torch.int32) // size


def _content_problems(name: str, tensors: Mapping[str, torch.Tensor], size: int) -> list[str]:
    problems = nonzero_problems(f"{name}.scales", tensors["scales"])
    qzeros = tensors["qzeros"]
    if not bool((qzeros == QZEROS).all()):
        found = "the v2 convention" if bool((qzeros == QZEROS_V2).all()) else "other words"
        problems.append(f"{name}.qzeros: expected 0x77777777 (zero point minus one) everywhere, found {found}")
    if not torch.equal(tensors["g_idx"], _g_idx(len(tensors["g_idx"]), size)):
        problems.append(f"{name}.g_idx: expected k // {size}, found another order, which vLLM would ignore")
    return problems


def _version() -> str:
    try:
        return importlib.metadata.version("edge-convert")
    except importlib.metadata.PackageNotFoundError:
        # A checkout that is not installed. Readers parse this as a version.
        return "0.0.0"
