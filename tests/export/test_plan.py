"""Plans: what engines refuse is refused from headers alone, all of it at once, and the promised sizes are exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from export.plan import TargetPlan, TargetSpec, make_plan
from models.checkpoint import Folder
from models.errors import BadInput
from models.opened import open_model
from tests.helpers import tiny_checkpoint
from tests.workshop import Workshop, layouts, spec


def plan_of(folder: Path, target: TargetSpec) -> TargetPlan:
    model = open_model(Folder(folder))
    return make_plan(target, model.checkpoint, model.family, model.linears, torch.bfloat16)


def problems(folder: Path, target: TargetSpec) -> list[str]:
    with pytest.raises(BadInput) as caught:
        plan_of(folder, target)
    return caught.value.problems


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key and value projections of 40 rows, a multiple of neither 32 nor 16; query of 160."""
    folder = tmp_path_factory.mktemp("narrow")
    return tiny_checkpoint(folder, "llama", num_attention_heads=8, num_key_value_heads=2, head_dim=20)


@pytest.mark.parametrize(
    "format, multiple", [("gptq", "the engine needs a multiple of 32"), ("awq", "32"), ("tinygemm", "16")]
)
def test_every_linear_of_refused_rows_is_listed(narrow: Path, format: str, multiple: str) -> None:
    found = problems(narrow, spec(format))
    for layer in (0, 1):
        for name in ("k_proj", "v_proj"):
            wanted = f"model.layers.{layer}.self_attn.{name} [40, 128]: 40 out features"
            assert [p for p in found if wanted in p and multiple in p], found
    assert len(found) == 4
    assert all(problem.startswith(f"target {format} ({format}): ") for problem in found)


@pytest.mark.parametrize("format", ["gptq", "awq", "tinygemm"])
def test_refused_rows_are_fine_when_skipped_by_name(narrow: Path, format: str) -> None:
    skip = ("self_attn.q_proj", "*.k_proj", "*.v_proj")
    plan = plan_of(narrow, spec(format, skip=skip))
    assert {name.rpartition(".")[2] for name, _ in plan.kept} == {"q_proj", "k_proj", "v_proj"}
    assert not {linear.name for linear in plan.linears} & {name for name, _ in plan.kept}


def test_a_group_size_that_does_not_divide_is_refused_for_each_linear(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path, "llama", intermediate_size=192)
    found = problems(source, spec(group_size=128))
    assert len(found) == 2
    assert all("down_proj [128, 192]: group size 128 does not divide 192 in features" in p for p in found)


def test_largest_fitting_lowers_the_group_size_and_says_so(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path, "llama", intermediate_size=192)
    plan = plan_of(source, spec(group_size=128, fit_group_size=True))
    assert plan.options.group_size == 64
    assert {plan.grid(linear.columns).group_size for linear in plan.linears} == {64}
    assert plan.notes == ("group size 64 instead of 128, which does not divide [192] in features of 2 linears",)


def test_largest_fitting_without_a_fitting_size_is_refused(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path, "llama", intermediate_size=176)
    found = problems(source, spec("tinygemm", group_size=128, fit_group_size=True))
    assert any("no group size of (256, 128, 64, 32) divides the in features of every linear" in p for p in found)


def test_a_skip_pattern_that_matches_nothing_is_refused_with_the_names(workshop: Workshop) -> None:
    with pytest.raises(BadInput) as caught:
        workshop.plan("llama-tied", spec(skip=("self_attn.qproj",)))
    (problem,) = caught.value.problems
    assert "skip: 'self_attn.qproj' matches no linear" in problem
    assert "self_attn.q_proj" in problem and "lm_head" in problem


@pytest.mark.parametrize(
    "skip, rest",
    [("*.q_proj", "k_proj"), ("model.layers.1.self_attn.[kv]_proj", "q_proj"), ("mlp.up_proj", "gate_proj")],
)
def test_skipping_a_part_of_what_engines_load_as_one_is_refused(workshop: Workshop, skip: str, rest: str) -> None:
    with pytest.raises(BadInput) as caught:
        workshop.plan("llama-tied", spec(skip=(skip,)))
    assert all("skip all of them or none" in p and rest in p for p in caught.value.problems)
    assert len(caught.value.problems) == (1 if "layers.1" in skip else 2)


def test_skipping_everything_is_refused(workshop: Workshop) -> None:
    with pytest.raises(BadInput, match="no linear is left to quantise"):
        workshop.plan("llama-tied", spec(skip=("*",)))


def test_fused_is_refused_for_a_source_without_fusions(workshop: Workshop) -> None:
    with pytest.raises(BadInput, match="qkv: fused: the source holds no fused projection"):
        workshop.plan("llama-tied", spec(fused=True))


def test_the_family_decides_whether_projections_stay_fused(workshop: Workshop) -> None:
    names = {module.name for module in workshop.plan("phi3", spec()).quantized}
    assert "model.layers.0.self_attn.qkv_proj" in names and "model.layers.0.self_attn.q_proj" not in names
    names = {module.name for module in workshop.plan("phi3", spec(fused=False)).quantized}
    assert "model.layers.0.self_attn.q_proj" in names and "model.layers.0.mlp.gate_proj" in names


def test_all_problems_of_a_target_come_together(narrow: Path) -> None:
    found = problems(narrow, spec(skip=("nothing",), fused=True))
    assert len(found) == 6


def test_a_kept_head_of_a_tied_model_says_that_it_is_tied(workshop: Workshop) -> None:
    assert ("lm_head", "lm_head: keep (tied to the embedding)") in workshop.plan(
        "llama-tied", spec(quantize_head=False)
    ).kept
    assert ("lm_head", "lm_head: keep") in workshop.plan("llama-untied", spec(quantize_head=False)).kept


@pytest.mark.parametrize("case, format, fused, head", layouts())
def test_planned_sizes_and_bits_are_those_of_the_files(
    workshop: Workshop, case: str, format: str, fused: bool | None, head: bool
) -> None:
    built = workshop.built(case, spec(format, fused=fused, quantize_head=head))
    stored = sum(info.nbytes for info in built.artifact.files.tensors.values())
    assert built.plan.quantized_bytes() + built.plan.kept_bytes(built.model.checkpoint) == stored
    assert built.artifact.bits_per_weight == pytest.approx(built.plan.bits_per_weight, rel=1e-12)
