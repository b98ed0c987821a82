"""Writing checkpoints in a stream of shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from models.checkpoint import INDEX, Folder, Writer
from tests.helpers import tiny_checkpoint, tokens


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_transformers_loads_what_is_written_in_shards(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    checkpoint = Folder(source)
    copy = tmp_path / "copy"
    copy.mkdir()
    writer = Writer(copy, shard_bytes=200_000)
    for name in checkpoint.tensors:
        writer.add(name, checkpoint.read(name))
    files = writer.finish()
    assert len(files) > 3 and sorted(files) == names(copy)
    (copy / "config.json").write_bytes((source / "config.json").read_bytes())
    again = Folder(copy)
    assert all(torch.equal(again.read(name), checkpoint.read(name)) for name in checkpoint.tensors)
    expected, found = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (source, copy))
    with torch.no_grad():
        assert torch.equal(found(tokens(1, 20)).logits, expected(tokens(1, 20)).logits)


def test_shards_hold_at_most_their_size_and_a_larger_tensor_gets_its_own(tmp_path: Path) -> None:
    writer = Writer(tmp_path, shard_bytes=100)
    sizes = {"a": 60, "b": 40, "c": 1, "d": 300, "e": 99}
    for name, size in sizes.items():
        writer.add(name, torch.full((size,), ord(name), dtype=torch.uint8))
    shards = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    assert writer.finish() == [*shards, INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 500
    assert [[n for n in sizes if index["weight_map"][n] == shard] for shard in shards] == [
        ["a", "b"],
        ["c"],
        ["d"],
        ["e"],
    ]
    assert {name: len(load_file(tmp_path / file)[name]) for name, file in index["weight_map"].items()} == sizes


def test_one_shard_is_called_model_and_has_no_index(tmp_path: Path) -> None:
    writer = Writer(tmp_path, shard_bytes=1000, metadata={"made": "here"})
    writer.add("a", torch.zeros(3))
    assert writer.finish() == ["model.safetensors"]
    assert names(tmp_path) == ["model.safetensors"]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "made": "here"}


def test_no_file_has_its_final_name_before_the_end(tmp_path: Path) -> None:
    writer = Writer(tmp_path, shard_bytes=10)
    for name in "abc":
        writer.add(name, torch.zeros(3))
    assert names(tmp_path) == ["shard-00000.safetensors", "shard-00001.safetensors"]


def test_a_name_that_comes_twice_is_refused_also_in_a_later_shard(tmp_path: Path) -> None:
    writer = Writer(tmp_path, shard_bytes=10)
    writer.add("a", torch.zeros(3))
    writer.add("b", torch.zeros(3))
    with pytest.raises(ValueError, match="tensor a was written twice"):
        writer.add("a", torch.zeros(3))


def test_views_and_tensors_that_share_memory_are_written_whole_and_once(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    expected = {"all": base, "same": base, "rows": base[1:], "columns": base[:, 1:3], "transposed": base.t()}
    writer = Writer(tmp_path, shard_bytes=10_000)
    for name, tensor in expected.items():
        writer.add(name, tensor)
    writer.finish()
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert writer.total_bytes == sum(t.numel() * 4 for t in expected.values())
