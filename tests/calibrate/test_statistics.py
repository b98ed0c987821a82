"""Second moments of a linear's input."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from calibrate.hessian import DAMPING
from calibrate.statistics import Moments, first_inputs, observe


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


def test_products_and_drift_are_sums_over_all_tokens() -> None:
    x, other, outputs = torch.randn(3, 12, 6, generator=torch.Generator().manual_seed(0))
    outputs = outputs[:, :4]
    seen = Moments(full=True)
    for part, reference, y in zip(x.split(5), other.split(5), outputs.split(5), strict=True):
        seen.add(part[None], reference[None], wanted=y[None])
    inputs = seen.inputs()
    assert inputs.hessian is not None and inputs.drift is not None
    assert torch.allclose(inputs.hessian, x.t() @ x / 12, atol=1e-6)
    assert torch.allclose(inputs.hessian.diagonal(), inputs.moments)
    assert torch.allclose(inputs.drift, (other - x).t() @ x / 12, atol=1e-6)
    assert inputs.wanted is not None and torch.allclose(inputs.wanted, outputs.t() @ x / 12, atol=1e-6)


def test_tokens_count_alike_in_every_sum() -> None:
    x, other, outputs = torch.randn(3, 12, 6, generator=torch.Generator().manual_seed(0))
    counts = torch.tensor([1.0, 4.0] * 6)
    weighed, repeated = Moments(full=True), Moments(full=True)
    weighed.add(x, other, counts, outputs)
    for times in (1, 4):
        for _ in range(times):
            chosen = counts == times
            repeated.add(x[chosen], other[chosen], wanted=outputs[chosen])
    for name in ("products", "drift", "wanted"):
        assert torch.allclose(getattr(weighed, name), getattr(repeated, name), atol=1e-5), name


def test_the_target_makes_up_for_half_of_what_the_outputs_lack() -> None:
    generator = torch.Generator().manual_seed(0)
    x, other = torch.randn(2, 500, 6, generator=generator)
    weight = torch.randn(4, 6, generator=generator)
    # All of the outputs' lack is a linear function of the inputs, so that all of it could be made up for.
    lack = x @ torch.randn(6, 4, generator=generator)
    half = lack / 2 / (1 + DAMPING)
    seen = Moments(full=True)
    seen.add(x, wanted=x @ weight.t() + lack)
    added = x @ (seen.inputs().target(weight) - weight).t()
    assert torch.allclose(added, half, rtol=0.05, atol=0.05)
    # Changed inputs alone: the outputs that the source's inputs have are wanted, whichever way that is said.
    drift, wanted = Moments(full=True), Moments(full=True)
    drift.add(x, other)
    wanted.add(x, wanted=other @ weight.t())
    assert torch.allclose(drift.inputs().target(weight), wanted.inputs().target(weight), atol=1e-4)
    # Factors of the channels are those of the weight that is asked for.
    factors = torch.rand(6, generator=generator) + 0.5
    target = wanted.inputs().scaled(factors).target(weight * factors) / factors
    assert torch.allclose(target, wanted.inputs().target(weight), atol=1e-2)


def test_a_forward_pass_ends_where_the_input_is_seen() -> None:
    after: list[int] = []
    layers = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    layers[1].register_forward_hook(lambda *_: after.append(1))
    x = torch.ones(5, 4)
    first, second = first_inputs(layers, lambda: layers(x))
    assert torch.equal(first, x) and torch.equal(second, layers[0](x)) and not after
    assert not any(layer._forward_pre_hooks for layer in layers)
    with pytest.raises(ValueError, match="was not run"):
        first_inputs([layers[1]], lambda: layers[0](x))
