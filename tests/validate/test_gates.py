"""Gates: each rule both ways, at its bound, and failing when there is nothing to judge."""

from __future__ import annotations

import json
import math

import pytest

from convert.sections import Gates
from validate.gates import RULES, GateResult, evaluate

MAXIMA = sorted(name for name in RULES if name.startswith("max_"))
MINIMA = sorted(name for name in RULES if name.startswith("min_"))


def outcome(gate: str, bound: float, measured: float | None) -> GateResult:
    (result,) = evaluate({gate: bound}, {RULES[gate][0]: measured})
    return result


def test_every_gate_of_the_yaml_has_a_rule_and_no_other() -> None:
    assert {*RULES, "no_worse_than"} == Gates.model_fields.keys()
    assert len(MAXIMA) + len(MINIMA) == len(RULES)


@pytest.mark.parametrize("gate", MAXIMA)
def test_a_maximum_passes_up_to_its_bound(gate: str) -> None:
    assert outcome(gate, 0.5, 0.4).passed and outcome(gate, 0.5, 0.5).passed
    assert not outcome(gate, 0.5, 0.6).passed


@pytest.mark.parametrize("gate", MINIMA)
def test_a_minimum_passes_from_its_bound(gate: str) -> None:
    assert outcome(gate, 0.5, 0.6).passed and outcome(gate, 0.5, 0.5).passed
    assert not outcome(gate, 0.5, 0.4).passed


@pytest.mark.parametrize("gate", sorted(RULES))
@pytest.mark.parametrize("measured", [None, math.nan, math.inf, -math.inf])
def test_a_gate_without_a_number_to_judge_fails(gate: str, measured: float | None) -> None:
    result = outcome(gate, 0.5, measured)
    assert not result.passed and result.measured is None
    assert result.text == f"{gate}: expected 0.5, found not measured"


def test_a_figure_that_was_never_taken_fails() -> None:
    (result,) = evaluate({"max_engine_gap": 0.1}, {})
    assert not result.passed


def test_gates_without_a_bound_are_not_judged_but_a_bound_of_zero_is() -> None:
    results = evaluate({"max_kl": None, "min_top1": 0, "max_perplexity_increase": 0.0}, {"perplexity_increase": 0.1})
    assert [(r.gate, r.passed) for r in results] == [("min_top1", False), ("max_perplexity_increase", False)]


def test_an_unknown_gate_is_a_bug() -> None:
    with pytest.raises(KeyError):
        evaluate({"max_fun": 1.0}, {})


def test_a_result_says_what_was_expected_and_found() -> None:
    assert outcome("max_kl", 0.05, 0.123456789).text == "max_kl: expected 0.05, found 0.12346"
    assert json.loads(json.dumps(vars(outcome("max_kl", 0.05, math.nan))))["measured"] is None
