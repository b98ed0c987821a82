"""`fold`, `rotate` and `awq` from the pipeline's file to artifacts that load as the family's ordinary class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from calibrate.grid import Grid
from calibrate.rewrites import rewritten
from calibrate.search import round_to_nearest
from export.artifact import Artifact, Expansion
from models.checkpoint import Folder
from models.opened import open_model
from tests.helpers import tokens
from tests.runs import invoke, project, settings, write_yaml
from tests.workshop import FORMATS

METHODS = (["rotate", "rtn"], ["fold", "rtn"], ["awq", "rtn"], ["rotate", "awq", "fisher", "gptq", "refine"])
# (family, configuration, whether the source's head shares the embedding)
FAMILIES: dict[str, tuple[dict[str, Any], bool]] = {
    "llama": ({}, True),
    "phi3": ({}, False),
    "spark2_5": ({"num_hidden_layers": 2}, True),
}


def targets(heads: str) -> list[dict[str, Any]]:
    """Every method in a format of its own, the first in all of them."""
    first = [{"name": f"rotate-{format}", "format": format, "method": METHODS[0]} for format in FORMATS]
    others = [
        {"name": method[0] + str(len(method)), "format": format, "method": method}
        for method, format in zip(METHODS[1:], ("tinygemm", "gptq", "awq"), strict=True)
    ]
    return [{**target, "group_size": 32, "lm_head": heads} for target in (*first, *others)]


@pytest.fixture(scope="module", params=FAMILIES)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    family = request.param
    heads = "quantize" if family == "spark2_5" else "keep"
    folder = tmp_path_factory.mktemp(family) / "p"
    file = project(folder, family, config=FAMILIES[family][0], targets=targets(heads), validation=None)
    result = invoke("run", file)
    assert result.exit_code == 0, result.output
    return file, family


@pytest.mark.parametrize("format", FORMATS)
def test_an_artifact_is_the_rotated_model_quantised(finished: tuple[Path, str], format: str) -> None:
    file, family = finished
    model = open_model(Folder(file.parent / "model"))
    view = rewritten(model, ["rotate"], torch.bfloat16, values=True).checkpoint
    artifact = Artifact(file.parent / "output" / f"rotate-{format}")
    artifact.check()
    expansion = Expansion(artifact)
    assert set(expansion.tensors) == set(view.tensors)
    quantized = {f"{linear.module}.weight": linear for linear in model.linears}
    for name in view.tensors:
        expected = view.read(name)
        if name in quantized and (name != "lm_head.weight" or family == "spark2_5"):
            grid = Grid(32, FORMATS[format])  # type: ignore[arg-type]
            expected = round_to_nearest(expected, grid).dequantize()
        assert torch.equal(expansion.read(name), expected), name
    assert torch.equal(expansion.read("model.norm.weight"), torch.ones(128, dtype=torch.bfloat16))


def test_the_untied_head_and_the_rewrites_stand_in_the_ledger(finished: tuple[Path, str]) -> None:
    file, family = finished
    tied = FAMILIES[family][1]
    ledger = Artifact(file.parent / "output" / "rotate-awq").ledger
    plan = json.loads(invoke("plan", file, "--json").stdout)
    planned = next(target for target in plan["targets"] if target["name"] == "rotate-awq")
    for notes in (ledger.notes, planned["notes"]):
        said = [note for note in notes if note.startswith("the head, which shares the embedding's tensor")]
        assert len(said) == tied
        if tied:
            assert said[0].endswith("has a tensor of its own") == (family == "spark2_5")
            assert ("131,072 bytes more" in said[0]) == (family != "spark2_5")
    rows = {row.tensor: row for row in ledger.tensors}
    assert rows["lm_head.weight"].outcome == ("quantized" if family == "spark2_5" else "kept")
    assert "rotate residual" in rows["lm_head.weight"].reason
    norm = next(name for name in rows if name.endswith("layers.0.input_layernorm.weight"))
    assert rows[norm].reason == "not a linear that is quantised; rotate residual"
    # The bytes that the plan promised are those on disk, an untied head's among them.
    files = sum(path.stat().st_size for path in (file.parent / "output" / "rotate-awq").glob("*.safetensors"))
    assert files == pytest.approx(planned["quantized_bytes"] + planned["kept_bytes"], abs=20_000)


def test_expanded_weights_load_as_the_ordinary_class(finished: tuple[Path, str], tmp_path: Path) -> None:
    file, family = finished
    source = AutoModelForCausalLM.from_pretrained(file.parent / "model", dtype=torch.float32)
    ids = tokens(2, 24)
    for name in ("rotate-gptq", "fold2", "awq2", "rotate5"):
        result = invoke("expand", file.parent / "output" / name, tmp_path / name)
        assert result.exit_code == 0, result.output
        model, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / name, dtype=torch.float32, output_loading_info=True
        )
        assert type(model) is type(source) and not any(info.values())
        with torch.no_grad():
            ours, theirs = model(ids, use_cache=False).logits, source(ids, use_cache=False).logits
        # Random weights in 4 bits, calibrated on little text; a wrong rewrite would leave nothing of the function.
        assert float((ours - theirs).norm() / theirs.norm()) < 0.6, name


def test_links_that_were_scaled_stand_in_the_ledger(finished: tuple[Path, str]) -> None:
    file, _ = finished
    ledger = Artifact(file.parent / "output" / "awq2").ledger
    taken = [link for link in ledger.links if link["accepted"]]
    assert taken and all(link["after"] < link["before"] for link in taken)
    assert f"awq: channels of {len(taken)} of {len(ledger.links)} links rescaled" in " ".join(ledger.notes)
    rows = {row.tensor: row.reason for row in ledger.tensors}
    for link in taken:
        if link["writer"].endswith("layernorm"):
            assert "awq: divided by its readers' factors" in rows[f"{link['writer']}.weight"]
    assert "up to date" in invoke("run", file).output


def test_awq_without_calibration_text_is_refused_before_any_work(tmp_path: Path) -> None:
    file = project(tmp_path / "p", targets=[{"format": "gptq", "group_size": 32, "method": ["awq", "rtn"]}])
    content = settings(targets=[{"format": "gptq", "group_size": 32, "method": ["awq", "rtn"]}])
    write_yaml(file.parent, {k: v for k, v in content.items() if k != "calibration"})
    result = invoke("run", file)
    assert result.exit_code == 2
    assert "targets: method awq measures on calibration text: it needs a `calibration`" in result.output.replace(
        "\n", " "
    )
