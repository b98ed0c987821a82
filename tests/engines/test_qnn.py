"""spark-tiny as a phone artifact, compiled by Qualcomm's HTP compiler and run in its simulator."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import torch

from export.ledger import Ledger
from export.phone.artifact import PhoneArtifact
from models.errors import BadInput
from models.files import sha256
from tests.helpers import ROOT
from tests.runs import invoke, write_yaml
from validate.engines.run import Job, run_engine
from validate.engines.simulator import STEPS

SOURCE = ROOT / "examples" / "spark-tiny"
PREFILL = 32


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
        "targets": [{"format": "phone", "context": 128, "prefill": PREFILL, "method": "rtn"}],
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
    options = ("--engine", "qnn", "--engine-python", engines_python, "--json")
    result = invoke("validate", project / "output" / "phone", "--reference", SOURCE, *options)
    assert result.exit_code == 0, result.output
    (entry,) = json.loads(result.stdout)["targets"]
    (ran,) = entry["engines"]
    assert set(ran["kernels"]) == {"prefill", "decode"}
    assert all(kernel.startswith("HTP v75, all ") for kernel in ran["kernels"].values())
    assert ran["tokens"] == PREFILL + STEPS - 1
    assert ran["snr_db"] > ran["cpu_snr_db"] - 1 and ran["cpu_snr_db"] > 25
    assert ran["top1"] is None or ran["top1"] == 1


def test_an_operator_that_would_fall_back_is_named(project: Path, engines_python: Path, tmp_path: Path) -> None:
    folder = tmp_path / "phone"
    folder.mkdir()
    for path in (project / "output" / "phone").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    model = onnx.load(folder / "decode.onnx", load_external_data=False)
    # No NPU takes a string of operators in fp64.
    last = model.graph.node[-1]
    inner = f"{last.output[0]}_before"
    node = onnx.helper.make_node("Cast", [inner], ["wide"], "wide", to=onnx.TensorProto.DOUBLE)
    back = onnx.helper.make_node("Cast", ["wide"], [last.output[0]], "narrow", to=onnx.TensorProto.FLOAT)
    last.output[0] = inner
    model.graph.node.extend([node, back])
    (folder / "decode.onnx").write_bytes(model.SerializeToString())
    ledger = Ledger.read(folder)
    ledger.files["decode.onnx"] = sha256(folder / "decode.onnx")
    ledger.write(folder)
    artifact = PhoneArtifact(folder)
    # Our own check tells first.
    with pytest.raises(BadInput, match="2 x Cast: not an operator"):
        artifact.check()
    artifact.check = lambda: None  # type: ignore[method-assign]
    window = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(BadInput, match="decode.onnx: HTP does not run .*Cast"):
        run_engine("qnn", engines_python, Job(artifact, window, window[:, :0], 0, steps=STEPS))
