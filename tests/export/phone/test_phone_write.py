"""Phone artifacts, written whole: what they compute, and what they say of themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from calibrate.ranges import Ranges
from export.phone.check import graph_problems
from export.phone.expand import PhoneExpansion
from export.phone.observe import Observations, text_steps
from export.phone.options import MARGIN
from export.phone.trace import Traced
from export.phone.write import RANGES
from models.checkpoint import Folder, Writer
from models.errors import BadInput
from models.files import to_json
from models.opened import open_model
from tests.helpers import tiny_checkpoint, tokens
from tests.phone_written import (
    CASES,
    OPTIONS,
    Make,
    copied,
    decibels,
    graphs,
    reference,
    written,
)
from validate.engines.workers.phone_host import Host


@pytest.mark.parametrize("case", CASES)
def test_the_graphs_compute_the_model_in_chunks_and_steps(case: str, make: Make) -> None:
    made = make(case)
    ids = np.asarray(tokens(60, seed=9))
    found = Host(made.artifact.folder).score(ids, 20)
    assert decibels(reference(made.model, ids), found) > 25


@pytest.mark.parametrize("case", CASES)
def test_the_expansion_is_a_checkpoint_that_transformers_loads(case: str, make: Make, tmp_path: Path) -> None:
    made = make(case)
    expansion = PhoneExpansion(made.artifact)
    writer = Writer(tmp_path, 2**30)
    for name in expansion.tensors:
        writer.add(name, expansion.read(name))
    writer.finish()
    (tmp_path / "config.json").write_bytes(to_json(expansion.config))
    assert "tokenizer.json" in expansion.side_files()
    ids = np.asarray(tokens(60, seed=9))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        logits = loaded(torch.from_numpy(ids)[None]).logits[0].numpy()
    assert decibels(reference(made.model, ids), logits) > 25


@pytest.mark.parametrize("case", CASES)
def test_every_source_tensor_has_a_row_and_the_bytes_pass_their_check(case: str, make: Make) -> None:
    made = make(case)
    made.artifact.check()
    rows = {row.tensor: row for row in made.artifact.ledger.tensors}
    assert set(made.model.checkpoint.tensors) <= set(rows)
    assert rows["lm_head.weight"].outcome == "quantized"
    assert abs(made.artifact.bits_per_weight - 8) < 0.5


def test_a_model_in_parts_computes_what_it_does_in_one(make: Make, tmp_path: Path) -> None:
    made = make("llama, tied")
    parts = written(made.model, tmp_path, replace(OPTIONS, parts=4))
    assert len(parts.manifest.parts) == 4
    ids = np.asarray(tokens(60, seed=9))
    found = Host(parts.folder).score(ids, 20)
    assert decibels(reference(made.model, ids), found) > 25
    parts.check()


@pytest.mark.parametrize(("parts", "embedding", "bytes"), [(1, "int8", 1), (3, "int8", 1), (1, "uint16", 2)])
def test_a_table_of_codes_is_read_on_its_own_grid(
    parts: int, embedding: Literal["int8", "uint16"], bytes: int, make: Make, tmp_path: Path
) -> None:
    made = make("llama, tied")
    coded = written(made.model, tmp_path, replace(OPTIONS, parts=parts, embedding=embedding))
    coded.check()
    ids = np.asarray(tokens(60, seed=9))
    expected = reference(made.model, ids)
    found, float_table = (
        decibels(expected, Host(folder).score(ids, 20)) for folder in (coded.folder, made.artifact.folder)
    )
    assert found > (22 if embedding == "int8" else float_table - 0.5)
    size = sum(path.stat().st_size for path in coded.weight_files)
    assert size < sum(path.stat().st_size for path in made.artifact.weight_files) - 512 * 128 * (4 - bytes) + 20_000
    table = PhoneExpansion(coded).read("model.embed_tokens.weight").float()
    kept = PhoneExpansion(made.artifact).read("model.embed_tokens.weight").float()
    assert 0 < float((table - kept).abs().max()) < float(kept.abs().max()) / (100 if embedding == "int8" else 200)


def test_activations_of_8_bits_are_another_artifact(make: Make, tmp_path: Path) -> None:
    made = make("llama, tied")
    coarse = written(made.model, tmp_path, replace(OPTIONS, activations="uint8"))
    coarse.check()
    ids = np.asarray(tokens(60, seed=9))
    expected = reference(made.model, ids)
    fine, found = (decibels(expected, Host(a.folder).score(ids, 20)) for a in (made.artifact, coarse))
    assert found < fine - 5


def test_writing_twice_gives_the_same_bytes(make: Make, tmp_path: Path, traced: dict[Any, Traced]) -> None:
    made = make("spark2_5, hybrid")
    known = dict(traced)
    traced.clear()
    again = written(made.model, tmp_path)
    traced |= known
    assert again.ledger.files == made.artifact.ledger.files


def test_ranges_of_random_tokens_take_the_place_of_a_text(make: Make, tmp_path: Path) -> None:
    made = make("llama, tied")
    blind = written(made.model, tmp_path, windows=None)
    blind.check()
    ids = np.asarray(tokens(60, seed=9))
    # The tiny model's weights are random, so that no text is very unlike another one to it.
    assert decibels(reference(made.model, ids), Host(blind.folder).score(ids, 20)) > 15


def test_caches_and_the_sides_of_products_are_signed(make: Make) -> None:
    artifact = make("spark2_5, hybrid").artifact
    (part,) = artifact.manifest.parts
    caches = [port for port in (*part.decode.inputs, *part.decode.outputs) if port.layer is not None]
    assert len(caches) == 8 and {(port.dtype, port.zero_point) for port in caches} == {("int16", 0)}
    # Values are cut from a fused projection, whose queries and keys span more: their grid is their own.
    seen = json.loads((artifact.folder / RANGES).read_text())[part.data]
    scale = next(port.scale for port in caches if port.name == "past_value_0")
    own, fused = (max(map(abs, seen[name])) for name in ("past_value_0", "new_value_0"))
    assert own < fused and scale == pytest.approx(MARGIN * own / 32767, rel=1e-4)


def test_a_damaged_graph_and_a_changed_weight_are_named(make: Make, tmp_path: Path) -> None:
    artifact = copied(make("llama, tied").artifact, tmp_path / "damaged")
    for file in ("decode.onnx", "model.data"):
        path = artifact.folder / file
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
    with pytest.raises(BadInput) as error:
        artifact.check()
    assert [problem.split(": ")[1] for problem in error.value.problems] == ["decode.onnx", "model.data"]


def test_a_truncated_weight_file_is_named_with_its_tensor(make: Make, tmp_path: Path) -> None:
    artifact = copied(make("llama, tied").artifact, tmp_path / "short")
    path = artifact.folder / "model.data"
    path.write_bytes(path.read_bytes()[:-4096])
    expansion = PhoneExpansion(artifact)
    with pytest.raises(BadInput, match="truncated"):
        for name in expansion.tensors:
            expansion.read(name)


def test_a_weight_that_is_not_finite_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "llama", num_hidden_layers=1)
    weights = load_file(source / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInput, match="model.layers.0.mlp.up_proj.weight: expected finite weights, found nan"):
        written(open_model(Folder(source)), tmp_path)
    assert not (tmp_path / "phone").exists()


def test_ranges_that_are_not_finite_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="activation x: expected finite values, found -inf"):
        Ranges().add("x", float("-inf"), 1.0)
    seen = Observations(tmp_path)
    (tmp_path / "ranges-00000.json").write_text('{"x": [0, NaN], "y": [2, 1], "z": 3}')
    with pytest.raises(BadInput) as error:
        seen.ranges(0)
    assert [problem.split(": ")[1] for problem in error.value.problems] == ["x", "y", "z"]


def test_a_text_without_room_for_a_chunk_and_the_steps_is_refused(make: Make) -> None:
    manifest = make("llama, tied").artifact.manifest
    assert [kind for kind, _, _ in text_steps(np.arange(48), manifest)] == ["prefill"] * 2 + ["decode"] * 16
    for length in (31, 81):
        with pytest.raises(BadInput, match="sequence_length: expected 32 .* to 64 tokens"):
            text_steps(np.arange(length), manifest)


def test_written_graphs_pass_the_rules_of_all_graphs(make: Make) -> None:
    artifact = make("phi3, fused").artifact
    (part,) = artifact.manifest.parts
    for kind, model in graphs(artifact).items():
        assert graph_problems(model, part.graph(kind), OPTIONS.opset, part.norms) == []
