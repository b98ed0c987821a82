"""Tokens drawn from a distribution."""

import torch

from calibrate.drawing import draw


def test_tokens_are_drawn_as_often_as_they_are_likely_and_never_where_they_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, generator=generator) * 2
    logits[[0, 7, 8, 49]] = -torch.inf
    probabilities = torch.softmax(logits, -1)
    drawn = draw(probabilities.expand(40_000, -1), generator)
    assert drawn.shape == (40_000, 1)
    counts = torch.bincount(drawn[:, 0], minlength=50)
    assert not counts[[0, 7, 8, 49]].any()
    # Pearson's statistic has 45 degrees of freedom: 80 has a probability of .001.
    expected = (probabilities * 40_000)[probabilities > 0]
    assert float(((counts[probabilities > 0] - expected).square() / expected).sum()) < 80
