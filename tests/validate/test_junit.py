"""junit.xml: what a CI system counts is what the gates said."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
from junitparser import Error, Failure, JUnitXml

from validate.junit import to_junit


def gate(name: str, bound: float | None, measured: float | None, passed: bool, note: str = "") -> dict[str, Any]:
    return {"gate": name, "bound": bound, "measured": measured, "passed": passed, "note": note}


def report(*gates: dict[str, Any], engines: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    figures = {"format": "gptq", "bits_per_weight": 4.5, "perplexity_ratio": 1.01, "kl": None, "top1": 0.9}
    target = {"name": "gptq", "gates": list(gates), "engines": engines or [], **figures}
    return {"run": {"id": "2026-01-02-aa", "time": "2026-01-02T03:04:05Z"}, "targets": [target]}


GATES = (
    gate("max_kl", 0.05, 0.123456, False),
    gate("min_top1", 0.5, 0.9, True),
    gate("min_snr_db", 3.0, None, False),
    gate("no_worse_than", 0.002, 0.001, True, "last: perplexity 0.1% above that of x, which is inside the noise"),
)


def test_a_case_a_gate_with_figure_and_bound_in_the_message() -> None:
    (suite,) = JUnitXml.fromstring(to_junit(report(*GATES)))
    assert (suite.name, suite.tests, suite.failures, suite.errors) == ("gptq", 4, 1, 1)
    cases = {case.name: case for case in suite}
    assert list(cases) == ["max_kl", "min_top1", "min_snr_db", "no_worse_than"]
    (failure,), (error,) = cases["max_kl"].result, cases["min_snr_db"].result
    assert isinstance(failure, Failure) and failure.message == "max_kl: expected 0.05, found 0.12346"
    assert isinstance(error, Error) and error.message == "min_snr_db: expected 3, found not measured"
    assert cases["min_top1"].result == [] and cases["min_top1"].system_out == "min_top1: expected 0.5, found 0.9"
    assert "inside the noise" in str(cases["no_worse_than"].system_out)


@pytest.mark.parametrize("lacking", [False, True])
def test_an_engine_that_did_not_run_is_a_case_that_did_not_pass(lacking: bool) -> None:
    engines = [{"name": "vllm", "failed": "no <such> kernel", "lacking": lacking}, {"name": "gptqmodel"}]
    (suite,) = JUnitXml.fromstring(to_junit(report(GATES[1], engines=engines)))
    assert (suite.tests, suite.failures, suite.errors) == (3, int(not lacking), int(lacking))
    assert [case.name for case in suite] == ["min_top1", "runs in vllm", "runs in gptqmodel"]


def test_a_target_without_gates_has_a_case_all_the_same() -> None:
    (suite,) = JUnitXml.fromstring(to_junit(report()))
    assert (suite.tests, suite.failures, suite.errors) == (1, 0, 0) and next(iter(suite)).name == "no gates"


def test_any_text_makes_xml_that_parses() -> None:
    engines = [{"name": "vllm", "failed": "\x1b[31mred\x00 <&\"'> \ud800 \N{GRINNING FACE}", "lacking": False}]
    content = to_junit(report(engines=engines))
    root = ElementTree.fromstring(content)
    (failure,) = root.iter("failure")
    assert failure.get("message") == "?[31mred? <&\"'> ? \N{GRINNING FACE}"
