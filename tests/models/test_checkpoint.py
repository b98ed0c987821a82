"""Reading checkpoint folders lazily, and a message for everything that can be wrong with one."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from models.checkpoint import INDEX, Folder, TensorInfo
from models.errors import BadInput
from tests.helpers import ROOT

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
    "a.bias": torch.arange(3, dtype=torch.float32),
    "b.weight": torch.arange(8, dtype=torch.float16).view(4, 2),
    "b.codes": torch.arange(8, dtype=torch.uint8),
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
WEIGHT_MAP = {"a.weight": SHARDS[0], "a.bias": SHARDS[0], "b.weight": SHARDS[1], "b.codes": SHARDS[1]}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for shard in SHARDS:
        save_file({name: TENSORS[name] for name, file in WEIGHT_MAP.items() if file == shard}, tmp_path / shard)
    write_index(tmp_path, WEIGHT_MAP)
    return tmp_path


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def problems(folder: Path, **arguments: Any) -> list[str]:
    with pytest.raises(BadInput) as error:
        Folder(folder, **arguments)
    return [problem.replace(f"{folder}/", "") for problem in error.value.problems]


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_every_tensor_comes_back_in_its_dtype_with_shapes_from_headers(
    kind: str, request: pytest.FixtureRequest
) -> None:
    checkpoint = Folder(request.getfixturevalue(kind), name="org/model")
    assert dict(checkpoint.tensors) == {n: TensorInfo(t.dtype, tuple(t.shape)) for n, t in TENSORS.items()}
    for name, tensor in TENSORS.items():
        found = checkpoint.read(name)
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)
    assert checkpoint.name == "org/model" and checkpoint.config == {"model_type": "llama"}
    assert sum(info.nbytes for info in checkpoint.tensors.values()) == sum(t.nbytes for t in TENSORS.values())
    with pytest.raises(KeyError):
        checkpoint.read("c.weight")


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    assert problems(sharded) == [f"{SHARDS[1]}: named in {INDEX}, but there is no such file"]


def test_an_extra_shard_is_named(sharded: Path) -> None:
    save_file({"c": torch.zeros(1)}, sharded / "model-00003-of-00003.safetensors")
    assert problems(sharded) == [f"model-00003-of-00003.safetensors: not named in {INDEX}"]


@pytest.mark.parametrize("kept", [0, 4, 60, -1], ids=["empty", "half a length", "half a header", "one byte short"])
def test_a_truncated_shard_is_named(sharded: Path, kept: int) -> None:
    file = sharded / SHARDS[0]
    file.write_bytes(file.read_bytes()[:kept])
    (problem,) = problems(sharded)
    assert problem.startswith(f"{SHARDS[0]}: truncated or not a safetensors file (")


def test_missing_extra_and_truncated_shards_come_in_one_message(sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    (sharded / SHARDS[0]).write_bytes(b"x" * 100)
    save_file({"c": torch.zeros(1)}, sharded / "extra.safetensors")
    found = problems(sharded)
    assert len(found) == 3
    assert [problem.split(":")[0] for problem in found] == [SHARDS[1], "extra.safetensors", SHARDS[0]]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"c.weight": SHARDS[1]}, [f"{SHARDS[1]}: {INDEX} puts c.weight here, but the file lacks it"]),
        ({"a.bias": SHARDS[1]}, [f"{SHARDS[1]}: {INDEX} puts a.bias here, but it is in {SHARDS[0]}"]),
        ({"b.codes": None}, [f"{SHARDS[1]}: holds b.codes, which {INDEX} lacks"]),
    ],
    ids=["only in the index", "in another shard", "only in the shard"],
)
def test_an_index_that_disagrees_with_its_shards_is_refused(
    sharded: Path, change: dict[str, str | None], expected: list[str]
) -> None:
    write_index(sharded, {name: file for name, file in {**WEIGHT_MAP, **change}.items() if file is not None})
    assert problems(sharded) == expected


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    save_file(
        {"b.weight": TENSORS["b.weight"], "b.codes": TENSORS["b.codes"], "a.bias": torch.ones(3)}, sharded / SHARDS[1]
    )
    assert f"{SHARDS[1]}: tensor a.bias is also in {SHARDS[0]}" in problems(sharded)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": null}', "\udcff"])
def test_an_index_without_a_weight_map_is_refused(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_bytes(content.encode(errors="surrogateescape"))
    assert problems(sharded)[0].startswith(f"{INDEX}: expected JSON with a weight_map, found")


def test_an_index_cannot_lead_out_of_its_folder(sharded: Path) -> None:
    outside = sharded.parent / "outside.safetensors"
    save_file({"c": torch.zeros(1)}, outside)
    write_index(sharded, {**WEIGHT_MAP, "c": "../outside.safetensors"})
    assert problems(sharded) == [f"../outside.safetensors: named in {INDEX}, but there is no such file"]


def test_two_files_without_an_index_are_refused(single: Path) -> None:
    save_file({"c": torch.zeros(1)}, single / "other.safetensors")
    assert problems(single) == [f"{INDEX}: 2 safetensors files need an index, found none"]


def test_a_folder_without_weights_is_refused(single: Path) -> None:
    (single / "model.safetensors").unlink()
    (problem,) = problems(single)
    assert problem == f"{single}: expected model.safetensors or shards with {INDEX}, found no weights"


def test_a_folder_without_a_config_is_refused(single: Path) -> None:
    (single / "config.json").unlink()
    assert problems(single) == ["config.json: expected the model's configuration, found no such file"]


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert problems(tmp_path / "nowhere")[0].endswith("found no such folder")


@pytest.mark.parametrize(("content", "found"), [(b"{", "expected JSON,"), (b"\xff{}", "JSON,"), (b"[]", "found list")])
def test_a_config_that_is_no_json_object_is_refused(single: Path, content: bytes, found: str) -> None:
    (single / "config.json").write_bytes(content)
    (problem,) = problems(single)
    assert problem.startswith("config.json: expected") and found in problem


def test_a_dtype_that_torch_code_here_does_not_handle_is_named(single: Path) -> None:
    header = json.dumps({"a.weight": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (single / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    assert problems(single) == ["model.safetensors: a.weight has the unsupported dtype F8_E4M3"]


def test_pickled_weights_are_refused_then_read_when_allowed_by_name(single: Path) -> None:
    (single / "model.safetensors").unlink()
    torch.save(TENSORS, single / "pytorch_model.bin")
    (problem,) = problems(single)
    assert "can run code when read" in problem and "`model: {allow_pickle: [pytorch_model.bin]}`" in problem
    assert len(problems(single, allow_pickle=("other.bin",))) == 1
    checkpoint = Folder(single, allow_pickle=("pytorch_model.bin",))
    assert dict(checkpoint.tensors) == {n: TensorInfo(t.dtype, tuple(t.shape)) for n, t in TENSORS.items()}
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in TENSORS.items())


def test_every_pickled_shard_is_named_in_one_line_and_what_the_trainer_left_is_none(single: Path) -> None:
    (single / "model.safetensors").unlink()
    shards = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    for shard, names in zip(shards, (["a.weight"], ["b.weight"]), strict=True):
        torch.save({name: torch.zeros(2) for name in names}, single / shard)
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"):
        torch.save([1], single / name)
    (problem,) = problems(single)
    assert problem.endswith(f"allow them by name: `model: {{allow_pickle: [{', '.join(shards)}]}}`")
    assert set(Folder(single, allow_pickle=tuple(shards)).tensors) == {"a.weight", "b.weight"}


class Attack:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, ("attacked",)


def test_an_allowed_pickle_still_runs_no_code(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(single)
    (single / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(1), "b": Attack()}, single / "pytorch_model.bin")
    (problem,) = problems(single, allow_pickle=("pytorch_model.bin",))
    assert problem.startswith("pytorch_model.bin: expected a dictionary of tensors")
    assert not (single / "attacked").exists()


@pytest.mark.parametrize("damage", ["truncated", "list", "numbers"])
def test_a_damaged_pickle_is_named(single: Path, damage: str) -> None:
    (single / "model.safetensors").unlink()
    file = single / "pytorch_model.bin"
    torch.save({"list": [torch.zeros(1)], "numbers": {"a": 1}}.get(damage, TENSORS), file)
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-200])
    (problem,) = problems(single, allow_pickle=("pytorch_model.bin",))
    assert problem.startswith("pytorch_model.bin: expected a dictionary of tensors as torch.save writes it, found")


def test_pickles_beside_safetensors_are_left_alone(single: Path) -> None:
    (single / "training_args.bin").write_bytes(b"whatever")
    assert Folder(single).skipped_files() == {"training_args.bin": "weights in another format"}


def test_side_files_are_carried_along_and_what_is_not_is_told(single: Path) -> None:
    for name in ("tokenizer.json", "LICENSE", "chat_template.jinja", "conversion.json", ".gitattributes", "model.onnx"):
        (single / name).write_text(name)
    (single / "pytorch_model.bin.index.json").write_text("{}")
    (single / "original").mkdir()
    with (single / "big.txt").open("wb") as file:
        file.truncate(64 * 2**20 + 1)
    checkpoint = Folder(single)
    assert checkpoint.side_files() == {n: single / n for n in ("LICENSE", "chat_template.jinja", "tokenizer.json")}
    assert checkpoint.skipped_files() == {
        "original/": "a folder",
        ".gitattributes": "a hidden file",
        "model.onnx": "weights in another format",
        "pytorch_model.bin.index.json": "weights in another format",
        "big.txt": "larger than 64 MiB",
    }


def test_hashes_cover_config_shards_and_side_files(sharded: Path) -> None:
    (sharded / "tokenizer.json").write_text("{}")
    hashes = Folder(sharded).hashes()
    assert set(hashes) == {"config.json", *SHARDS, "tokenizer.json"}
    assert hashes["tokenizer.json"] == hashlib.sha256(b"{}").hexdigest()
    with (sharded / SHARDS[0]).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    changed = Folder(sharded).hashes()
    assert {name for name in hashes if hashes[name] != changed[name]} == {SHARDS[0]}


PEAK = """
import resource, sys
from pathlib import Path
from models.checkpoint import Folder

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

# The imports may have peaked higher than what is in use now: filled up, so that whatever comes on top is seen.
start, ballast = peak(), []
while peak() < start + 2048:
    ballast.append(b"x" * 2**20)
for folder in sys.argv[1:]:
    before = peak()
    checkpoint = Folder(Path(folder), allow_pickle=("pytorch_model.bin",))
    assert float(checkpoint.read("small").sum()) == 4
    assert len(checkpoint.tensors) == 5
    print((peak() - before) * 1024)
"""


def test_opening_and_reading_one_tensor_takes_no_memory_for_the_others(tmp_path: Path) -> None:
    safe, pickled = folders = tmp_path / "safe", tmp_path / "pickled"
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    big = {f"big.{i}": torch.zeros(8, 2**20, dtype=torch.bfloat16) for i in range(4)}
    torch.save(big | {"small": torch.ones(4)}, pickled / "pytorch_model.bin")
    # A gibibyte that takes no room on the disk.
    header: dict[str, Any] = {"small": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    for i in range(4):
        offsets = [16 + (i << 28), 16 + (i + 1 << 28)]
        header[f"big.{i}"] = {"dtype": "BF16", "shape": [128, 2**20], "data_offsets": offsets}
    text = json.dumps(header).encode()
    with (safe / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + struct.pack("<4f", 1, 1, 1, 1))
        file.truncate(8 + len(text) + 16 + 2**30)
    command = [sys.executable, "-c", PEAK, *map(str, folders)]
    grown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert (pickled / "pytorch_model.bin").stat().st_size > 64 * 2**20
    assert len(grown) == 2 and max(map(int, grown)) < 20 * 2**20
