"""No worse than an earlier run: which run that is, and what its noise explains."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.validate.test_history import entry
from validate.baseline import NOISE, Baseline, difference, find_baseline
from validate.entry import Entry
from validate.gates import evaluate, no_worse_than

THEN = (2.0, 2.4, 1.9, 2.2)
FAILED = [{"gate": "max_kl", "bound": 1.0, "measured": 2.0, "passed": False, "note": ""}]


def past(run: str, *nll: float, **changes: Any) -> Entry:
    return entry(run, nll=nll or THEN, **changes)


def find(wanted: str, *earlier: Entry, nll: tuple[float, ...] = THEN) -> Baseline:
    return find_baseline(wanted, "gptq", entry().subject, nll, earlier)


def test_the_increase_is_the_ratio_of_perplexities_with_its_paired_error() -> None:
    now = tuple(value + shift for value, shift in zip(THEN, (0.01, 0.03, 0.02, 0.02), strict=True))
    found = difference(past("a"), now)
    perplexities = [math.exp(sum(nll) / 4) for nll in (now, THEN)]
    assert found.increase == pytest.approx(perplexities[0] / perplexities[1] - 1)
    spread = torch.tensor([0.01, 0.03, 0.02, 0.02], dtype=torch.float64).std() / 2
    assert found.se == pytest.approx((1 + found.increase) * float(spread))
    # The windows' own spread is tens of times larger.
    assert found.se < 0.05 * float(torch.tensor(THEN).std())


@given(st.lists(st.floats(0.5, 8), min_size=2, max_size=30), st.floats(-0.5, 0.5))
def test_the_same_losses_are_equal_and_a_common_shift_is_beyond_any_noise(nll: list[float], shift: float) -> None:
    then = past("a", *nll)
    assert difference(then, nll).increase == 0 and difference(then, nll).inside_noise
    moved = difference(then, [value + shift for value in nll])
    assert moved.increase == pytest.approx(math.expm1(shift), abs=1e-9)
    assert moved.noise == pytest.approx(0, abs=1e-9)


def test_a_difference_inside_the_noise_holds_and_says_so() -> None:
    noisy = tuple(value + shift for value, shift in zip(THEN, (0.2, -0.15, 0.1, -0.1), strict=True))
    baseline = find("last", past("a"), nll=noisy)
    result = no_worse_than("last", baseline)
    assert result.passed and result.measured is not None and 0 < result.measured < (result.bound or 0)
    assert "inside the noise" in result.note and "that of a" in result.note and result.note.startswith("last: ")


def test_a_difference_beyond_the_noise_fails_with_figure_and_bound() -> None:
    worse = tuple(value + shift for value, shift in zip(THEN, (0.1, 0.11, 0.09, 0.1), strict=True))
    result = no_worse_than("best", find("best", past("a"), nll=worse))
    assert not result.passed and "beyond the noise" in result.note
    assert result.measured == pytest.approx(math.expm1(0.1)) and result.bound == pytest.approx(
        NOISE * difference(past("a"), worse).se
    )
    assert f"expected {result.bound:.5g}, found {result.measured:.5g}" in result.text
    better = tuple(value - 0.1 for value in THEN)
    assert no_worse_than("best", find("best", past("a"), nll=better)).passed


def test_the_gate_follows_the_noise_in_repeated_draws() -> None:
    """Two standard errors: of runs that lost nothing, about one in 44 fails."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(2000, 50, generator=generator, dtype=torch.float64) * 0.05
    then = past("a", *[2.0] * 50)
    failed = sum(not no_worse_than("last", Baseline(difference(then, (2.0 + draw).tolist()))).passed for draw in draws)
    assert 0.012 < failed / 2000 < 0.04


def test_last_is_the_newest_and_best_the_lowest_of_those_that_held() -> None:
    runs = [
        past("good", 1.9, 2.3, 1.8, 2.1),
        past("newer"),
        past("broken", 1.0, 1.0, 1.0, 1.0, gates=FAILED, passed=False),
        past("other", 1.0, 1.0, 1.0, 1.0, target="awq"),
    ]
    for wanted, run in (("last", "newer"), ("best", "good"), ("broken", "broken"), ("good", "good")):
        found = find(wanted, *runs).difference
        assert found is not None and found.then == run, wanted


def test_a_best_run_is_finite() -> None:
    found = find("best", past("broken", math.nan, 1.0, 1.0, 1.0), past("whole")).difference
    assert found is not None and found.then == "whole"


@pytest.mark.parametrize(
    "wanted, earlier, reason",
    [
        ("last", (), "the history has no earlier run of gptq"),
        ("best", (past("x", target="awq"),), "the history has no earlier run of gptq"),
        ("gone", (past("x"),), "the history has no gone of gptq"),
        (
            "last",
            (past("x", model_sha256="other model!"),),
            "x cannot be compared: it is of another model (other model!",
        ),
        ("last", (past("x", text_sha256="other"),), "x cannot be compared: it is of another text"),
        ("x", (past("x", windows_sha256="other"),), "x cannot be compared: it is of other windows of the text"),
        ("last", (past("x", gates=FAILED, passed=False),), "none of the 1 earlier runs of gptq held its gates"),
    ],
)
def test_what_cannot_be_compared_fails_with_the_reason(wanted: str, earlier: tuple[Entry, ...], reason: str) -> None:
    result = no_worse_than(wanted, find(wanted, *earlier))
    assert not result.passed and result.bound is None and result.measured is None
    assert reason in result.note and result.text.startswith(f"no_worse_than: not evaluated: {wanted}: ")


def test_without_a_history_the_gate_fails() -> None:
    (result,) = evaluate({"no_worse_than": "last"}, {})
    assert not result.passed and "no history was at hand" in result.text


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_fails(loss: float) -> None:
    broken = (loss, *THEN[1:])
    for baseline in (find("last", past("a"), nll=broken), find("a", past("a", *broken))):
        result = no_worse_than("last", baseline)
        assert not result.passed and result.measured is None
        assert baseline.to_dict()["increase"] is None and "not finite" in baseline.to_dict()["text"]


@pytest.mark.parametrize("loss", [3.0, 10.0, 2000.0, 5000.0])
def test_a_single_window_that_breaks_is_no_noise(loss: float) -> None:
    """It moves the mean and the standard error alike: by the standard error alone it would always pass."""
    then = [2 + 0.01 * index for index in range(40)]
    now = [value + 0.001 * (-1) ** index for index, value in enumerate(then)]
    assert no_worse_than("a", Baseline(difference(past("a", *then), now))).passed
    now[7] = loss
    assert not no_worse_than("a", Baseline(difference(past("a", *then), now))).passed


def test_a_single_window_has_no_noise_to_hide_in() -> None:
    then = past("a", 2.0)
    assert not no_worse_than("a", Baseline(difference(then, [2.001]))).passed
    assert no_worse_than("a", Baseline(difference(then, [2.0]))).passed
