"""Damaged artifacts: everything that `Artifact.check` must find, each on a copy with one thing wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from export.artifact import Artifact
from export.layout import LayoutOptions
from models.errors import BadInput
from models.files import sha256
from tests.workshop import FORMATS, Workshop, spec

WEIGHTS = "model.safetensors"
PROJECTION = "model.layers.0.mlp.up_proj"


@pytest.fixture
def copy(workshop: Workshop, tmp_path: Path) -> Callable[[str], Path]:
    """A format's artifact in a folder that may be damaged."""

    def make(format: str = "gptq") -> Path:
        built = workshop.built("llama-tied", spec(format))
        return shutil.copytree(built.artifact.folder, tmp_path / format)

    return make


def problems(folder: Path) -> list[str]:
    with pytest.raises(BadInput) as caught:
        Artifact(folder).check()
    return caught.value.problems


def change_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= values
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Damages tensors so that only their content can tell: the ledger's hash follows."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    ledger = json.loads((folder / "conversion.json").read_text())
    ledger["files"][WEIGHTS] = sha256(folder / WEIGHTS)
    (folder / "conversion.json").write_text(json.dumps(ledger))


@pytest.mark.parametrize("format", FORMATS)
def test_an_untouched_copy_is_whole(copy: Callable[[str], Path], format: str) -> None:
    Artifact(copy(format)).check()


@pytest.mark.parametrize("format", FORMATS)
def test_a_flipped_byte_is_found(copy: Callable[[str], Path], format: str) -> None:
    folder = copy(format)
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / WEIGHTS).write_bytes(content)
    assert any(WEIGHTS in problem and "SHA-256 differs" in problem for problem in problems(folder))


def test_a_truncated_weight_file_is_found(copy: Callable[[str], Path]) -> None:
    folder = copy("gptq")
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])
    assert any(WEIGHTS in problem and "truncated" in problem for problem in problems(folder))


def test_every_deleted_side_file_is_found(copy: Callable[[str], Path]) -> None:
    folder = copy("gptq")
    for name in ("tokenizer.json", "quantize_config.json"):
        (folder / name).unlink()
    found = problems(folder)
    assert len(found) == 2
    assert all("named in the ledger, but there is no such file" in problem for problem in found)


def test_an_extra_tensor_is_found(copy: Callable[[str], Path]) -> None:
    folder = copy("gptq")
    change_tensors(folder, lambda tensors: tensors.update(surprise=torch.zeros(2)))
    assert [problem.removeprefix(f"{folder}: ") for problem in problems(folder)] == ["surprise: no row in the ledger"]


@pytest.mark.parametrize("name", ["model.norm.weight", f"{PROJECTION}.scales"])
def test_a_missing_tensor_is_found(copy: Callable[[str], Path], name: str) -> None:
    folder = copy("gptq")
    change_tensors(folder, lambda tensors: tensors.__delitem__(name))
    assert problems(folder) == [f"{folder}: {name}: missing"]


def test_changed_zero_points_are_found(copy: Callable[[str], Path]) -> None:
    folder = copy("gptq")
    change_tensors(folder, lambda tensors: tensors[f"{PROJECTION}.qzeros"].fill_(-0x77777778))
    (problem,) = problems(folder)
    assert f"{PROJECTION}.qzeros: expected 0x77777777" in problem


@pytest.mark.parametrize(
    "values, wanted",
    [
        ({"isa": "neon"}, "quantization_config.fingerprint: expected"),
        ({"isa": "sse9"}, "quantization_config.isa: expected one of"),
        ({"fingerprint": "00"}, "found 00 of no known machine"),
    ],
)
def test_bytes_that_claim_another_machine_are_found_once(
    copy: Callable[[str], Path], values: dict[str, object], wanted: str
) -> None:
    folder = copy("tinygemm")
    change_config(folder, **values)
    found = problems(folder)
    assert len([problem for problem in found if wanted in problem]) == 1
    assert any("config.json" in problem and "SHA-256" in problem for problem in found)


def test_a_changed_group_size_is_found_in_every_module(copy: Callable[[str], Path]) -> None:
    folder = copy("awq")
    change_config(folder, group_size=64)
    found = [problem for problem in problems(folder) if ".scales: expected" in problem]
    assert len(found) == len(Artifact(folder).modules)


CONFIGS = [
    ("gptq", {"desc_act": True}, "desc_act: expected false, found true"),
    ("gptq", {"sym": False}, "sym: expected true, found false"),
    ("gptq", {"bits": 8}, "bits: expected 4, found 8"),
    ("gptq", {"checkpoint_format": "gptq_v2"}, 'checkpoint_format: expected "gptq", found "gptq_v2"'),
    ("awq", {"zero_point": False}, "zero_point: expected true, found false"),
    ("awq", {"version": "gemv"}, 'version: expected "gemm", found "gemv"'),
    ("tinygemm", {"bits": 8}, "bits: expected 4, found 8"),
    *((format, {"group_size": None}, "group_size: expected a whole number, found null") for format in FORMATS),
]


@pytest.mark.parametrize("format, values, wanted", CONFIGS)
def test_a_configuration_under_which_engines_would_read_other_numbers_is_found_once(
    copy: Callable[[str], Path], format: str, values: dict[str, object], wanted: str
) -> None:
    folder = copy(format)
    change_config(folder, **values)
    found = [problem for problem in problems(folder) if "quantization_config" in problem]
    assert found == [f"{folder}: quantization_config.{wanted}"]


def test_act_order_with_a_shuffled_g_idx_is_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("gptq")
    change_config(folder, desc_act=True)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))

    def shuffle(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{PROJECTION}.g_idx"] = tensors[f"{PROJECTION}.g_idx"][order].contiguous()

    change_tensors(folder, shuffle)
    assert any("desc_act: expected false" in problem for problem in problems(folder))
    # vLLM would drop the order where the configuration does not name it.
    change_config(folder, desc_act=False)
    assert any(f"{PROJECTION}.g_idx: expected k // 32, found another order" in problem for problem in problems(folder))


@pytest.mark.parametrize("format", FORMATS)
def test_too_few_scale_groups_are_found(copy: Callable[[str], Path], format: str) -> None:
    folder = copy(format)
    name = f"{PROJECTION}.{'scales_and_zeros' if format == 'tinygemm' else 'scales'}"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()}))
    (problem,) = problems(folder)
    assert f"{name}: expected bfloat16" in problem and "[3, 256" in problem


@pytest.mark.parametrize("format", FORMATS)
def test_scales_that_are_not_contiguous_are_found(workshop: Workshop, format: str) -> None:
    artifact = workshop.built("llama-tied", spec(format)).artifact
    tensors = artifact.tensors(PROJECTION)
    suffix = "scales_and_zeros" if format == "tinygemm" else "scales"
    scales = tensors[suffix]
    tensors[suffix] = scales.transpose(0, 1).contiguous().transpose(0, 1)
    found = artifact.layout.tensor_problems(PROJECTION, tensors, artifact.config)
    assert found == [f"{PROJECTION}.{suffix}: not contiguous"]


@pytest.mark.parametrize("format", FORMATS)
def test_code_16_is_refused_before_it_is_packed(workshop: Workshop, format: str) -> None:
    """Four bits of a file cannot say 16; packed unchecked it would change the neighbour's code."""
    artifact = workshop.built("llama-tied", spec(format)).artifact
    number = artifact.quantized(PROJECTION)
    number.codes[3, 5] = 16
    with pytest.raises(BadInput, match=r"codes: expected 0\.\.15, found 16"):
        artifact.layout.pack(number, LayoutOptions(32, FORMATS[format], isa="avx2"))  # type: ignore[arg-type]


def test_an_unknown_layout_is_refused_with_the_key(copy: Callable[[str], Path]) -> None:
    folder = copy("gptq")
    change_config(folder, quant_method="exl2")
    with pytest.raises(BadInput, match=r"config.json: quantization_config.quant_method: exl2: unknown layout; known"):
        Artifact(folder)


def test_reading_a_module_with_broken_rules_raises(copy: Callable[[str], Path]) -> None:
    folder = copy("gptq")
    change_tensors(folder, lambda tensors: tensors[f"{PROJECTION}.scales"].zero_())
    with pytest.raises(BadInput, match="scales are zero"):
        Artifact(folder).quantized(PROJECTION)
