"""One packed tinygemm linear at run time: the checks that torch's operator does not make, and the two paths over it.

A single row is a matter of reading the weights once, and the int4 operator reads a quarter of the bytes. Its time grows
with the rows, so wider inputs unpack the same bytes to bf16, a few channels at a time so that no second copy of a
weight ever exists, and use the ordinary GEMM.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from export import tinygemm
from export.layout import describe, raise_problems, resolve_group_size
from export.serving.switches import WIDE_ROWS
from models.errors import BadInput

# Channels that are unpacked at once: a multiple of every block size; 4 MB of bf16 at 2048 in features.
CHANNELS = 1024


@cache
def host() -> str:
    """This machine's tag. Raises EnvironmentProblem when torch packs in an unknown way."""
    return tinygemm.host_isa()


@cache
def wide_rows() -> int:
    """Inputs with at least this many rows take the GEMM."""
    return int(WIDE_ROWS.read())


def check_config(quantization_config: Mapping[str, Any]) -> None:
    """Refuses a ``quantization_config`` whose bytes cannot be told, or that the operator cannot compute with.

    Raises:
        BadInput: with every problem.
    """
    problems = tinygemm.config_problems(quantization_config)
    size = quantization_config.get("group_size")
    if not problems and size != -1 and size not in tinygemm.GROUP_SIZES:
        known = ", ".join(map(str, tinygemm.GROUP_SIZES))
        problems.append(f"quantization_config.group_size: expected {known} or -1, found {size!r}")
    raise_problems(problems)


def to_host(packed: torch.Tensor, rows: list[int], quantization_config: Mapping[str, Any]) -> torch.Tensor:
    """The parts' bytes, one after another, as one linear's bytes for this machine.

    The same tensor comes back when nothing has to change: the configuration's tag and fingerprint agree with each
    other (``check_config``) and with what torch's operator packs here.
    """
    return tinygemm.restack(packed, rows, quantization_config["isa"], host())


def check_linear(name: str, packed: torch.Tensor, table: torch.Tensor, quantization_config: Mapping[str, Any]) -> None:
    """Refuses tensors with which the operator would compute wrongly or read out of bounds.

    Raises:
        BadInput: with every problem, each naming the tensor.
    """
    tensors = {"weight_packed": packed, "scales_and_zeros": table}
    problems = tinygemm.tensor_problems(name, tensors, quantization_config)
    problems += [f"{name}.{suffix}: not contiguous" for suffix, t in tensors.items() if not t.is_contiguous()]
    raise_problems(problems)


def multiply(
    x: torch.Tensor, packed: torch.Tensor, table: torch.Tensor, group_size: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x bf16 [M, K] times the transpose of the weight, plus the bias bf16 [N]: bf16 [M, N].

    The weight is packed for this machine and was checked by ``check_linear``.

    Raises:
        BadInput: for an input that is not bf16 [M, K].
    """
    rows, columns = packed.shape[0], packed.shape[1] * 2
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] != columns:
        raise BadInput(f"input of a tinygemm linear: expected bfloat16 [rows, {columns}], found {describe(x)}")
    if 0 < x.shape[0] < wide_rows():
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), packed, group_size, table)
        return y if bias is None else y + bias
    y = x.new_empty(x.shape[0], rows)
    for start in range(0, rows, CHANNELS):
        part = slice(start, start + CHANNELS)
        weight = tinygemm.dequantize_packed(packed[part], table[:, part], host())
        if bias is None:
            torch.mm(x, weight.t(), out=y[:, part])
        else:
            torch.addmm(bias[part], x, weight.t(), out=y[:, part])
    return y


# One node in a traced graph: tracing would fix the choice of the path at the first input's rows, and would unpack in
# the graph. Registered without torch.library.custom_op, whose wrapper costs more than a small linear.
_LIBRARY = torch.library.Library("edge_convert", "FRAGMENT")
_LIBRARY.define("tinygemm(Tensor x, Tensor packed, Tensor table, int group_size, Tensor? bias) -> Tensor")
_LIBRARY.impl("tinygemm", multiply, "CPU")


@torch.library.register_fake("edge_convert::tinygemm", lib=_LIBRARY)
def _shape(
    x: torch.Tensor, packed: torch.Tensor, table: torch.Tensor, group_size: int, bias: torch.Tensor | None
) -> torch.Tensor:
    return x.new_empty(x.shape[0], packed.shape[0])


def forward(
    x: torch.Tensor, packed: torch.Tensor, table: torch.Tensor, group_size: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """``multiply`` for x bf16 [..., K] and a ``group_size`` as in the configuration; traced, it is one node."""
    size = resolve_group_size(group_size, packed.shape[1] * 2)
    flat = x.reshape(-1, x.shape[-1])
    y: torch.Tensor = torch.ops.edge_convert.tinygemm(flat, packed, table, size, bias)
    return y.view(*x.shape[:-1], y.shape[-1])
