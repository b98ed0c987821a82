"""The head's output channels in clusters."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.grid import Grid
from calibrate.head import clusters, parts
from calibrate.methods import choose
from calibrate.statistics import Moments


def divergence(weight: torch.Tensor, other: torch.Tensor, x: torch.Tensor) -> float:
    a, b = (torch.log_softmax(x @ w.t(), -1) for w in (weight, other))
    return float((a.exp() * (a - b)).sum(-1).mean())


def test_what_a_cluster_sees_is_weighted_by_how_likely_its_channels_are() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(200, 24, generator=generator), torch.randn(3, 40, 24, generator=generator)
    found = list(parts(weight, [x[:1], x[1:]]))
    assert sorted(torch.cat([part.channels for part in found]).tolist()) == list(range(200)) and len(found) == 3
    tokens = x.flatten(0, 1).double()
    p = torch.softmax(tokens @ weight.double().t(), -1)
    every = (p * (1 - p)).sum(1)
    for part in found:
        own = (p * (1 - p))[:, part.channels].sum(1)
        counts = 0.8 * own / own.mean() + 0.2 * every / every.mean()
        expected = (tokens * counts[:, None]).t() @ tokens / len(tokens)
        assert part.inputs.hessian is not None and part.inputs.drift is None
        torch.testing.assert_close(part.inputs.hessian.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_head_in_clusters_leaves_less_divergence_than_one_that_sees_all_tokens_alike() -> None:
    generator = torch.Generator().manual_seed(1)
    # Topics: tokens lie near a few directions, and so do the channels that are likely there.
    topics = torch.randn(6, 64, generator=generator)
    weight = 2 * topics.repeat(80, 1) / 8 + torch.randn(480, 64, generator=generator) / 4
    mixing = torch.randn(64, 64, generator=generator)

    def text(count: int) -> torch.Tensor:
        near = topics[torch.randint(6, (count,), generator=generator)]
        return near + torch.randn(count, 64, generator=generator) @ mixing / 12

    x, other = text(4000), text(2000)
    seen = Moments(full=True)
    seen.add(x)
    alike = choose(weight, Grid(32), ["gptq"], seen.inputs())
    apart = choose(weight, Grid(32), ["gptq"], seen.inputs(), parts=parts(weight, [x]))
    lost = [divergence(weight, chosen.quantized.dequantize(torch.float32), other) for chosen in (alike, apart)]
    assert lost[1] < 0.95 * lost[0]
    assert apart.error > alike.error and not apart.fallback


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 40), count=st.integers(1, 9), alike=st.booleans())
def test_every_cluster_has_a_row(rows: int, count: int, alike: bool) -> None:
    weight = torch.ones(rows, 8) if alike else torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))
    labels = clusters(weight, count)
    assert labels.shape == (rows,) and set(labels.tolist()) == set(range(int(labels.max()) + 1))
    assert int(labels.max()) < count
