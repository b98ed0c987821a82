"""Artifacts: their bytes hold the quantised numbers, nothing of the source is lost, and they are whole or absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from calibrate.grid import Quantized, concatenate
from calibrate.quantize import quantize
from calibrate.results import Results
from export import gptq
from export.artifact import Artifact, Expansion, is_artifact, write
from export.ledger import Ledger
from export.opened import save
from export.plan import make_plan
from models.checkpoint import INDEX, Folder
from models.errors import BadInput
from models.opened import open_model
from models.skeleton import load_model
from tests.helpers import tiny_checkpoint, tokens
from tests.workshop import CASES, FORMATS, FUSED, Built, Workshop, layouts, spec
from validate.score import compare, final_hidden


def quantised(built: Built) -> dict[str, Quantized]:
    """What was decided for each linear, by full split name."""
    found: dict[str, Quantized] = {}
    for index in range(built.model.dimensions.layers + 1):
        found |= built.results.load(index).linears
    return found


@pytest.mark.parametrize("case, format, fused, head", layouts())
def test_the_expansion_of_the_bytes_is_the_dequantised_numbers(
    workshop: Workshop, case: str, format: str, fused: bool | None, head: bool
) -> None:
    built = workshop.built(case, spec(format, fused=fused, quantize_head=head))
    built.artifact.check()
    expansion, numbers, source = Expansion(built.artifact), quantised(built), built.model.checkpoint
    by_module: dict[str, list[str]] = {}
    for linear in built.plan.linears:
        by_module.setdefault(linear.module, []).append(linear.name)
    replaced = {f"{module}.weight" for module in by_module}
    for module, names in by_module.items():
        expected = concatenate([numbers[name] for name in names]).dequantize(torch.bfloat16)
        assert torch.equal(expansion.read(f"{module}.weight"), expected), module
    for name in source.tensors.keys() - replaced:
        assert torch.equal(expansion.read(name), source.read(name)), name
    assert expansion.tensors.keys() == source.tensors.keys() | replaced
    for name, info in expansion.tensors.items():
        value = expansion.read(name)
        assert (value.dtype, tuple(value.shape)) == (info.dtype, info.shape), name


def test_what_calibration_changed_of_unquantised_tensors_is_stored_and_accounted_for(
    workshop: Workshop, tmp_path: Path
) -> None:
    plan = workshop.plan("qwen2-biases", spec())
    results, changed = Results(tmp_path / "results"), {}
    for index in range(3):
        layer = workshop.results("qwen2-biases", plan).load(index)
        name = f"model.layers.{index}.input_layernorm.weight" if index < 2 else "model.norm.weight"
        changed[name] = layer.tensors[name] = torch.rand(128)
        layer.reasons[name] = "scaled by awq"
        if index == 0:
            bias = "model.layers.0.self_attn.q_proj.bias"
            changed[bias] = layer.tensors[bias] = torch.rand(128)
            layer.reasons[bias] = "trained by tune"
            layer.fallbacks["model.layers.0.mlp.up_proj"] = "gptq was worse"
        results.save(index, layer)
    workshop.write("qwen2-biases", plan, results, tmp_path / "artifact")
    artifact = Artifact(tmp_path / "artifact")
    artifact.check()
    rows = {row.tensor: row for row in artifact.ledger.tensors}
    for name, value in changed.items():
        assert torch.equal(Expansion(artifact).read(name), value.bfloat16())
        assert rows[name].outcome == "kept" and rows[name].reason.count("trained by tune") == name.endswith("bias")
    assert "scaled by awq; cast to" not in rows["model.norm.weight"].reason
    assert rows["model.norm.weight"].reason == "not a linear that is quantised; scaled by awq"
    linears = {linear.linear: linear for row in rows.values() for linear in row.linears}
    fallen = linears.pop("model.layers.0.mlp.up_proj")
    assert (fallen.method, fallen.reason) == (("rtn",), "gptq was worse")
    assert not any(linear.reason for linear in linears.values())
    assert "1 of 15 linears rounded to nearest" in artifact.ledger.notes[-1]


@pytest.mark.parametrize("case", FUSED)
@pytest.mark.parametrize("format", FORMATS)
def test_split_and_fused_hold_the_same_numbers(workshop: Workshop, case: str, format: str) -> None:
    split = workshop.built(case, spec(format, fused=False)).artifact
    fused = workshop.built(case, spec(format, fused=True)).artifact
    assert len(split.modules) > len(fused.modules)
    for name in Expansion(fused).tensors:
        assert torch.equal(Expansion(split).read(name), Expansion(fused).read(name)), name


@pytest.mark.parametrize("case, format, fused, head", [row for row in layouts() if row[1] == "gptq"])
def test_the_ledger_accounts_for_every_source_tensor(
    workshop: Workshop, case: str, format: str, fused: bool | None, head: bool
) -> None:
    built = workshop.built(case, spec(format, fused=fused, quantize_head=head))
    rows = {row.tensor: row for row in built.artifact.ledger.tensors}
    tied = {"lm_head.weight"} if "lm_head.weight" not in built.model.checkpoint.tensors else set()
    assert rows.keys() == built.model.checkpoint.tensors.keys() | tied
    linears = [linear for row in rows.values() for linear in row.linears]
    assert {linear.linear for linear in linears} == {linear.name for linear in built.plan.linears}
    assert all(row.reason for row in rows.values() if row.outcome in ("kept", "tied"))
    for linear in linears:
        assert linear.group_size == 32 and linear.method == ("rtn",) and 0 < linear.error < 0.5
    stored = {name for row in rows.values() if row.outcome == "kept" for name in row.stored_as}
    assert stored <= built.artifact.files.tensors.keys()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("case", ["llama-tied", "spark2_5"])
def test_a_tied_head_that_is_quantised_is_untied_and_the_table_stays(
    workshop: Workshop, case: str, format: str
) -> None:
    built = workshop.built(case, spec(format))
    embedding = f"{built.model.family.embedding}.weight"
    assert built.model.checkpoint.config["tie_word_embeddings"] is True
    assert built.artifact.files.config["tie_word_embeddings"] is False
    assert torch.equal(built.artifact.files.read(embedding), built.model.checkpoint.read(embedding))
    assert "lm_head.weight" not in built.artifact.files.tensors
    assert "lm_head" in built.artifact.modules
    (row,) = [row for row in built.artifact.ledger.tensors if row.tensor == "lm_head.weight"]
    assert row.outcome == "quantized" and "untied" in row.reason


def test_a_tied_head_that_is_kept_stays_tied(workshop: Workshop) -> None:
    built = workshop.built("llama-tied", spec(quantize_head=False))
    assert built.artifact.files.config["tie_word_embeddings"] is True
    assert not [name for name in built.artifact.files.tensors if name.startswith("lm_head")]
    (row,) = [row for row in built.artifact.ledger.tensors if row.tensor == "lm_head.weight"]
    assert row.outcome == "tied"


def test_side_files_are_copied_byte_for_byte_and_the_rest_is_listed(workshop: Workshop, tmp_path: Path) -> None:
    model = workshop.model("llama-tied")
    source = workshop.folder / "llama-tied"
    extra = {"pytorch_model.bin": b"pickle", ".hidden": b"x"}
    for name, content in extra.items():
        (source / name).write_bytes(content)
    (source / "notes").mkdir()
    try:
        model.checkpoint.__dict__.pop("_beside", None)
        plan = workshop.plan("llama-tied", spec())
        workshop.write("llama-tied", plan, workshop.results("llama-tied", plan), tmp_path / "out")
    finally:
        for name in extra:
            (source / name).unlink()
        (source / "notes").rmdir()
        model.checkpoint.__dict__.pop("_beside", None)
    sides = {"LICENSE", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    for name in sides:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    written = {path.name for path in (tmp_path / "out").iterdir()}
    own = {"config.json", "quantize_config.json", "conversion.json", "model.safetensors"}
    assert written == sides | own
    skipped = Artifact(tmp_path / "out").ledger.skipped_files
    assert skipped == {
        "pytorch_model.bin": "weights in another format",
        ".hidden": "a hidden file",
        "notes/": "a folder",
    }


@pytest.mark.parametrize("format", FORMATS)
def test_small_shards_have_a_correct_index_and_the_same_content(workshop: Workshop, format: str) -> None:
    whole = workshop.built("llama-tied", spec(format)).artifact
    limit = 40_000
    sharded = workshop.built("llama-tied", spec(format), shard_bytes=limit).artifact
    sharded.check()
    files = sharded.files.weight_files
    assert len(files) > 2 and (sharded.folder / INDEX).is_file()
    assert [file.name for file in files] == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    for file in files:
        part = [name for name in sharded.files.tensors if sharded.files._tensor_files[name] == file]
        size = sum(sharded.files.tensors[name].nbytes for name in part)
        assert size <= limit or len(part) == 1
    assert sharded.files.tensors == whole.files.tensors
    for name in whole.files.tensors:
        assert torch.equal(sharded.files.read(name), whole.files.read(name))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("format", FORMATS)
def test_the_saved_expansion_loads_in_transformers_and_gives_our_logits(
    workshop: Workshop, tmp_path: Path, case: str, format: str
) -> None:
    built = workshop.built(case, spec(format))
    expansion = Expansion(built.artifact)
    save(expansion, tmp_path / "plain", 100_000)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert "quantization_config" not in loaded.config.to_dict()
    ids = tokens(2, 24)
    with torch.no_grad():
        theirs = loaded(input_ids=ids).logits
        ours = load_model(expansion, torch.float32)(input_ids=ids).logits
    assert torch.equal(theirs, ours)
    # The scorer's layer-by-layer path ends at the same loss.
    hidden = final_hidden(expansion, ids, torch.float32)
    scores = compare(expansion, hidden, Folder(tmp_path / "plain"), hidden, ids, torch.float32)
    with torch.no_grad():
        losses = [float(loaded(input_ids=row[None], labels=row[None]).loss) for row in ids]
    assert scores.nll == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("when", ["in the second layer", "at the end"])
def test_nothing_appears_under_the_final_name_when_writing_fails(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    plan = workshop.plan("llama-tied", spec())
    results = workshop.results("llama-tied", plan)
    pack, calls = gptq.pack, 0
    last = len(plan.quantized) if when == "at the end" else len(plan.quantized) // 2 + 1

    def failing(q: Quantized, options: Any) -> dict[str, torch.Tensor]:
        nonlocal calls
        calls += 1
        if calls == last:
            raise OSError(28, "No space left on device")
        return pack(q, options)

    monkeypatch.setattr(gptq, "pack", failing)
    with pytest.raises(OSError):
        workshop.write("llama-tied", plan, results, tmp_path / "out", 20_000)
    assert calls == last
    assert list(tmp_path.iterdir()) == []
    # An older artifact is still there, whole, after a failed rewrite.
    monkeypatch.undo()
    workshop.write("llama-tied", plan, results, tmp_path / "out")
    monkeypatch.setattr(gptq, "pack", failing)
    calls = 0
    with pytest.raises(OSError):
        workshop.write("llama-tied", plan, results, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    Artifact(tmp_path / "out").check()


def test_a_source_tensor_without_a_row_fails_the_write(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = workshop.plan("llama-tied", spec())
    monkeypatch.setattr("export.artifact._in_order", lambda checkpoint, _: list(checkpoint.tensors)[1:])
    with pytest.raises(RuntimeError, match="no ledger row for"):
        workshop.write("llama-tied", plan, workshop.results("llama-tied", plan), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_kept_tensor_that_is_not_finite_is_named(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    model = workshop.model("llama-tied")
    plan = workshop.plan("llama-tied", spec())
    results, read = workshop.results("llama-tied", plan), model.checkpoint.read

    def broken(name: str) -> torch.Tensor:
        tensor = read(name)
        if name == "model.norm.weight":
            tensor[3] = value
        return tensor

    monkeypatch.setattr(model.checkpoint, "read", broken)
    with pytest.raises(BadInput, match=rf"model.norm.weight in bfloat16: .* found {value} at \[3\]"):
        workshop.write("llama-tied", plan, results, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_artifact_is_told_from_a_source(workshop: Workshop) -> None:
    assert is_artifact(workshop.built("llama-tied", spec()).artifact.folder)
    workshop.model("llama-tied")
    assert not is_artifact(workshop.folder / "llama-tied")
    with pytest.raises(BadInput, match=r"conversion.json: expected an artifact's ledger"):
        Artifact(workshop.folder / "llama-tied")


def test_a_tied_head_that_is_skipped_by_name_is_not_announced_as_quantised(workshop: Workshop) -> None:
    built = workshop.built("llama-tied", spec(skip=("lm_head",)))
    assert built.artifact.config["lm_head"] is False
    assert built.artifact.files.config["tie_word_embeddings"] is True


def test_a_stored_head_beside_a_tied_configuration_is_announced_as_untied(workshop: Workshop, tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "llama", tie_word_embeddings=True)
    file = source / "model.safetensors"
    tensors = load_file(file)
    head = torch.randn_like(tensors["model.embed_tokens.weight"])
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({**tensors, "lm_head.weight": head, buffer: torch.ones(16)}, file, metadata={"format": "pt"})
    model = open_model(Folder(source))
    plan = make_plan(spec(quantize_head=False), model.checkpoint, model.family, model.linears, torch.bfloat16)
    results = Results(tmp_path / "results")
    quantize(model.checkpoint, model.linears, plan.recipe, None, results)
    ledger = Ledger({"name": "x", "files": {}}, {"name": "gptq"}, (), [], {}, {}, "bfloat16")
    write(plan, model.checkpoint, results, model.dimensions.layers, tmp_path / "artifact", ledger, 2**30)
    artifact = Artifact(tmp_path / "artifact")
    artifact.check()
    assert artifact.files.config["tie_word_embeddings"] is False
    assert torch.equal(artifact.files.read("lm_head.weight"), head.bfloat16())
    assert [row.outcome for row in ledger.tensors if row.tensor == buffer] == ["dropped"]
    assert buffer not in artifact.files.tensors and buffer not in Expansion(artifact).tensors
