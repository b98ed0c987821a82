"""Int8 weights as a phone's graph holds them: transposed, for the right side of a product, with a scale per column."""

from __future__ import annotations

import numpy as np
import torch

from calibrate.grid import PHONE_BITS, Quantized
from models.errors import BadInput


def pack(quantized: Quantized) -> tuple[np.ndarray, np.ndarray]:
    """Codes int8 [K, N] and scales fp32 [N] of a linear [N, K] on the symmetric 8-bit grid with one group a row.

    Raises:
        ValueError: for a linear on another grid: a bug of the caller.
    """
    if quantized.bits != PHONE_BITS or quantized.scales.shape[1] != 1 or quantized.scales.dtype != torch.float32:
        raise ValueError(f"expected one fp32 scale per output channel and 8 bits, found {quantized.grid}")
    codes = (quantized.codes.t().to(torch.int16) - quantized.middle).to(torch.int8)
    return np.ascontiguousarray(codes.numpy()), np.ascontiguousarray(quantized.scales[:, 0].numpy())


def unpack(codes: np.ndarray, scales: np.ndarray) -> Quantized:
    """The linear [N, K] that a graph holds as int8 [K, N] and fp32 [N].

    Raises:
        BadInput: saying what is wrong with the codes or the scales.
    """
    problems = []
    if codes.dtype != np.int8 or scales.dtype != np.float32 or codes.shape[1:] != scales.shape:
        problems.append(
            f"expected int8 [K, N] and float32 [N], found {codes.dtype} {codes.shape}, {scales.dtype} {scales.shape}"
        )
    elif not (np.isfinite(scales) & (scales > 0)).all():
        problems.append(f"scales: expected positive finite ones, found {scales.min()} to {scales.max()}")
    elif codes.size and codes.min() < -127:
        problems.append("codes: expected -127..127, found -128")
    if problems:
        raise BadInput(problems)
    middle = 1 << (PHONE_BITS - 1)
    shifted = (torch.from_numpy(np.ascontiguousarray(codes.T)).to(torch.int16) + middle).to(torch.uint8)
    return Quantized(shifted, torch.from_numpy(scales.copy())[:, None], bits=PHONE_BITS)
