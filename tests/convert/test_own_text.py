"""`calibration: generated` from the pipeline's file to artifacts, and its stage in the work folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from calibrate.text import digest_of
from convert.card import Origin, model_card
from convert.config import load
from convert.estimate import estimate
from convert.prepare import prepare
from export.opened import open_artifact
from tests.runs import LENGTH, invoke, project, settings, write_yaml

SMALL = {"group_size": 32, "lm_head": "keep"}
TARGETS: list[dict[str, Any]] = [
    {"name": "weighed", "format": "gptq", "method": ["fisher", "gptq"], **SMALL},
    {"name": "budget", "format": "tinygemm", "method": "search", "bits_per_weight": 9.5, **SMALL},
    {"name": "rtn", "format": "gptq", "method": "rtn", **SMALL},
]


def with_own(count: int) -> dict[str, Any]:
    return {**settings()["calibration"], "generated": count}


def test_the_models_own_text_is_written_once_and_stands_in_the_ledger(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 1}
    file = project(tmp_path / "p", config=config, targets=TARGETS, calibration=with_own(3))
    promised = estimate(prepare(load(file)))
    result = invoke("run", file)
    assert result.exit_code == 0, result.output
    (stage,) = (file.parent / "work").glob("generated-*")
    own = torch.cat([load_file(batch)["ids"] for batch in sorted(stage.glob("*.safetensors"))])
    assert own.shape == (3, LENGTH)
    (fisher,) = (file.parent / "work").glob("fisher-*")
    assert json.loads((fisher / "key.json").read_text())["generated"]["count"] == 3
    # Every window counts, the text's four and the model's three.
    measured = load_file(fisher / "layer-00000.safetensors")
    assert {len(value) for name, value in measured.items() if name.startswith("tokens:")} == {7 * LENGTH}
    used = sum(f.stat().st_size for f in (file.parent / "work").glob("*/*.safetensors"))
    assert used < promised.work_bytes
    weighed, budget, rtn = (open_artifact(file.parent / "output" / target["name"]) for target in TARGETS)
    for artifact in (weighed, budget):
        record = artifact.ledger.calibration
        assert record is not None and (record["samples"], record["generated"]) == (4, 3)
        assert record["generated_sha256"] == digest_of(own)
    assert rtn.ledger.calibration is None
    card = model_card(weighed, "someone/tiny", Origin(license="mit")).text
    assert "4 windows of 32 of text.txt, and 3 that the source wrote itself" in card
    # A second run, a cleaning and a validation find all as it was.
    assert invoke("run", file).output.count("up to date") == 3
    assert "0 unused stages" in invoke("clean", file).output
    again = invoke("validate", file)
    assert again.exit_code == 0 and "has changed since" not in again.output
    # Without it other codes are chosen, and a cleaning drops what rested on it.
    write_yaml(file.parent, settings(targets=TARGETS, calibration=with_own(0)))
    assert "has changed since" in invoke("validate", file).output
    before = weighed.quantized(weighed.modules[0]).codes
    assert invoke("run", file).exit_code == 0
    other = open_artifact(file.parent / "output" / "weighed")
    assert not torch.equal(other.quantized(other.modules[0]).codes, before)
    assert "generated-" in invoke("clean", file).output


def test_methods_that_look_at_no_text_have_none_written(tmp_path: Path) -> None:
    file = project(tmp_path / "p", config={"num_hidden_layers": 1}, targets=TARGETS[2:], calibration=with_own(3))
    assert invoke("run", file).exit_code == 0
    assert not list((file.parent / "work").glob("generated-*"))
