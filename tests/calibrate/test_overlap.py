"""How much of an evaluation text calibration has seen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calibrate import overlap as module
from calibrate.overlap import SHINGLE, overlap
from tests.helpers import tokens

TEXT = tokens(4000, seed=1)
# Of other tokens: one that stood by chance beside a passage in both would lengthen it.
OTHER = tokens(4000, seed=2) + 10_000


def windows(ids: torch.Tensor, length: int = 100) -> torch.Tensor:
    return ids[: len(ids) // length * length].view(-1, length)


def test_a_part_of_the_text_is_seen_wherever_it_stands_and_nothing_else_is() -> None:
    assert overlap(windows(TEXT[1237:2237]), TEXT) == 1
    assert overlap(windows(OTHER), TEXT) == 0
    mixed = torch.cat([windows(TEXT)[:10], windows(OTHER)[:30]])
    assert overlap(mixed, TEXT) == pytest.approx(0.25)


@given(st.integers(0, 3900), st.integers(SHINGLE, 80))
def test_a_passage_inside_a_window_counts_by_its_length(start: int, length: int) -> None:
    window = OTHER[:100].clone()
    passage = TEXT[start : start + length]
    window[10 : 10 + len(passage)] = passage
    runs = max(0, len(passage) - SHINGLE + 1)
    assert overlap(window[None], TEXT) == pytest.approx(runs / (100 - SHINGLE + 1))


def test_phrases_that_are_shorter_than_a_run_do_not_count() -> None:
    window = OTHER[:100].clone()
    window[:15] = TEXT[:15]
    assert overlap(window[None], TEXT) == 0
    assert overlap(TEXT[None, :10], TEXT) == overlap(windows(TEXT), TEXT[:10]) == 0


def test_the_order_of_tokens_matters() -> None:
    assert overlap(windows(TEXT.flip(0)), TEXT) == 0


def test_passes_over_the_text_lose_nothing_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 64)
    assert overlap(windows(TEXT), TEXT) == 1
