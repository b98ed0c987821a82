"""Orthogonal matrices that spread outliers over all channels, kept as Kronecker factors so that they apply fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# The largest Hadamard factor that is applied as one matrix product.
FACTOR = 64
# Elements per pass, so that temporaries stay small beside a vocabulary's table.
CHUNK = 1 << 22


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix ``R = diag(signs) (F_1 x ... x F_n)`` (Kronecker product) that multiplies rows: ``x R``.

    Attributes:
        signs: fp64 [size], 1 or -1.
        factors: fp64 orthogonal matrices; the product of their sizes is ``size``.
    """

    signs: torch.Tensor
    factors: tuple[torch.Tensor, ...]

    @property
    def size(self) -> int:
        return len(self.signs)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """``x R`` for x [..., size], in x's float dtype."""
        factors = [factor.to(x.dtype) for factor in self.factors]
        signs = self.signs.to(x.dtype)
        return self._by_rows(x, lambda rows: _kronecker(rows * signs, factors))

    def invert(self, x: torch.Tensor) -> torch.Tensor:
        """``x R^T`` for x [..., size]: undoes `apply`."""
        factors = [factor.t().to(x.dtype) for factor in self.factors]
        signs = self.signs.to(x.dtype)
        return self._by_rows(x, lambda rows: _kronecker(rows, factors) * signs)

    def _by_rows(self, x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        rows = x.reshape(-1, self.size)
        return torch.cat([change(part) for part in rows.split(max(1, CHUNK // self.size))]).reshape(x.shape)


def _kronecker(x: torch.Tensor, factors: Sequence[torch.Tensor]) -> torch.Tensor:
    y = x.reshape(-1, *(len(factor) for factor in factors))
    for axis, factor in enumerate(factors, start=1):
        y = torch.movedim(torch.movedim(y, axis, -1) @ factor, -1, axis)
    return y.reshape(x.shape)


def random_hadamard(size: int, seed: int) -> Rotation:
    """A Hadamard matrix for the power of two in ``size``, a DCT for its odd rest, and random signs before them.

    A channel that is far larger than all others comes out spread evenly over all (up to the DCT's factor of sqrt 2).
    QuaRot (arXiv:2404.00456) rotates the residual stream by such matrices.

    Args:
        size: of the rotated dimension; an odd rest is one dense factor.
        seed: of the signs.
    """
    power = size & -size
    factors = [] if size == power else [dct(size // power)]
    while power > 1:
        factors.append(hadamard(min(power, FACTOR)))
        power //= len(factors[-1])
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    return Rotation(signs, tuple(factors))


def hadamard(size: int) -> torch.Tensor:
    """Sylvester's Hadamard matrix over sqrt(size), fp64 [size, size]; size is a power of two."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"no Sylvester matrix of size {size}: not a power of two")
    matrix = torch.ones(1, 1, dtype=torch.float64)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(matrix, step)
    return matrix / size**0.5


def dct(size: int) -> torch.Tensor:
    """The orthonormal DCT-II matrix, fp64 [size, size]."""
    k = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(torch.pi / size * (k[None, :] + 0.5) * k[:, None]) * (2 / size) ** 0.5
    matrix[0] /= 2**0.5
    return matrix
