"""``junit.xml``: what CI systems show of a report, a test case for each gate of each target."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

from junitparser import Error, Failure, JUnitXml, TestCase, TestSuite

from validate.gates import GateResult

# Control characters that XML cannot hold.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(report: Mapping[str, Any]) -> bytes:
    """The report as JUnit's XML: a suite a target, in it a case for each gate and for each engine that was to run.

    A gate that did not hold is a failure, one that could not be measured an error; the message has the figure and the
    bound. A target without gates has one case that says so.
    """
    document = JUnitXml("edge-convert")
    for target in report["targets"]:
        suite = TestSuite(_xml(target["name"]))
        suite.timestamp = report["run"]["time"].removesuffix("Z")
        suite.add_property("run", report["run"]["id"])
        for name in ("format", "bits_per_weight", "perplexity_ratio", "kl", "top1"):
            suite.add_property(name, str(target[name]))
        for case in _cases(target):
            suite.add_testcase(case)
        document.add_testsuite(suite)
    stream = io.BytesIO()
    document.write(stream, pretty=True)
    return stream.getvalue()


def _cases(target: Mapping[str, Any]) -> list[TestCase]:
    cases = []
    for gate in target["gates"]:
        result = GateResult(**gate)
        case = _case(result.gate, target)
        # Shown for cases that passed, too: how near the bound they came.
        case.system_out = _xml(result.text)
        if not result.passed:
            case.result = [(Failure if result.measured is not None else Error)(_xml(result.text), result.gate)]
        cases.append(case)
    for engine in target["engines"]:
        case = _case(f"runs in {engine['name']}", target)
        if "failed" in engine:
            case.result = [(Error if engine["lacking"] else Failure)(_xml(engine["failed"]), "engine")]
        cases.append(case)
    if not cases:
        case = _case("no gates", target)
        case.system_out = "validation: gates: none"
        cases.append(case)
    return cases


def _case(name: str, target: Mapping[str, Any]) -> TestCase:
    return TestCase(_xml(name), f"edge-convert.{_xml(target['name'])}", 0.0)


def _xml(text: str) -> str:
    return _NOT_XML.sub("?", text)
