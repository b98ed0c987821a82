"""Second moments of a linear's input."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from calibrate.statistics import Moments, observe


def test_moments_over_batches_are_those_of_all_tokens_together() -> None:
    x = torch.randn(7, 5, 6, generator=torch.Generator().manual_seed(0))
    moments = Moments()
    for batch in x.split(3):
        moments.add(batch.bfloat16())
    expected = x.bfloat16().double().view(-1, 6).square().mean(0)
    assert moments.tokens == 35
    assert torch.allclose(moments.second_moments().double(), expected, rtol=1e-6)


def test_small_batches_are_not_lost_beside_a_large_sum() -> None:
    moments = Moments()
    moments.add(torch.full((1, 1), 1e5))
    for _ in range(1000):
        moments.add(torch.full((1, 1), 10.0))
    assert moments.second_moments().item() == pytest.approx((1e10 + 1e5) / 1001, rel=1e-6)


def test_no_input_is_an_error_not_a_zero() -> None:
    with pytest.raises(ValueError, match="no inputs were seen"):
        Moments().second_moments()


def test_hooks_are_gone_after_the_block_also_after_an_error() -> None:
    linear = nn.Linear(4, 2)
    with observe({"a": linear}) as observed:
        linear(torch.ones(3, 4))
    with pytest.raises(RuntimeError), observe({"a": linear}):
        raise RuntimeError
    linear(torch.ones(5, 4))
    assert observed["a"].tokens == 3 and not linear._forward_pre_hooks
