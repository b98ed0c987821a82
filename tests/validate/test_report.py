"""The report: valid JSON whatever was measured, and a table in which nothing that went wrong is missing."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from calibrate.text import Windows
from convert.report_files import write_reports
from tests.helpers import tokens
from tests.workshop import Workshop, spec
from validate.divergence import Verdict, to_dict
from validate.greedy import Divergence
from validate.measure import Measurement, Settings
from validate.report import Run, plain, print_table, target_report, to_report
from validate.score import Comparison

SCORES = Comparison(
    perplexity=12.0,
    perplexity_se=0.5,
    reference_perplexity=10.0,
    reference_perplexity_se=0.4,
    perplexity_ratio=1.2,
    perplexity_ratio_se=0.01,
    kl=0.1,
    top1=0.9,
    top5_overlap=0.8,
    snr_db=15.0,
    max_logit_difference=3.0,
    tokens=62,
    windows=2,
    nll=(2.0, 3.0),
)
ENGINE = {
    "name": "an engine",
    "perplexity": 12.1,
    "perplexity_ratio": 1.21,
    "perplexity_ratio_se": 0.01,
    "gap": 0.0083,
    "gap_se": 0.0004,
    "tokens": 31,
}
DIVERGED = to_dict(Divergence(0, 3, 7, 9, 0.5), Verdict("defect", "weights", 0.03, 0.5, 0.25, 0.125), None)
GREEDY = {"identical": 1, "of": 2, "tokens": 5, "divergences": [DIVERGED]}


def settings(**gates: float) -> Settings:
    return Settings(Windows(tokens(2, 32), 2, "ab"), tokens(2, 8), 5, 2, gates, torch.bfloat16)


def report(workshop: Workshop, measured: Measurement, **gates: float) -> dict[str, Any]:
    artifact = workshop.built("spark2_5", spec("gptq")).artifact
    return to_report("source", settings(**gates), [(artifact, measured)], 1.25, Run.begin({"model.safetensors": "ab"}))


def table(found: dict[str, Any]) -> str:
    stream = io.StringIO()
    print_table(found, Console(file=stream, width=200))
    return stream.getvalue()


RAN = {
    "name": "vllm",
    "version": "0.32.0",
    "kernels": {"qkv_proj": "AKernel"},
    "against": "the expanded weights",
    "perplexity": 12.2,
    "gap": 0.0167,
    "gap_se": 0.002,
    "top1": 0.998,
    "top1_of": 50,
    "logprob_gap": 0.0123,
    "tokens": 62,
    "greedy": {"identical": 1, "of": 2},
}


def test_engines_that_ran_are_in_the_report_and_the_remarks(workshop: Workshop) -> None:
    measured = Measurement(SCORES, GREEDY, ENGINE, [RAN])
    found = report(workshop, measured, max_engine_gap=0.01)
    (target,) = found["targets"]
    assert target["engines"] == [RAN]
    # The gate judges the worst of what was measured.
    (gate,) = target["gates"]
    assert gate["measured"] == 0.0167 and not gate["passed"]
    assert (
        "ran in vllm 0.32.0: perplexity 12.200, 1.67% ± 0.20 from the expanded weights, top-1 0.998 of 50 clear"
        " positions, log-probabilities differ by 0.0123, greedy 1/2" in table(found)
    )


@pytest.mark.parametrize(
    "engine, engines, wanted",
    [
        ({"name": "x", "skipped": "no"}, [RAN], 0.0167),
        ({"name": "x", "skipped": "no"}, [], None),
        (ENGINE, [], 0.0083),
        (ENGINE, [RAN | {"gap": math.nan}], None),
    ],
)
def test_the_engine_gate_judges_whatever_was_measured(
    workshop: Workshop, engine: dict[str, Any], engines: list[dict[str, Any]], wanted: float | None
) -> None:
    found = report(workshop, Measurement(SCORES, GREEDY, engine, engines), max_engine_gap=1)
    assert found["targets"][0]["gates"][0]["measured"] == wanted


def test_what_became_of_greedy_continuations_is_said(workshop: Workshop) -> None:
    text = table(report(workshop, Measurement(SCORES, GREEDY, ENGINE)))
    assert (
        "greedy: 0 near-ties, 1 defects, the largest: prompt 0, token 3, 'token 7' became 'token 9': defect: " in text
    )
    same = {"identical": 2, "of": 2, "tokens": 5, "divergences": []}
    assert "greedy:" not in table(report(workshop, Measurement(SCORES, same, ENGINE)))


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


BROKEN = Measurement(
    replace(
        SCORES, perplexity=math.inf, perplexity_se=math.nan, perplexity_ratio=math.inf, kl=math.nan, snr_db=-math.inf
    ),
    GREEDY,
    {**ENGINE, "perplexity_ratio": math.nan, "gap": math.inf},
)


@pytest.mark.parametrize("measured", [Measurement(SCORES, GREEDY, ENGINE), BROKEN])
def test_a_report_is_valid_json_whatever_was_measured(
    workshop: Workshop, tmp_path: Path, measured: Measurement
) -> None:
    found = report(workshop, measured, max_kl=1.0, max_perplexity_increase=1.0, max_engine_gap=1.0, min_snr_db=1.0)
    write_reports(tmp_path, found, [workshop.built("spark2_5", spec("gptq")).artifact])
    assert json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse) == found


def test_what_is_not_finite_is_null_fails_its_gates_and_shows(workshop: Workshop) -> None:
    found = report(workshop, BROKEN, max_kl=1.0, max_perplexity_increase=1.0, max_engine_gap=1.0, min_top1=0.5)
    (target,) = found["targets"]
    assert target["perplexity"] is None and target["kl"] is None and target["engine"]["gap"] is None
    assert {gate["gate"]: gate["passed"] for gate in target["gates"]} == {
        "max_kl": False,
        "max_perplexity_increase": False,
        "max_engine_gap": False,
        "min_top1": True,
    }
    text = table(found)
    assert "not finite ± not finite" in text and "3 failed" in text
    assert "gate failed: max_kl: expected 1, found not measured" in text


def test_the_figures_of_a_target_stand_in_report_and_table(workshop: Workshop) -> None:
    found = report(workshop, Measurement(SCORES, GREEDY, ENGINE), max_kl=1.0)
    (target,) = found["targets"]
    assert found["schema"] == 2 and found["seconds"] == 1.2
    assert found["reference"]["perplexity"] == 10.0 and found["reference"]["bos"].startswith("none")
    assert (target["name"], target["format"], target["perplexity_ratio"]) == ("gptq", "gptq", 1.2)
    assert "nll" not in target and "reference_perplexity" not in target
    text = table(found)
    for part in (
        "12.000 ± 0.500",
        "1.2000 ± 0.0100",
        "1.2100",
        "0.1000",
        "0.900",
        "15.0",
        "1/2",
        "passed",
        "0.83% ± 0.04",
    ):
        assert part in text, part


def test_every_gate_is_judged_on_its_own_figure(workshop: Workshop) -> None:
    artifact = workshop.built("spark2_5", spec("gptq")).artifact
    gates = {
        "max_perplexity_increase": 0.21,
        "max_kl": 0.1,
        "min_top1": 0.9,
        "min_greedy_identical": 1,
        "max_engine_gap": 0.0083,
        "min_snr_db": 15.0,
        "max_bits_per_weight": artifact.bits_per_weight,
    }
    entry = target_report(artifact, Measurement(SCORES, GREEDY, ENGINE), gates)
    assert [gate["gate"] for gate in entry["gates"]] == list(gates)
    assert all(gate["passed"] for gate in entry["gates"])
    measured = [gate["measured"] for gate in entry["gates"]]
    assert measured == pytest.approx([0.2, *list(gates.values())[1:]])


def test_a_skipped_engine_is_said_and_fails_its_gate(workshop: Workshop) -> None:
    measured = Measurement(SCORES, GREEDY, {"name": "an engine", "skipped": "a reason"})
    found = report(workshop, measured, max_engine_gap=1.0)
    assert not found["targets"][0]["gates"][0]["passed"]
    text = table(found)
    assert "engine not measured: an engine: a reason" in text and "not measured" in text


def test_what_stayed_unquantised_is_counted_by_reason(workshop: Workshop) -> None:
    text = table(report(workshop, Measurement(SCORES, GREEDY, ENGINE)))
    assert "kept: 2 tensors: the head gate stays in bf16" in text


def test_plain_turns_tuples_and_numbers_into_json() -> None:
    assert plain({"a": (1, math.inf, [math.nan, "x"]), "b": True}) == {"a": [1, None, [None, "x"]], "b": True}
