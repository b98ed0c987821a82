"""How much of an evaluation text stands in the calibration text too."""

from __future__ import annotations

import torch

# Tokens that a passage must share in a row: longer than stock phrases, about a dozen words.
SHINGLE = 16
# Positions per pass, which bounds memory.
CHUNK = 1 << 20


def overlap(windows: torch.Tensor, text_ids: torch.Tensor) -> float:
    """The share of the windows' runs of 16 tokens that occur anywhere in a text, whatever their position there.

    Args:
        windows: int64 [count, tokens] of the evaluation text.
        text_ids: int64 [tokens] of the whole calibration text, by the same tokenizer.

    Returns:
        0 to 1; 0 when either is shorter than 16 tokens. Runs are compared by 64-bit hashes.
    """
    if windows.shape[1] < SHINGLE or len(text_ids) < SHINGLE:
        return 0.0
    wanted = torch.cat([_hashes(window) for window in windows])
    found = torch.zeros(len(wanted), dtype=torch.bool)
    for start in range(0, len(text_ids) - SHINGLE + 1, CHUNK):
        found |= torch.isin(wanted, _hashes(text_ids[start : start + CHUNK + SHINGLE - 1]))
    return float(found.double().mean())


def _hashes(ids: torch.Tensor) -> torch.Tensor:
    """One int64 for each run of SHINGLE tokens: a random linear form modulo 2**64, int64 [tokens - SHINGLE + 1]."""
    limits = torch.iinfo(torch.int64)
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(limits.min, limits.max, (SHINGLE,), generator=generator)
    total = torch.zeros(len(ids) - SHINGLE + 1, dtype=torch.int64)
    for offset, factor in enumerate(factors):
        total += ids[offset : offset + len(total)] * factor
    return total
