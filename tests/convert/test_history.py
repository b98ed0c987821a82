"""`convert history`: lists, compares and draws what runs have found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.runs import invoke
from tests.validate.test_history import entry
from validate.entry import FIGURES, MORE_FIGURES, Entry
from validate.history import History

NUMBERS = {name: 1.0 for name in (*FIGURES, *MORE_FIGURES)}


def night(run: str, shift: float, target: str = "gptq", **changes: Any) -> Entry:
    figures = {**NUMBERS, "perplexity_ratio": 1.01 + shift, "perplexity_ratio_se": 0.002, "kl": 0.1 + shift}
    nll = tuple(2 + 0.1 * index + shift + 0.001 * (-1) ** index for index in range(8))
    return entry(run, target, figures=figures, nll=nll, **changes)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("history") / "history.sqlite"
    history = History(path)
    history.append([night("2026-01-01-aaaa", 0.0, model_sha256="0" * 64)])
    history.append([night("2026-01-02-bbbb", 0.0), night("2026-01-02-bbbb", 0.0, "awq")])
    later = {"torch": "2.14.0", "numpy": "2.4"}
    history.append([night("2026-01-03-cccc", 0.01, versions=later, artifact_sha256="b" * 64, passed=False)])
    return path


def say(*arguments: Any, code: int = 0) -> str:
    result = invoke("history", *arguments)
    assert result.exit_code == code, result.output
    return result.output


def test_the_list_shows_every_run_and_where_another_model_begins(file: Path) -> None:
    text = say(file)
    assert text.count("model 000000000000") == 1 and text.count("model mmmmmmmmmmmm") == 1
    for run in ("2026-01-01-aaaa", "2026-01-02-bbbb", "2026-01-03-cccc"):
        assert run in text
    assert "1.0200 ± 0.0020" in text and text.count("failed") == 1
    rows = json.loads(say(file, "--json"))
    assert [(row["run"][-4:], row["target"], row["passed"]) for row in rows] == [
        ("aaaa", "gptq", True),
        ("bbbb", "gptq", True),
        ("bbbb", "awq", True),
        ("cccc", "gptq", False),
    ]
    assert [row["target"] for row in json.loads(say(file, "--json", "--target", "awq"))] == ["awq"]
    assert "no runs of target akw; did you mean 'awq'?" in say(file, "--target", "akw", code=2)


def test_two_runs_are_compared_with_their_noise_and_everything_that_changed(file: Path) -> None:
    text = say(file, "--compare", "2026-01-02", "2026-01-03-cccc")
    assert "from 2026-01-02-bbbb to 2026-01-03-cccc:" in text
    assert "gptq: perplexity 1.005% ± 0.000% above that of 2026-01-02-bbbb, beyond the noise" in text
    assert "kl: 0.1000 -> 0.1100" in text and "the artifact's bytes are others" in text
    assert "torch: 2.13.0 -> 2.14.0" in text and "numpy: None -> 2.4" in text
    found = json.loads(say(file, "--compare", "2026-01-02", "2026-01-03", "--json"))
    assert list(found["targets"]) == ["gptq"]
    assert found["targets"]["gptq"]["perplexity"]["increase"] == pytest.approx(0.01005, rel=1e-3)
    same = say(file, "--compare", "2026-01-02", "2026-01-02")
    assert "awq: perplexity equal to that of" in same and "bytes are the same" in same


@pytest.mark.parametrize(
    "ids, wanted",
    [
        (("2026-01-01", "2026-01-02"), "is not compared with 2026-01-02-bbbb: it is of another model (000000000000"),
        (("2026-01", "2026-01-02"), "2026-01: several runs begin so: 2026-01-01-aaaa, 2026-01-02-bbbb"),
        (("2026-01-02-bbcb", "2026-01-02"), "no such run; did you mean '2026-01-02-bbbb'?"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused_with_the_reason(
    file: Path, ids: tuple[str, str], wanted: str
) -> None:
    assert wanted in say(file, "--compare", *ids, code=2)


def test_the_trend_is_drawn_as_a_picture(file: Path, tmp_path: Path) -> None:
    say(file, "--plot", tmp_path / "trend.png")
    with Image.open(tmp_path / "trend.png") as picture:
        picture.verify()
        assert picture.width > 800 and picture.format == "PNG"
    assert "expected a name that ends with .png" in say(file, "--plot", tmp_path / "trend.gif", code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["trend.png"]


def test_a_history_that_is_not_there_yet_is_told(tmp_path: Path, finished: Path) -> None:
    assert "no history there yet; `convert run` begins it" in say(tmp_path / "none", code=2)
    assert "cannot be read" in say(tmp_path / "none.yaml", code=2)
    assert "tiny" in say(finished / "pipeline.yaml")


def test_a_run_that_failed_may_be_accepted_once_and_for_all(file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "history.sqlite"
    copy.write_bytes(file.read_bytes())
    assert "2026-01-03-cccc: later runs may be compared with it" in say(copy, "--accept", "2026-01-03")
    assert "failed, accepted" in say(copy)
    assert replace(History(copy).entries()[-1], accepted=False) == History(file).entries()[-1]
