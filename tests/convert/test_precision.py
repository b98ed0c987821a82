"""`bits_per_weight`: linears chosen from measured sensitivity, in the plan, the artifact and the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from export.artifact import Artifact, Expansion
from models.checkpoint import Folder
from tests.runs import invoke, project, settings, write_yaml

TARGET: dict[str, Any] = {"format": "tinygemm", "group_size": 32, "method": ["awq", "rtn"], "bits_per_weight": 7.5}


def test_a_budget_is_spent_on_the_most_sensitive_linears(tmp_path: Path) -> None:
    plain = {**{k: v for k, v in TARGET.items() if k != "bits_per_weight"}, "name": "plain"}
    file = project(tmp_path / "p", targets=[TARGET, plain])
    planned = invoke("plan", file)
    assert "bits_per_weight: at most 7.5: linears whose rounding costs most" in planned.output.replace("\n", " ")
    result = invoke("run", file)
    assert result.exit_code == 0, result.output
    artifact = Artifact(file.parent / "output" / "tinygemm")
    artifact.check()
    rows = artifact.ledger.precision
    kept = [name for row in rows if row["kept"] for name in row["linears"]]
    assert kept and len(kept) < 14
    assert 5.0 + sum(row["extra_bits"] for row in rows if row["kept"]) <= 7.5
    mean = 5.0 + sum(row["extra_bits"] for row in rows if row["kept"])
    assert artifact.bits_per_weight == pytest.approx(mean) == artifact.ledger.target["bits_per_weight"]
    assert artifact.ledger.validation and artifact.ledger.validation["report"]["bits_per_weight"] == pytest.approx(mean)
    (note,) = (note for note in artifact.ledger.notes if "linears stay in bfloat16" in note)
    assert note.startswith(f"bits_per_weight: {len(kept)} of 14 linears stay in bfloat16, ") and note in result.output
    source, expansion = Folder(file.parent / "model"), Expansion(artifact)
    outcomes = {row.tensor: row for row in artifact.ledger.tensors}
    for name in kept:
        row = outcomes[f"{name}.weight"]
        assert row.outcome == "kept" and "skip: " in row.reason
        # Up to a rescaling of channels that `awq` chose.
        if "awq" not in row.reason:
            assert torch.equal(expansion.read(f"{name}.weight"), source.read(f"{name}.weight"))
    losses = {
        row.ledger.target["name"]: row.ledger.validation for row in (artifact, Artifact(file.parent / "output/plain"))
    }
    assert losses["tinygemm"]["report"]["kl"] < losses["plain"]["report"]["kl"]  # type: ignore[index]
    assert "tinygemm: up to date" in invoke("run", file).output
    assert invoke("clean", file).output.startswith("0 unused stages")


@pytest.mark.parametrize(
    ("family", "target", "problem"),
    [
        ("llama", {"bits_per_weight": 4.9}, "bits_per_weight: expected more than the 5 without it, found 4.9"),
        ("llama", {"bits_per_weight": 6, "skip": ["*down_proj"]}, "expected more than the 7.444 without it, found 6"),
        ("llama", {"bits_per_weight": 3}, "targets[0].bits_per_weight: expected more than 4, found 3"),
        (
            "spark2_5",
            {"format": "gptq", "bits_per_weight": 5},
            "this format cannot keep single linears of this family: model.layers.0.mlp.down_proj: kept in bf16",
        ),
    ],
)
def test_a_budget_that_cannot_be_spent_is_refused_before_any_work(
    tmp_path: Path, family: str, target: dict[str, Any], problem: str
) -> None:
    file = project(tmp_path / "p", family, targets=[{**TARGET, **target}])
    result = invoke("plan", file)
    assert result.exit_code == 2 and problem in result.output.replace("\n", " ")


def test_a_budget_without_calibration_text_is_refused(tmp_path: Path) -> None:
    content = settings(targets=[{**TARGET, "method": "rtn"}])
    file = project(tmp_path / "p")
    write_yaml(file.parent, {k: v for k, v in content.items() if k != "calibration"})
    result = invoke("run", file)
    assert result.exit_code == 2 and "bits_per_weight measures on calibration text" in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("family", "options", "share"),
    [
        # Of a layer's weights: query, key, value and output projection of 128 channels; the MLP's are 3 times 256.
        ("llama", {"lm_head": "keep", "skip": ["self_attn.*"]}, 49_152 / 147_456),
        ("phi3", {"lm_head": "keep", "skip": ["self_attn.*"]}, 49_152 / 147_456),
        # The tied head's 512 rows of 128 beside two layers. A head that is kept as a head does not count.
        ("llama", {"lm_head": "quantize", "skip": ["lm_head"]}, 65_536 / (65_536 + 2 * 147_456)),
        ("llama", {"lm_head": "keep", "skip": []}, 0),
    ],
)
def test_skipped_linears_count_with_their_own_bits(
    tmp_path: Path, family: str, options: dict[str, Any], share: float
) -> None:
    target = {"name": "skips", "format": "tinygemm", "group_size": 32, "method": "rtn", **options}
    file = project(tmp_path / "p", family, targets=[target])
    result = invoke("run", file)
    assert result.exit_code == 0, result.output
    artifact = Artifact(file.parent / "output" / "skips")
    assert artifact.bits_per_weight == pytest.approx(5 + (16 - 5) * share)
    assert artifact.ledger.target["bits_per_weight"] == pytest.approx(artifact.bits_per_weight)


def test_a_head_that_a_budget_keeps_counts_too(tmp_path: Path) -> None:
    target = {**TARGET, "lm_head": "quantize", "method": "rtn", "bits_per_weight": 15.5}
    file = project(tmp_path / "p", targets=[target])
    result = invoke("run", file)
    assert result.exit_code == 0, result.output
    artifact = Artifact(file.parent / "output" / "tinygemm")
    kept = {name: row["extra_bits"] for row in artifact.ledger.precision if row["kept"] for name in row["linears"]}
    assert "lm_head" in kept
    mean = 5.0 + sum(row["extra_bits"] for row in artifact.ledger.precision if row["kept"])
    assert artifact.bits_per_weight == pytest.approx(mean) == artifact.ledger.target["bits_per_weight"]
