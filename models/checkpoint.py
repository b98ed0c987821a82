"""Checkpoints as named lazy tensors: reading sharded safetensors folders, and writing them in a stream."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from models.errors import BadInput
from models.files import sha256, to_json

INDEX = "model.safetensors.index.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
# What transformers' Trainer pickles beside the weights.
TRAINER_FILES = ("training_args.bin", "optimizer.", "scheduler.", "scaler.", "rng_state")
SIDE_FILE_LIMIT = 64 * 2**20
# Rewritten for every artifact instead of copied.
OWN_FILES = ("config.json", "quantize_config.json", "conversion.json")
DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorInfo:
    """What a header says about a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


class Checkpoint(ABC):
    """Named tensors that are read when asked for, a model configuration, and the files beside them.

    Attributes:
        name: what the user calls it, for messages and the ledger.
        config: the content of ``config.json``.
        tensors: every tensor's name, dtype and shape, from headers only.
        license: the licence that the container itself states, if it does.
    """

    name: str
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    license: str | None = None

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The tensor, in its stored dtype. Raises KeyError for an unknown name."""

    @abstractmethod
    def side_files(self) -> dict[str, Path]:
        """Small files to carry along (tokenizer, chat template, licence ...), by file name."""

    @abstractmethod
    def skipped_files(self) -> dict[str, str]:
        """Files and folders beside the weights that are not carried along, with the reason."""

    @abstractmethod
    def hashes(self) -> dict[str, str]:
        """SHA-256 of every file that decides the content, by file name."""


class View(Checkpoint):
    """Another checkpoint seen otherwise: whatever a subclass does not say is the other's, files included."""

    def __init__(self, base: Checkpoint) -> None:
        self.base = base
        self.name, self.config, self.tensors = base.name, base.config, base.tensors

    def read(self, name: str) -> torch.Tensor:
        return self.base.read(name)

    def side_files(self) -> dict[str, Path]:
        return self.base.side_files()

    def skipped_files(self) -> dict[str, str]:
        return self.base.skipped_files()

    def hashes(self) -> dict[str, str]:
        return self.base.hashes()


class Folder(Checkpoint):
    """A folder with ``config.json`` and ``model.safetensors``, or shards and their index.

    Raises:
        BadInput: listing everything that is wrong: missing, extra, truncated or disagreeing shards, no config,
            pickled weights that were not allowed by name.
    """

    def __init__(self, path: Path, name: str | None = None, allow_pickle: tuple[str, ...] = ()) -> None:
        self.path = path
        self.name = name or str(path)
        self.config = _read_config(path)
        self._tensor_files: dict[str, Path] = {}
        tensors: dict[str, TensorInfo] = {}
        problems: list[str] = []
        files, index = _weight_files(path, allow_pickle, problems)
        for file in files:
            for tensor, info in _headers(file, problems).items():
                if tensor in tensors:
                    problems.append(f"{file}: tensor {tensor} is also in {self._tensor_files[tensor].name}")
                tensors[tensor], self._tensor_files[tensor] = info, file
        problems += _index_problems(path, index, {t: f.name for t, f in self._tensor_files.items()}, problems)
        if problems:
            raise BadInput(problems)
        self.tensors = tensors

    def read(self, name: str) -> torch.Tensor:
        file = self._tensor_files[name]
        if file.suffix != ".safetensors":
            return _pickled(file)[name]
        with safe_open(file, "pt") as handle:
            return handle.get_tensor(name)

    @property
    def weight_files(self) -> list[Path]:
        return sorted(set(self._tensor_files.values()))

    @cached_property
    def _beside(self) -> tuple[dict[str, Path], dict[str, str]]:
        side, skipped = {}, {}
        for path in sorted(self.path.iterdir()):
            if path.name in OWN_FILES or path in self.weight_files or path.name == INDEX:
                continue
            if path.is_dir():
                skipped[path.name + "/"] = "a folder"
            elif path.name.startswith("."):
                skipped[path.name] = "a hidden file"
            elif path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json"):
                skipped[path.name] = "weights in another format"
            elif path.stat().st_size > SIDE_FILE_LIMIT:
                skipped[path.name] = f"larger than {SIDE_FILE_LIMIT >> 20} MiB"
            else:
                side[path.name] = path
        return side, skipped

    def side_files(self) -> dict[str, Path]:
        return self._beside[0]

    def skipped_files(self) -> dict[str, str]:
        return self._beside[1]

    def hashes(self) -> dict[str, str]:
        files = [self.path / "config.json", *self.weight_files, *self.side_files().values()]
        return {file.name: sha256(file) for file in files}


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not path.is_dir():
        raise BadInput(f"{path}: expected a folder with config.json and safetensors, found no such folder")
    if not file.is_file():
        raise BadInput(f"{file}: expected the model's configuration, found no such file")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise BadInput(f"{file}: expected JSON, found {error}") from error
    if not isinstance(config, dict):
        raise BadInput(f"{file}: expected a JSON object, found {type(config).__name__}")
    return config


def _weight_files(
    path: Path, allow_pickle: tuple[str, ...], problems: list[str]
) -> tuple[list[Path], dict[str, str] | None]:
    """The files to read, and the index's tensor -> file map when there is one."""
    # Mistral ships the same weights a second time, in its own format, beside the shards.
    found = sorted(p for p in path.glob("*.safetensors") if not p.name.startswith("consolidated"))
    pickled = sorted(p for p in path.iterdir() if is_pickled(p.name))
    if not found and pickled:
        refused = [file.name for file in pickled if file.name not in allow_pickle]
        if refused:
            problems.append(pickled_message(f"{path}: expected safetensors", refused))
        return [file for file in pickled if file.name in allow_pickle], None
    index_file = path / INDEX
    if index_file.is_file():
        try:
            index = {str(k): str(v) for k, v in json.loads(index_file.read_text("utf-8"))["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"{index_file}: expected JSON with a weight_map, found {error!r}")
            return found, None
        named = sorted({path / file for file in index.values()})
        problems.extend(f"{file}: named in {INDEX}, but there is no such file" for file in named if file not in found)
        problems.extend(f"{file}: not named in {INDEX}" for file in found if file not in named)
        return [file for file in named if file in found], index
    if not found:
        problems.append(f"{path}: expected model.safetensors or shards with {INDEX}, found no weights")
    elif len(found) > 1:
        problems.append(f"{index_file}: {len(found)} safetensors files need an index, found none")
    return found, None


def is_pickled(name: str) -> bool:
    """Whether a file of that name holds pickled weights."""
    return name.endswith(PICKLED) and not name.startswith(TRAINER_FILES)


def pickled_message(expected: str, names: Sequence[str]) -> str:
    """What is said of pickled weights that were not allowed by name."""
    listed = ", ".join(names)
    return (
        f"{expected}, found pickled weights ({listed}), which can run code when read; allow them by name:"
        f" `model: {{allow_pickle: [{listed}]}}`"
    )


def _headers(file: Path, problems: list[str]) -> dict[str, TensorInfo]:
    if file.suffix != ".safetensors":
        return _pickled_headers(file, problems)
    infos: dict[str, TensorInfo] = {}
    try:
        with safe_open(file, "pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - not a dict
                part = handle.get_slice(name)
                dtype = DTYPES.get(part.get_dtype())
                if dtype is None:
                    problems.append(f"{file}: {name} has the unsupported dtype {part.get_dtype()}")
                    continue
                infos[name] = TensorInfo(dtype, tuple(part.get_shape()))
    except (SafetensorError, OSError) as error:
        problems.append(f"{file}: truncated or not a safetensors file ({error})")
    return infos


def _pickled_headers(file: Path, problems: list[str]) -> dict[str, TensorInfo]:
    try:
        return {name: TensorInfo(t.dtype, tuple(t.shape)) for name, t in _pickled(file).items()}
    # Damaged pickles fail in many ways: whatever is read as an instruction, or no dictionary of tensors at the end.
    except Exception as error:
        problems.append(f"{file}: expected a dictionary of tensors as torch.save writes it, found {error}")
        return {}


def _index_problems(path: Path, index: dict[str, str] | None, found: dict[str, str], already: list[str]) -> list[str]:
    """Where the index and the shards disagree; a shard that could not be read is not reported again."""
    if index is None or already:
        return []
    problems = []
    for name, file in index.items():
        if name not in found:
            problems.append(f"{path / file}: {INDEX} puts {name} here, but the file lacks it")
        elif found[name] != file:
            problems.append(f"{path / file}: {INDEX} puts {name} here, but it is in {found[name]}")
    problems.extend(f"{path / found[name]}: holds {name}, which {INDEX} lacks" for name in found if name not in index)
    return problems


def _pickled(file: Path) -> dict[str, torch.Tensor]:
    """Memory-mapped and limited to tensors (``weights_only``)."""
    return torch.load(file, map_location="cpu", mmap=True, weights_only=True)


class Writer:
    """Writes tensors into shards of at most ``shard_bytes`` as they come, holding one shard in memory.

    ``finish`` gives the shards their final names and writes the index when there is more than one.
    """

    def __init__(self, folder: Path, shard_bytes: int, metadata: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.shard_bytes = shard_bytes
        self.metadata = {"format": "pt", **(metadata or {})}
        self.total_bytes = 0
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._pointers: set[int] = set()
        self._shards: list[list[str]] = []
        self._names: set[str] = set()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes the next tensor. Raises ValueError when a name comes twice."""
        if name in self._names:
            raise ValueError(f"tensor {name} was written twice")
        self._names.add(name)
        size = tensor.numel() * tensor.dtype.itemsize
        if self._pending and self._pending_bytes + size > self.shard_bytes:
            self._flush()
        # A copy where memory is shared, which safetensors refuses and which would keep the whole of it alive.
        shared = tensor.untyped_storage().nbytes() != size or tensor.data_ptr() in self._pointers
        self._pending[name] = tensor.contiguous().clone() if shared else tensor.contiguous()
        self._pointers.add(tensor.data_ptr())
        self._pending_bytes += size
        self.total_bytes += size

    def _flush(self) -> None:
        save_file(self._pending, self._temporary(len(self._shards)), metadata=self.metadata)
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes, self._pointers = {}, 0, set()

    def _temporary(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05d}.safetensors"

    def finish(self) -> list[str]:
        """Writes what is pending and the index; returns the names of the weight files."""
        if self._pending or not self._shards:
            self._flush()
        count = len(self._shards)
        if count == 1:
            self._temporary(0).rename(self.folder / "model.safetensors")
            return ["model.safetensors"]
        files: list[str] = []
        weight_map: dict[str, str] = {}
        for shard, names in enumerate(self._shards):
            file = f"model-{shard + 1:05d}-of-{count:05d}.safetensors"
            self._temporary(shard).rename(self.folder / file)
            files.append(file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / INDEX).write_bytes(to_json(index))
        return [*files, INDEX]
