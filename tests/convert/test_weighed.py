"""`method: [fisher, gptq]` from the pipeline's file to artifacts, and its stage in the work folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from calibrate.fisher import Fisher
from convert.config import load
from convert.estimate import estimate
from convert.prepare import prepare
from convert.store import STAGE_VERSIONS
from export.artifact import Artifact
from tests.runs import content, invoke, project


def targets() -> list[dict[str, Any]]:
    """Two that share the source's Fisher information, one of another model's, and one without."""
    small = {"group_size": 32, "lm_head": "keep"}
    return [
        {"name": "weighed", "format": "gptq", "method": ["fisher", "gptq"], **small},
        {"name": "float", "format": "tinygemm", "method": ["fisher", "gptq", "refine"], **small},
        {"name": "rotated", "format": "gptq", "method": ["rotate", "fisher", "gptq"], **small},
        {"name": "plain", "format": "gptq", "method": ["gptq"], **small},
    ]


def test_targets_that_quantise_the_same_weights_share_one_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = project(tmp_path / "p", config={"num_hidden_layers": 1}, targets=targets())
    promised = estimate(prepare(load(file)))
    result = invoke("run", file)
    assert result.exit_code == 0, result.output
    work = file.parent / "work"
    stages = sorted(work.glob("fisher-*"))
    assert len(stages) == 2
    kinds = {json.loads((stage / "key.json").read_text())["rewrites"] == ["rotate"] for stage in stages}
    assert kinds == {True, False}
    used = sum(f.stat().st_size for stage in (*stages, *work.glob("calibrate-*")) for f in stage.glob("*.safetensors"))
    assert used < promised.work_bytes
    weighed, plain = (Artifact(file.parent / "output" / name) for name in ("weighed", "plain"))
    differ = [not torch.equal(weighed.quantized(m).codes, plain.quantized(m).codes) for m in plain.modules]
    assert len(differ) >= 7 and all(differ)
    assert weighed.bits_per_weight == plain.bits_per_weight
    rows = [linear for row in weighed.ledger.tensors for linear in row.linears]
    assert rows and all(tuple(row.method) == ("fisher", "gptq") for row in rows)
    # Kept by a cleaning, not measured again, and the same bytes once more from it.
    assert "0 unused stages" in invoke("clean", file).output
    written = content(file.parent / "output" / "float")
    before = {f: f.stat().st_mtime_ns for stage in stages for f in stage.glob("*.safetensors")}
    for folder in (file.parent / "output" / "float", *work.glob("calibrate-*")):
        for entry in folder.iterdir():
            entry.unlink()
        folder.rmdir()
    assert invoke("run", file).exit_code == 0
    assert content(file.parent / "output" / "float") == written
    assert {f: f.stat().st_mtime_ns for f in before} == before
    (layer,) = (Fisher(stage).load(0) for stage in stages[:1])
    assert all(float(sizes.min()) >= 0 and float(sizes.max()) > 0 for sizes in layer.tokens.values())
    # Another way to measure makes other codes: none of those that rest on it are taken from the work folder.
    monkeypatch.setitem(STAGE_VERSIONS, "fisher", STAGE_VERSIONS["fisher"] + 1)
    said = invoke("clean", file).output
    assert "3 unused stages" in said and said.count("fisher-") == 2 and said.count("calibrate-") == 1
