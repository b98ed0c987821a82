"""`convert explain` and `positioning:` by the command line, on a finished run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from convert.sections import Peer
from tests.runs import LENGTH, WINDOWS, invoke, project, settings
from validate.positioning import NAMES


def explain(finished: Path, *arguments: Any, target: str = "gptq") -> Any:
    folder = finished / "output" / target
    return invoke("explain", folder, "--reference", finished / "model", "--tokens", LENGTH * WINDOWS, *arguments)


@pytest.fixture(scope="module")
def found(finished: Path) -> dict[str, Any]:
    result = explain(finished, "--json", "--linears", 3)
    assert result.exit_code == 0, result.output
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def test_the_divergence_is_the_reports(finished: Path, found: dict[str, Any]) -> None:
    report = json.loads((finished / "output" / "report.json").read_text())
    assert found["kl"] == pytest.approx(report["targets"][0]["kl"], rel=1e-5)
    assert found["tokens"] == report["reference"]["tokens"]


def test_layers_are_restored_and_every_linear_has_its_part(finished: Path, found: dict[str, Any]) -> None:
    assert [layer["name"] for layer in found["layers"]] == ["model.layers.0", "model.layers.1"]
    ledger = json.loads((finished / "output" / "gptq" / "conversion.json").read_text())
    quantised = {linear["linear"] for row in ledger["tensors"] for linear in row["linears"]}
    assert {linear["name"] for linear in found["linears"]} == quantised
    parts = [linear["attributed"] for linear in found["linears"]]
    assert parts == sorted(parts, reverse=True)
    restored = [row["name"] for row in found["linears"] if row["restored"] is not None and row["name"] != "lm_head"]
    assert len(restored) == 3


def test_the_table_ends_with_a_target_for_the_yaml(finished: Path, found: dict[str, Any], tmp_path: Path) -> None:
    picture = tmp_path / "gptq.png"
    result = explain(finished, "--plot", picture, "--linears", 2)
    assert result.exit_code == 0, result.output
    assert found["linears"][0]["name"] in result.stdout and "attributed in all: " in result.stdout
    first = next(line for line in result.stdout.splitlines() if ": buys back " in line)
    assert first.endswith("more bits per weight")
    assert "most for each bit:\ntargets:\n  - name: gptq\n    format: gptq\n" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_same_explanation_gives_the_same_picture(found: dict[str, Any], tmp_path: Path) -> None:
    from validate.explain_picture import draw

    for name in ("a", "b"):
        draw(found, tmp_path / f"{name}.svg")
    first = (tmp_path / "a.svg").read_text()
    assert first == (tmp_path / "b.svg").read_text()
    assert "decoder layer" in first and "mlp.down_proj" in first
    # Rewritten layers have no parts.
    draw(
        {**found, "layers": [{**row, "attributed": None} for row in found["layers"]], "linears": []}, tmp_path / "c.svg"
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--plot", "x.jpg"), "--plot x.jpg: expected a name that ends with .png or .svg"),
        (("--text", "none.txt"), "none.txt"),
    ],
)
def test_mistakes_are_told(finished: Path, arguments: tuple[str, ...], message: str) -> None:
    result = explain(finished, *arguments)
    assert result.exit_code == 2 and message in result.output


def test_another_model_is_refused(finished: Path, tmp_path: Path) -> None:
    project(tmp_path / "other", config={"num_hidden_layers": 3})
    result = invoke("explain", finished / "output" / "gptq", "--reference", tmp_path / "other" / "model")
    assert result.exit_code == 2 and "num_hidden_layers: expected 2 as in the artifact, found 3" in result.output


# ---- positioning


def test_the_configurations_names_are_those_that_can_be_measured() -> None:
    assert get_args(Peer) == NAMES


def test_an_unknown_peer_is_told_with_the_nearest_name(tmp_path: Path) -> None:
    validation = settings()["validation"] | {"positioning": ["lama.cpp:q4_k_m"]}
    result = invoke("plan", project(tmp_path / "p", validation=validation))
    assert result.exit_code == 2
    assert "validation.positioning[0]: expected " in result.output
    assert "found 'lama.cpp:q4_k_m'; did you mean 'llama.cpp:Q4_K_M'?" in result.output


def test_peers_are_rows_of_the_report_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("libgguf")
    validation = settings()["validation"] | {"positioning": ["llama.cpp:Q4_0", "llama.cpp:Q8_0"], "engine": False}
    targets = [{"name": "tiny", "format": "tinygemm", "group_size": 32, "method": "rtn"}]
    yaml = project(tmp_path / "p", validation=validation, targets=targets, calibration=None)
    result = invoke("run", yaml)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "p" / "output" / "report.json").read_text())
    four, eight = report["positioning"]
    assert (four["name"], four["bits_per_weight"]) == ("llama.cpp:Q4_0", 4.5)
    assert four["perplexity_ratio"] > 0 and four["tokens"] == report["targets"][0]["tokens"]
    assert eight["kl"] < four["kl"]
    assert (
        "llama.cpp:Q4_0" in result.output
        and "llama.cpp:Q8_0" in (tmp_path / "p" / "output" / "report.html").read_text()
    )
    monkeypatch.setattr("convert.judge.position", lambda *_: pytest.fail("measured again"))
    assert invoke("run", yaml).exit_code == 0


def test_a_peer_that_is_not_installed_is_said_and_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from models.errors import EnvironmentProblem

    def absent(name: str) -> str:
        raise EnvironmentProblem("libgguf is not installed: pip install 'edge-convert[positioning]'")

    monkeypatch.setattr("convert.judge.version", absent)
    validation = settings()["validation"] | {"positioning": ["llama.cpp:Q4_0"], "engine": False}
    targets = [{"name": "tiny", "format": "tinygemm", "group_size": 32, "method": "rtn"}]
    result = invoke("run", project(tmp_path / "p", validation=validation, targets=targets, calibration=None))
    assert result.exit_code == 0, result.output
    assert (
        "llama.cpp:Q4_0: not measured: libgguf is not installed: pip install 'edge-convert[positioning]'"
        in result.output
    )
