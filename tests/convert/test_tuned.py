"""`method: [..., tune]` from the pipeline's file to the artifact, its ledger and its bytes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from calibrate.quantize import quantize
from calibrate.tune import Training, Tuned, tune
from convert import run as runs
from convert.config import load
from convert.estimate import estimate
from convert.prepare import prepare
from export.artifact import Artifact, Expansion
from models.checkpoint import Folder
from tests.runs import invoke, project, settings, write_yaml


def targets(*methods: str, **changes: object) -> list[dict[str, object]]:
    return [{"name": "-".join(methods), "format": "gptq", "group_size": 64, "method": list(methods), **changes}]


def test_a_tuned_target_is_written_measured_and_accounted_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps of a few windows: three rounds of the usual ones are three steps on so short a text.
    monkeypatch.setattr(runs, "tune", partial(tune, training=Training(tokens=64, every=14)))
    changes = {"targets": [*targets("rtn"), *targets("rtn", "tune")]}
    calibration = {**settings()["calibration"], "samples": 64}
    file = project(tmp_path / "p", "qwen2", calibration=calibration, **changes)
    result = invoke("run", file)
    assert result.exit_code == 0, result.output
    output = file.parent / "output"
    artifact = Artifact(output / "rtn-tune")
    artifact.check()
    (note,) = (note for note in artifact.ledger.notes if note.startswith("tune: "))
    assert "mean KL divergence on 8 held-out calibration windows from " in note
    source, expansion, plain = Folder(file.parent / "model"), Expansion(artifact), Artifact(output / "rtn")
    tensors = {row.tensor for row in artifact.ledger.tensors if "tuned" in row.reason}
    assert "model.norm.weight" in tensors and "model.layers.0.self_attn.q_proj.bias" in tensors
    for name in tensors:
        assert not torch.equal(expansion.read(name), source.read(name))
    for module in artifact.modules:
        a, b = artifact.quantized(module), plain.quantized(module)
        assert torch.equal(a.codes, b.codes) and not torch.equal(a.scales, b.scales)
    assert artifact.bits_per_weight == plain.bits_per_weight
    rows = [linear for row in artifact.ledger.tensors for linear in row.linears]
    assert rows and all(tuple(row.method) == ("rtn", "tune") for row in rows)
    second = invoke("run", file)
    assert "rtn-tune: up to date" in second.output


def test_tuning_without_calibration_text_is_refused_before_any_work(tmp_path: Path) -> None:
    file = project(tmp_path / "p", targets=targets("search", "tune"))
    content = settings(targets=targets("search", "tune"))
    one = {**content["calibration"], "samples": 1}
    for calibration in (None, one):
        write_yaml(file.parent, {k: v for k, v in {**content, "calibration": calibration}.items() if v is not None})
        result = invoke("run", file)
        assert result.exit_code == 2
        assert "targets: method tune trains on some calibration windows" in result.output.replace("\n", " ")
    assert not (file.parent / "work").exists()


def test_the_plan_counts_what_tuning_keeps(tmp_path: Path) -> None:
    file = project(tmp_path / "p", targets=[*targets("rtn"), *targets("rtn", "tune")])
    plain, tuned = estimate(prepare(load(file))).targets
    assert tuned.work_bytes > 2 * plain.work_bytes and tuned.file_bytes == plain.file_bytes
    invoke("run", file, "--only", "rtn-tune")
    (stage,) = (file.parent / "work").glob("calibrate-*")
    assert json.loads((stage / "tuned" / "note.json").read_text()).startswith("tune: ")
    assert sum(path.stat().st_size for path in stage.rglob("*.safetensors")) < tuned.work_bytes + 200_000


def test_no_method_sees_the_windows_that_training_is_judged_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, judged = [], []

    def watched_quantize(*arguments: Any) -> None:
        shown.append(arguments[3])
        quantize(*arguments)

    def watched_tune(*arguments: Any) -> Tuned:
        judged.append(arguments[4])
        return tune(*arguments, training=Training(tokens=64, every=14))

    monkeypatch.setattr(runs, "quantize", watched_quantize)
    monkeypatch.setattr(runs, "tune", watched_tune)
    file = project(tmp_path / "p", targets=[*targets("gptq"), *targets("gptq", "tune")])
    assert invoke("run", file).exit_code == 0
    (windows,) = judged
    _, held = Training().split(len(windows))
    everything, without = shown
    assert torch.equal(everything, windows)
    assert torch.equal(without, windows[[index for index in range(len(windows)) if index not in held]])
