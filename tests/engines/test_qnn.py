"""spark-tiny as a phone artifact, compiled by Qualcomm's HTP compiler and run in its simulator."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import onnx
import pytest
import torch

from export.phone.artifact import PhoneArtifact
from models.errors import BadInput
from tests.benchmarks.phone_operators import decibels, product, simulated
from tests.helpers import ROOT
from tests.runs import invoke, write_yaml
from validate.engines.run import Job, run_engine
from validate.engines.simulator import STEPS

SOURCE = ROOT / "examples" / "spark-tiny"
PREFILL = 32
TEXT = ("--text", ROOT / "examples" / "text" / "evaluation.txt", "--tokens", 128, "--sequence-length", 64)
PHONE = {"format": "phone", "context": 128, "prefill": PREFILL, "method": "rtn"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the example model; only so much text as tells right from wrong."""
    folder = tmp_path_factory.mktemp("qnn")
    texts = {
        name: {"path": "text", "data_files": str(ROOT / "examples" / "text" / f"{name}.txt")}
        for name in ("calibration", "evaluation")
    }
    content = {
        "model": {"source": str(SOURCE)},
        "calibration": {"dataset": texts["calibration"], "samples": 4, "sequence_length": 112},
        "targets": [
            PHONE,
            {**PHONE, "name": "float", "embedding": "float"},
            {**PHONE, "name": "split", "embedding": "float", "split": {"parts": 3}},
        ],
        "validation": {
            "dataset": texts["evaluation"],
            "sequence_length": 64,
            "tokens": 128,
            "greedy": {"prompts": 1, "prompt_tokens": 8, "tokens": 4},
        },
        "output": "output",
        "work": "work",
    }
    result = invoke("run", write_yaml(folder, content))
    assert result.exit_code == 0, result.output
    return folder


def test_every_operator_compiles_and_the_simulator_keeps_what_the_cpu_keeps(
    project: Path, engines_python: Path
) -> None:
    options = (*TEXT, "--engine", "qnn", "--engine-python", engines_python, "--json")
    result = invoke("validate", project / "output" / "phone", "--reference", SOURCE, *options)
    assert result.exit_code == 0, result.output
    (entry,) = json.loads(result.stdout)["targets"]
    (ran,) = entry["engines"]
    assert set(ran["kernels"]) == {"prefill", "decode"}
    assert all(kernel.startswith("HTP v75, all ") for kernel in ran["kernels"].values())
    assert ran["tokens"] == PREFILL + STEPS - 1
    assert ran["snr_db"] > ran["cpu_snr_db"] - 1 and ran["cpu_snr_db"] > 25
    assert ran["top1"] is None or ran["top1"] == 1


def test_a_product_of_unsigned_activations_loses_8_bits_and_of_signed_ones_none(engines_python: Path) -> None:
    """Why the sides of such products are signed in our graphs (`export.phone.products`)."""
    kept = []
    for left, right, converted in (("uint16", "uint16", False), ("uint16", "uint16", True), ("int16", "int16", False)):
        model, feeds, exact = product(left, right, converted)
        found = simulated(str(engines_python), model, feeds)["product"]
        kept.append(decibels(exact - 32768.0, found - 32768.0))
    assert kept[0] < 45 and min(kept[1:]) > 80


def test_an_operator_that_would_fall_back_is_named(project: Path, engines_python: Path, tmp_path: Path) -> None:
    folder = tmp_path / "phone"
    shutil.copytree(project / "output" / "phone", folder)
    model = onnx.load(folder / "decode.onnx", load_external_data=False)
    last = next(node for node in model.graph.node if "logits" in node.output)
    last.output[0] = "before"
    model.graph.node.append(onnx.helper.make_node("Sinh", ["before"], ["logits"], "odd"))
    (folder / "decode.onnx").write_bytes(model.SerializeToString())
    artifact = PhoneArtifact(folder)
    # Our own check would tell before the engine does.
    artifact.check = lambda: None  # type: ignore[method-assign]
    window = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(BadInput, match=r"decode.onnx: HTP does not run 1 x Sinh"):
        run_engine("qnn", engines_python, Job(artifact, window, window[:, :0], 0, steps=STEPS))


def test_a_float_table_is_refused_beside_layers_and_runs_on_the_cpu_alone(project: Path, engines_python: Path) -> None:
    options = (*TEXT, "--engine", "qnn", "--engine-python", engines_python, "--json")
    entries = {}
    for name in ("float", "split"):
        result = invoke("validate", project / "output" / name, "--reference", SOURCE, *options)
        ((entries[name],),) = (target["engines"] for target in json.loads(result.stdout)["targets"])
    assert "prefill.onnx: HTP does not compile a Gather from a float table" in entries["float"]["failed"]
    assert entries["split"]["kernels"]["decode-0"] == "CPU: the embedding table"
    assert entries["split"]["kernels"]["decode-1"].startswith("HTP v75, all ")
    assert entries["split"]["snr_db"] > 25
