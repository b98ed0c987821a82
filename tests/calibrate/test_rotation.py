"""Rotations: orthogonal, spreading, and fast because they are Kronecker products."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.rotation import dct, hadamard, random_hadamard


@pytest.mark.parametrize("size", [1, 2, 9, 32, 96, 256, 576, 2048, 2560])
def test_a_random_hadamard_is_orthogonal_and_its_inverse_undoes_it(size: int) -> None:
    rotation = random_hadamard(size, seed=0)
    matrix = rotation.apply(torch.eye(size, dtype=torch.float64))
    assert torch.allclose(matrix @ matrix.t(), torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.allclose(rotation.invert(matrix), torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [64, 576, 2048])
def test_one_large_channel_is_spread_over_all(size: int) -> None:
    spike = torch.zeros(size)
    spike[size // 3] = 1.0
    assert random_hadamard(size, seed=0).apply(spike).abs().max() <= (2 / size) ** 0.5 + 1e-6


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 80), st.integers(0, 5), st.integers(1, 3))
def test_rotating_rows_is_a_matrix_product_of_any_leading_shape(size: int, seed: int, batch: int) -> None:
    rotation = random_hadamard(size, seed)
    matrix = rotation.apply(torch.eye(size, dtype=torch.float64))
    x = torch.randn(batch, 2, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    assert torch.allclose(rotation.apply(x), x @ matrix, rtol=0, atol=1e-10)
    assert torch.allclose(rotation.invert(x), x @ matrix.t(), rtol=0, atol=1e-10)


def test_a_table_larger_than_one_pass_rotates_like_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rotation = random_hadamard(24, seed=1)
    x = torch.randn(10, 24)
    whole = rotation.apply(x)
    monkeypatch.setattr("calibrate.rotation.CHUNK", 3 * 24)
    assert torch.allclose(rotation.apply(x), whole, rtol=0, atol=1e-6)


def test_the_seed_decides_the_signs() -> None:
    a, b, c = (random_hadamard(64, seed).signs for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_only_powers_of_two_have_a_sylvester_matrix() -> None:
    with pytest.raises(ValueError, match="no Sylvester matrix of size 12"):
        hadamard(12)
    assert torch.allclose(dct(5) @ dct(5).t(), torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-12)
