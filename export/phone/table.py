"""The grid of an embedding table: one scale for all rows, because a row's own could not follow it out of a Gather."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from calibrate.grid import check_finite, stored_scales


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
        return TableGrid(name, dtype, float(stored_scales(table.abs().max() / _reach(dtype), torch.float32)))

    def codes(self, table: torch.Tensor) -> np.ndarray:
        """The nearest codes of a table."""
        reach = _reach(self.dtype)
        values = (table / self.scale).round_().clamp_(-reach, reach).numpy()
        return (values.astype(np.int32) + self.zero_point.astype(np.int32)).astype(self.dtype)


def _reach(dtype: str) -> int:
    return 127 if dtype == "int8" else (1 << 15) - 1
