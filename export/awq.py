"""The AWQ checkpoint layout ("gemm"): integer zero points. vLLM, GPTQModel and transformers read it.

Tensors of one linear [N, K], group size g, both words packing eight neighbours along N:

* ``qweight`` int32 [K, N/8];
* ``qzeros`` int32 [K/g, N/8]: the zero point itself;
* ``scales`` [K/g, N]: w = (q - zero_point) * scale.

Nibble i of a word holds channel ``ORDER[i]`` of the eight, the order of AutoAWQ's gemm kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from calibrate.grid import BITS, Quantized, ZeroKind
from export.layout import (
    NIBBLES,
    LayoutOptions,
    describe,
    expect,
    misread_problems,
    pack_problems,
    pack_words,
    positive_problems,
    raise_problems,
    resolve_group_size,
    suffix_problems,
    unpack_words,
    vllm_shape_problems,
)

FORMAT = "awq"
SUFFIXES: tuple[str, ...] = ("qweight", "qzeros", "scales")
ZEROS: tuple[ZeroKind, ...] = ("integer",)
SCALE_DTYPES = (torch.bfloat16, torch.float16)
# What the configuration must say, or engines read other numbers from these bytes.
READ_AS: Mapping[str, Any] = {"bits": BITS, "zero_point": True, "version": "gemm"}
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def shape_problems(rows: int, columns: int, group_size: int) -> list[str]:
    """See Layout.shape_problems."""
    return vllm_shape_problems(rows, columns, group_size)


def pack(q: Quantized, options: LayoutOptions) -> dict[str, torch.Tensor]:
    """See Layout.pack."""
    raise_problems(pack_problems(q, ZEROS, options.group_size, shape_problems))
    assert q.zero_points is not None  # ZEROS holds nothing else
    tensors = {
        "qweight": pack_words(q.codes.t(), ORDER),
        "qzeros": pack_words(q.zero_points.t(), ORDER),
        "scales": q.scales.t().contiguous(),
    }
    raise_problems(tensor_problems("linear", tensors, quantization_config(options)))
    return tensors


def unpack(tensors: Mapping[str, torch.Tensor], quantization_config: Mapping[str, Any]) -> Quantized:
    """See Layout.unpack."""
    return Quantized(
        unpack_words(tensors["qweight"], ORDER).t().contiguous(),
        tensors["scales"].t().contiguous(),
        zero_points=unpack_words(tensors["qzeros"], ORDER).t().contiguous(),
    )


def tensor_problems(
    name: str, tensors: Mapping[str, torch.Tensor], quantization_config: Mapping[str, Any]
) -> list[str]:
    """See Layout.tensor_problems."""
    problems = misread_problems(quantization_config, READ_AS) + suffix_problems(name, tensors, SUFFIXES)
    if problems:
        return problems
    qweight = tensors["qweight"]
    if qweight.dim() != 2 or qweight.dtype != torch.int32:
        return [f"{name}.qweight: expected int32 [K, N/8], found {describe(qweight)}"]
    rows, columns = qweight.shape[1] * NIBBLES, qweight.shape[0]
    group_size = int(quantization_config["group_size"])
    problems = [f"{name}: {problem}" for problem in shape_problems(rows, columns, group_size)]
    if problems:
        return problems
    groups = columns // resolve_group_size(group_size, columns)
    problems += expect(f"{name}.qweight", qweight, (torch.int32,), (columns, rows // NIBBLES))
    problems += expect(f"{name}.qzeros", tensors["qzeros"], (torch.int32,), (groups, rows // NIBBLES))
    problems += expect(f"{name}.scales", tensors["scales"], SCALE_DTYPES, (groups, rows))
    return problems or positive_problems(f"{name}.scales", tensors["scales"])


def quantization_config(options: LayoutOptions) -> dict[str, Any]:
    """See Layout.quantization_config.

    Without kept linears ``modules_to_not_convert`` is null, and vLLM recognises bf16 layers by their dtype.
    """
    return {
        "quant_method": "awq",
        "bits": BITS,
        "group_size": options.group_size,
        "zero_point": True,
        "version": "gemm",
        "lm_head": options.lm_head,
        "modules_to_not_convert": list(options.kept) or None,
    }


def extra_files(quantization_config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """See Layout.extra_files."""
    return {}


def stored_bits(rows: int, columns: int, group_size: int) -> int:
    """See Layout.stored_bits."""
    groups = columns // resolve_group_size(group_size, columns)
    return BITS * rows * columns + groups * rows * (BITS + 16)
