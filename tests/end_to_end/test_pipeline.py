"""The whole product on each family: one yaml with all three formats, from a checkpoint to a report that holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from export.artifact import Artifact
from models.checkpoint import Folder
from tests.helpers import CONFIGS, MODEL_TYPES
from tests.runs import (
    LENGTH,
    PROMPTS,
    TARGETS,
    VOLATILE,
    WINDOWS,
    content,
    convert,
    invoke,
    project,
    same_report,
    settings,
    write_yaml,
)
from tests.workshop import FUSED

GATES = {
    "max_perplexity_increase": 5.0,
    "max_kl": 4.0,
    "min_top1": 0.05,
    "min_greedy_identical": 0,
    "max_engine_gap": 0.2,
    "min_snr_db": 0.0,
    "max_bits_per_weight": 5.0,
}
TARGET_KEYS = {
    "name",
    "format",
    "bits_per_weight",
    "file_bytes",
    "perplexity",
    "perplexity_se",
    "perplexity_ratio",
    "perplexity_ratio_se",
    "kl",
    "top1",
    "top5_overlap",
    "snr_db",
    "max_logit_difference",
    "tokens",
    "windows",
    "greedy",
    "engine",
    "gates",
    "notes",
    "kept",
    "artifact_sha256",
    "passed",
}
REFERENCE_KEYS = {
    "source",
    "dtype",
    "perplexity",
    "perplexity_se",
    "windows",
    "sequence_length",
    "tokens",
    "text_sha256",
    "bos",
    "windows_sha256",
    "model_sha256",
    "files",
}
DIVERGENCE_KEYS = {
    *("prompt", "step", "reference_token", "token", "margin", "kind", "because", "resolution"),
    *("margin_fp32", "artifact_margin_fp32", "noise", "reference_text", "text"),
}
ENGINE_KEYS = {"name", "perplexity", "perplexity_ratio", "perplexity_ratio_se", "kl", "tokens", "gap", "gap_se"}
ENGINE_KEYS |= {"ratio_on_all", "ratio_on_all_se"}


@pytest.fixture(scope="module", params=MODEL_TYPES)
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A family, and the folder of a finished run on it."""
    folder = tmp_path_factory.mktemp(request.param) / "p"
    validation = settings()["validation"] | {"gates": GATES}
    yaml = project(folder, request.param, config={"num_hidden_layers": 2}, validation=validation)
    result = invoke("run", yaml)
    assert result.exit_code == 0, result.output
    return request.param, folder


def report(folder: Path) -> Any:
    text = (folder / "output" / "report.json").read_text()
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))


def test_the_report_has_schema_2_with_every_key(done: tuple[str, Path]) -> None:
    found = report(done[1])
    keys = {"schema", "run", "reference", "targets", "warnings", "nll", "continuations", "history", "versions"}
    assert found.keys() == keys | {"seconds", "positioning"}
    assert found["schema"] == 2 and found["reference"].keys() == REFERENCE_KEYS
    assert found["reference"]["tokens"] == WINDOWS * (LENGTH - 1)
    assert [target["name"] for target in found["targets"]] == [target["name"] for target in TARGETS]
    for target in found["targets"]:
        assert target.keys() >= TARGET_KEYS
        assert target["engine"].keys() == ENGINE_KEYS
        assert target["greedy"].keys() == {"identical", "of", "tokens", "divergences"}
        assert target["greedy"]["of"] == PROMPTS
        for divergence in target["greedy"]["divergences"]:
            assert divergence.keys() == DIVERGENCE_KEYS
            assert divergence["kind"] in ("near-tie", "defect") and divergence["text"]
        assert {gate["gate"] for gate in target["gates"]} == GATES.keys()
        assert all(gate.keys() == {"gate", "bound", "measured", "passed", "note"} for gate in target["gates"])


def test_four_bits_lose_something_but_not_the_model(done: tuple[str, Path]) -> None:
    targets = {target["format"]: target for target in report(done[1])["targets"]}
    for target in targets.values():
        # Chance is one in 512 for the first, and about 6 nats for the second.
        assert 0.2 < target["top1"] < 1 and 0.01 < target["kl"] < 3
        assert 3 < target["snr_db"] < 30
        assert target["perplexity_ratio_se"] > 0
    # A float zero on more bits costs less than no zero.
    assert targets["tinygemm"]["kl"] < targets["gptq"]["kl"]


def test_the_ledger_records_the_run(done: tuple[str, Path]) -> None:
    model_type, folder = done
    for target in report(folder)["targets"]:
        artifact = Artifact(folder / "output" / target["name"])
        artifact.check()
        ledger = artifact.ledger
        assert ledger.source["name"] == "model"
        assert ledger.source["files"] == Folder(folder / "model").hashes()
        assert ledger.source_config["model_type"] == model_type
        assert ledger.calibration is not None and ledger.calibration["samples"] == 4
        assert ledger.device is not None and ledger.device["device_class"]
        assert ledger.validation is not None and ledger.validation["report"] == target
        assert {row.tensor for row in ledger.tensors} >= Folder(folder / "model").tensors.keys()


def test_fused_projections_are_written_as_the_familys_engines_want_them(done: tuple[str, Path]) -> None:
    model_type, folder = done
    names = {name.rpartition(".")[2] for name in Artifact(folder / "output" / "gptq").modules}
    assert ("q_proj" not in names) == (model_type in FUSED)


def test_every_expansion_loads_in_transformers(done: tuple[str, Path], tmp_path: Path) -> None:
    model_type, folder = done
    for target in TARGETS:
        out = tmp_path / target["name"]
        assert invoke("expand", folder / "output" / target["name"], out).exit_code == 0
        model, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        untied = target["format"] == "gptq" or not CONFIGS[model_type]["tie_word_embeddings"]
        assert model.config.tie_word_embeddings is not untied


def test_a_second_run_gives_the_same_report(done: tuple[str, Path]) -> None:
    _, folder = done
    first, before = report(folder), content(folder / "output")
    assert invoke("run", folder / "pipeline.yaml").exit_code == 0
    assert same_report(report(folder)) == same_report(first)
    after = content(folder / "output")
    assert {name for name in before if before[name] != after[name]} == set(VOLATILE)


def test_the_real_command_converts_split_and_fused_and_fails_a_gate(tmp_path: Path) -> None:
    targets = [
        {"name": "split", "format": "gptq", "group_size": 32, "qkv": "split", "method": "rtn"},
        {"name": "fused", "format": "gptq", "group_size": 32, "qkv": "fused", "method": "rtn"},
        {"name": "kept", "format": "tinygemm", "group_size": 64, "skip": ["mlp.down_proj"], "method": "rtn"},
    ]
    validation = settings()["validation"] | {"gates": {"max_kl": 1e-9}}
    folder = project(tmp_path / "p", "spark2_5", targets=targets, validation=validation).parent
    result = convert("run", folder / "pipeline.yaml")
    assert result.returncode == 1, result.stderr
    assert result.stderr.count("max_kl: expected 1e-09, found ") == 3 and "Traceback" not in result.stderr
    assert "1 failed" in result.stdout
    split, fused, kept = report(folder)["targets"]
    same = TARGET_KEYS - {"name", "file_bytes", "notes", "kept", "artifact_sha256"}
    assert {key: split[key] for key in same} == {key: fused[key] for key in same}
    assert kept["kept"]["model.layers.0.mlp.down_proj.weight"] == "skip: mlp.down_proj"
    # The gate given up, the same artifacts pass.
    write_yaml(folder, settings(targets=targets))
    assert invoke("run", folder / "pipeline.yaml").exit_code == 0
