"""The factor of the second moments: it gives H back, damping reaches what was never seen."""

from __future__ import annotations

import pytest
import torch

from calibrate.hessian import correction, damped, factorise


def moments(channels: int = 24, seen: int = 100, seed: int = 0) -> torch.Tensor:
    """E[x x^T] of correlated inputs of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(seen, channels, generator=generator) @ torch.randn(channels, channels, generator=generator)
    x *= torch.logspace(-1, 1, channels)
    return x.t() @ x / seen


def test_the_factor_gives_the_damped_moments_back() -> None:
    h = moments()
    f = factorise(h)
    in_order = damped(h)[f.order][:, f.order]
    scale = f.weights[f.order].double().sqrt()
    upper = (f.feedback.double() + torch.eye(24, dtype=torch.float64)) * scale
    assert torch.equal(f.feedback, f.feedback.triu(1))
    assert torch.allclose(upper @ upper.t(), in_order, rtol=1e-5)
    assert (in_order.diagonal().diff() <= 0).all()


def test_a_weight_is_the_reciprocal_of_the_inverse_diagonal_for_the_channel_that_comes_first() -> None:
    """The first channel's error is made up for by all others, so what is left is conditional on all of them."""
    h = moments()
    f = factorise(h)
    first = int(f.order[0])
    assert float(f.weights[first]) == pytest.approx(1 / float(torch.linalg.inv(damped(h))[first, first]), rel=1e-5)


@pytest.mark.parametrize("dead", [[3], [0, 5, 23], list(range(24))])
def test_channels_without_input_are_for_themselves(dead: list[int]) -> None:
    h = moments()
    h[dead], h[:, dead] = 0, 0
    f = factorise(h)
    place = torch.isin(f.order, torch.tensor(dead))
    assert torch.isfinite(f.feedback).all() and (f.weights > 0).all()
    assert not f.feedback[place].any() and not f.feedback[:, place].any()


def test_fewer_tokens_than_channels_are_enough() -> None:
    f = factorise(moments(seen=5))
    assert torch.isfinite(f.feedback).all() and (f.weights > 0).all()


def test_the_correction_brings_outputs_nearer_to_the_sources() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 24, generator=generator)
    x = torch.randn(500, 24, generator=generator) @ torch.randn(24, 24, generator=generator)
    source = x + 0.3 * x @ torch.randn(24, 24, generator=generator) / 5
    h, drift = x.t() @ x / 500, (source - x).t() @ x / 500
    factor = torch.linalg.cholesky(damped(h))
    corrected = weight + correction(weight @ drift, factor)
    wanted, before, after = source @ weight.t(), x @ weight.t(), x @ corrected.t()
    assert 0.3 < float((after - wanted).norm() / (before - wanted).norm()) < 0.7
    assert not correction(torch.zeros(8, 24), factor).any()
