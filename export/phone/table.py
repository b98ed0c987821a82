"""The grid of an embedding table: one scale for all rows, because a row's own could not follow it out of a Gather."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from calibrate.grid import check_finite, stored_scales

# Of a table, coded at a time.
ROWS = 4096


@dataclass(frozen=True)
class TableGrid:
    """How a table's numbers are coded, (q - zero_point) * scale with codes symmetric around the zero point.

    Attributes:
        name: of the float table's initialiser.
        dtype: of the codes.
    """

    name: str
    dtype: Literal["int8", "uint16"]
    scale: float

    @property
    def zero_point(self) -> np.ndarray:
        """A scalar of the codes' dtype."""
        return np.array(0 if self.dtype == "int8" else 1 << 15, dtype=self.dtype)

    @staticmethod
    def of(name: str, table: torch.Tensor, dtype: Literal["int8", "uint16"]) -> TableGrid:
        """The grid that spans a table, fp32 [rows, columns]. Raises BadInput for a number that is not finite."""
        check_finite(name, table)
        # No second table in memory, as its absolute values would be.
        largest = torch.maximum(table.max(), -table.min())
        return TableGrid(name, dtype, float(stored_scales(largest / _reach(dtype), torch.float32)))

    def codes(self, table: torch.Tensor) -> np.ndarray:
        """The nearest codes of a table."""
        reach, zero = _reach(self.dtype), int(self.zero_point)
        codes = np.empty(tuple(table.shape), dtype=self.dtype)
        for start in range(0, len(table), ROWS):
            rows = (table[start : start + ROWS] / self.scale).round_().clamp_(-reach, reach)
            codes[start : start + ROWS] = rows.add_(zero).numpy()
        return codes


def _reach(dtype: str) -> int:
    return 127 if dtype == "int8" else (1 << 15) - 1
