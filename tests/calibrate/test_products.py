"""Products of channels, summed over tokens: exact as fp32 is, whatever unit multiplies them."""

from __future__ import annotations

import pytest
import torch

from calibrate.products import BLOCK, cross, gram


def inputs(columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    # Channels of very different sizes, as behind a trained model's norms.
    sizes = torch.logspace(-2, 2, columns)
    return (torch.randn(700, columns, generator=torch.Generator().manual_seed(seed)) * sizes).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 40, BLOCK, BLOCK + 24, 2 * BLOCK + 1])
def test_the_gram_matrix_has_the_rounding_of_fp32_and_is_symmetric(columns: int, dtype: torch.dtype) -> None:
    x = inputs(columns, dtype)
    found, exact = gram(x), x.double().t() @ x.double()
    sizes = exact.diagonal().sqrt()
    # Relative to the channels' own sizes: a bf16 sum would be 1e-3 off.
    assert float(((found - exact) / sizes[:, None] / sizes).abs().max()) < 2e-6
    assert found.dtype is torch.float32 and torch.equal(found, found.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_products_have_the_rounding_of_fp32(dtype: torch.dtype) -> None:
    a, b = inputs(48, dtype), inputs(64, dtype, seed=1)
    exact = a.double().t() @ b.double()
    sizes = a.double().norm(dim=0)[:, None] * b.double().norm(dim=0)
    assert float(((cross(a, b) - exact) / sizes).abs().max()) < 2e-6


def test_the_process_wide_precision_is_as_before() -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision
    x = inputs(64, torch.bfloat16)
    gram(x)
    cross(x, x)
    assert torch.backends.mkldnn.matmul.fp32_precision == before
