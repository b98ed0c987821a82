"""``from_pretrained`` on tinygemm artifacts: end to end, and everything that must be refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import export.serving  # noqa: F401 - registers the quantizer
from export import tinygemm
from export.artifact import Expansion
from export.opened import save
from export.serving import linear
from export.serving.transformers_loader import TinygemmLinear, register
from models.errors import BadInput
from tests.helpers import ROOT, tokens
from tests.serving.test_linear import operator_calls
from tests.workshop import Built, Workshop, spec

CASES = ("llama-tied", "qwen2-biases", "phi3", "spark2_5")


def build(workshop: Workshop, case: str, isa: str | None = None, **changes: Any) -> Built:
    return workshop.built(case, spec("tinygemm", isa=isa or linear.host(), **changes))


def expansion(built: Built, folder: Path) -> torch.nn.Module:
    save(Expansion(built.artifact), folder, 2**30)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def packed(model: torch.nn.Module) -> dict[str, TinygemmLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, TinygemmLinear)}


def changed(built: Built, folder: Path, **entries: Any) -> Path:
    """A copy of an artifact with another ``quantization_config``."""
    shutil.copytree(built.artifact.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= entries
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_an_artifact_loads_and_computes_what_its_expansion_does(
    workshop: Workshop, case: str, head: bool, tmp_path: Path
) -> None:
    built = build(workshop, case, quantize_head=head)
    model = AutoModelForCausalLM.from_pretrained(built.artifact.folder).eval()
    assert set(packed(model)) == set(built.artifact.modules)
    assert ("lm_head" in packed(model)) == head
    ids = tokens(2, 24)
    with torch.no_grad():
        expected = expansion(built, tmp_path / "plain")(ids).logits.float()
        found = model(ids).logits.float()
    # Roundings of bf16 alone: 0.0015 by oneDNN, 0.0028 by torch's own loop. One of a layer's 128 channels a quarter too
    # large leaves 0.009.
    assert (found - expected).norm() / expected.norm() < 4e-3


@pytest.mark.parametrize("case", CASES)
def test_each_linear_is_within_the_operators_error_for_a_single_row(workshop: Workshop, case: str) -> None:
    built = build(workshop, case)
    model = AutoModelForCausalLM.from_pretrained(built.artifact.folder)
    for name, module in packed(model).items():
        weight = built.artifact.quantized(name).dequantize(torch.bfloat16).double()
        x = torch.randn(1, module.in_features, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        exact = x.double() @ weight.t()
        if module.bias is not None:
            exact += module.bias.double()
        assert (module(x) - exact).norm() / exact.norm() < 4e-3, name


def test_generation_takes_the_operator_for_single_rows_only(workshop: Workshop) -> None:
    model = AutoModelForCausalLM.from_pretrained(build(workshop, "llama-tied").artifact.folder)
    layers = [name for name in packed(model) if name != "lm_head"]
    new = 6
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    single = operator_calls(lambda: model.generate(tokens(1, 12), **options))
    # The prompt is wide but for the head, which sees the last token alone; then one row a step everywhere.
    assert single == (new - 1) * len(layers) + new
    assert operator_calls(lambda: model.generate(tokens(2, 12), **options)) == 0


def test_the_weights_are_held_once(workshop: Workshop) -> None:
    built = build(workshop, "llama-untied")
    model = AutoModelForCausalLM.from_pretrained(built.artifact.folder)
    kept = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
    stored = sum(t.nbytes for t in load_file(built.artifact.folder / "model.safetensors").values())
    rotary = sum(t.nbytes for name, t in model.named_buffers() if "inv_freq" in name)
    assert sum(kept.values()) - rotary == stored
    with torch.no_grad():
        model(tokens(1, 8))
    assert sum(t.nbytes for t in (*model.parameters(), *model.buffers())) - rotary == stored


@pytest.mark.parametrize("case", ["llama-tied", "phi3"])
@pytest.mark.parametrize("isa", sorted(tinygemm.ISAS))
def test_another_machines_bytes_are_repacked(workshop: Workshop, case: str, isa: str) -> None:
    here = AutoModelForCausalLM.from_pretrained(build(workshop, case).artifact.folder)
    there = AutoModelForCausalLM.from_pretrained(build(workshop, case, isa).artifact.folder)
    for name, module in packed(here).items():
        assert torch.equal(module.weight_packed, packed(there)[name].weight_packed), name
    assert there.config.quantization_config.isa == linear.host()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"isa": "avx9"}, "isa: expected one of"),
        ({"fingerprint": "f" * 64}, "of no known machine"),
        ({"isa": "neon"}, "fingerprint: expected"),
        ({"group_size": 64}, "scales_and_zeros"),
        ({"group_size": 48}, "group_size"),
        ({"bits": 8}, "bits"),
    ],
)
def test_a_configuration_that_is_not_the_bytes_is_refused(
    workshop: Workshop, entries: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = changed(build(workshop, "llama-tied"), tmp_path / "artifact", **entries)
    with pytest.raises(BadInput, match=message):
        AutoModelForCausalLM.from_pretrained(folder)


def test_too_few_groups_are_refused(workshop: Workshop, tmp_path: Path) -> None:
    folder = changed(build(workshop, "llama-tied"), tmp_path / "artifact")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.scales_and_zeros"
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInput, match=r"mlp.down_proj.scales_and_zeros: expected \[8, 128, 2\], found \[7, 128, 2\]"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_split_projections_are_refused_where_the_model_fuses_them(workshop: Workshop) -> None:
    folder = build(workshop, "spark2_5", fused=False).artifact.folder
    with pytest.raises(BadInput, match="self_attn.q_proj: the artifact holds it split.*qkv: fused"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_another_dtype_or_device_is_refused(workshop: Workshop) -> None:
    folder = build(workshop, "llama-tied").artifact.folder
    with pytest.raises(BadInput, match="dtype torch.float32"):
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with pytest.raises(BadInput, match="packed for the CPU"):
        AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cuda:0"})
    assert packed(AutoModelForCausalLM.from_pretrained(folder, device_map="auto"))


def test_what_was_loaded_can_be_saved_and_loaded_again(workshop: Workshop, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(build(workshop, "llama-tied", "neon").artifact.folder)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(model(tokens(1, 9)).logits, again(tokens(1, 9)).logits)


def test_registering_twice_changes_nothing() -> None:
    register()
    register()


@pytest.mark.parametrize(
    ("imports", "absent"),
    [
        ("export", {"transformers", "torch", "vllm"}),
        ("export.serving", {"vllm"}),
        ("export.serving.vllm_plugin", {"vllm"}),
    ],
)
def test_imports_stay_light(imports: str, absent: set[str]) -> None:
    code = f"import sys, {imports}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert absent.isdisjoint(done.stdout.split())
