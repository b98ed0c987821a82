"""pipeline.yaml as typed, frozen models: every key with its default, and the rules between keys.

The models hold what the file says, word for word, so that `model_dump(mode="json")` is the same on every machine; the
absolute paths come from `Pipeline`'s methods, which resolve against the yaml's folder.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationInfo, field_validator

from convert.engines import Engines
from convert.target import Target
from convert.yaml_lines import (
    Problem,
    Section,
    Text,
    broken_rule,
    broken_rules,
    expected,
    folder_of,
    is_path,
    list_of_one,
    read,
    resolve_path,
)
from models.errors import BadInput

# Builders that `datasets` ships: their data files are files of this machine, so a missing one is found before any work.
_FILE_BUILDERS = ("text", "json", "csv", "parquet", "arrow")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_PACKAGE = re.compile(r"package:[A-Za-z][\w.-]*(/.+\.gguf)?")
_SIZE = re.compile(r"([1-9][0-9]*)\s*(KB|MB|GB)")
_SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)


def _allowed_names(value: Any) -> Any:
    if value is not False and not _is_names(value):
        raise expected("false, or the list of what is allowed by name")
    return value


def _file_names(value: Any) -> Any:
    if not (value is None or (isinstance(value, str) and value) or (_is_names(value) and value)):
        raise expected("a file name or a list of file names")
    return value


Count = Annotated[int, Field(ge=1)]
# Windows of one token predict nothing.
WindowLength = Annotated[int, Field(ge=2)]
NotNegative = Annotated[float, Field(ge=0)]
AllowedNames = Annotated[Literal[False] | list[str], BeforeValidator(_allowed_names)]


class Model(Section):
    """Where the model comes from.

    Attributes:
        source: a folder, a hub id, a .gguf file or `package:<name>[/file.gguf]`.
        revision: of a hub id: branch, tag or commit.
        dtype: what the reference computes in.
        trust_remote_code: false, or the names of the Python modules of the checkpoint that may run.
        allow_pickle: false, or the names of the pickled weight files that may be opened.
    """

    source: Text
    revision: Text | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    trust_remote_code: AllowedNames = False
    allow_pickle: AllowedNames = False

    @field_validator("source")
    @classmethod
    def _source_exists(cls, source: str, info: ValidationInfo) -> str:
        if source.startswith("package:"):
            if not _PACKAGE.fullmatch(source):
                raise expected("'package:<name>' or 'package:<name>/<file>.gguf'")
        elif is_path(source, folder_of(info)):
            path = resolve_path(source, folder_of(info))
            if not path.exists():
                raise broken_rule(f"no such file or folder: {path}")
            if path.is_file() and path.suffix != ".gguf":
                raise expected("a folder, a .gguf file, a hub id or 'package:<name>'")
        elif not _HUB_ID.fullmatch(source):
            raise expected("an existing folder, a .gguf file, a hub id (owner/name) or 'package:<name>'")
        return source

    @field_validator("revision")
    @classmethod
    def _revision_of_hub_id(cls, revision: str | None, info: ValidationInfo) -> str | None:
        source = info.data.get("source", "")
        local = source.startswith("package:") or is_path(source, folder_of(info))
        if revision is not None and source and local:
            raise broken_rule("only a hub id has revisions; this source is on this machine")
        return revision


class Dataset(Section):
    """Text, as `datasets.load_dataset` opens it.

    Attributes:
        path: a builder (`text`, `json`, ...), a folder or a hub id.
        name: configuration of the data set.
        data_files: files or glob patterns.
        split: as in `datasets`, slices included (`train[:1000]`).
        column: the column with the text.
    """

    path: Text
    name: Text | None = None
    data_files: Annotated[str | list[str] | None, BeforeValidator(_file_names)] = None
    split: Text = "train"
    column: Text = "text"

    @field_validator("path")
    @classmethod
    def _folder_exists(cls, path: str, info: ValidationInfo) -> str:
        local = path not in _FILE_BUILDERS and is_path(path, folder_of(info))
        if local and not resolve_path(path, folder_of(info)).exists():
            raise broken_rule(f"no such file or folder: {resolve_path(path, folder_of(info))}")
        return path

    @field_validator("data_files")
    @classmethod
    def _files_exist(cls, files: str | list[str] | None, info: ValidationInfo) -> str | list[str] | None:
        if info.data.get("path") in _FILE_BUILDERS:
            for file in list_of_one(files) or []:
                special = "://" in file or any(character in file for character in "*?[")
                if not special and not resolve_path(file, folder_of(info)).is_file():
                    raise broken_rule(f"no such file: {resolve_path(file, folder_of(info))}")
        return files


class Calibration(Section):
    """The text that methods see: `samples` windows of `sequence_length` tokens, drawn with `seed`."""

    dataset: Dataset
    samples: Count = 64
    sequence_length: WindowLength = 512
    seed: Annotated[int, Field(ge=0)] = 0


class Greedy(Section):
    """Greedy continuations: `prompts` prompts of `prompt_tokens` tokens, each continued by `tokens` tokens."""

    prompts: Count = 16
    prompt_tokens: Count = 32
    tokens: Count = 32


class Gates(Section):
    """What an artifact must hold to pass; a gate that is not given passes.

    Attributes:
        max_perplexity_increase: of the ratio to the reference, minus one (0.05 is five percent).
        max_kl: mean KL divergence from the reference, in nats.
        min_top1: share of positions with the reference's most likely token, 0 to 1.
        min_greedy_identical: number of greedy continuations identical to the reference's.
        max_engine_gap: relative difference of the engine's perplexity from that of the expanded weights.
        min_snr_db: signal-to-noise ratio of the logits.
        max_bits_per_weight: over the quantised linears.
    """

    max_perplexity_increase: NotNegative | None = None
    max_kl: NotNegative | None = None
    min_top1: Annotated[float, Field(ge=0, le=1)] | None = None
    min_greedy_identical: Annotated[int, Field(ge=0)] | None = None
    max_engine_gap: NotNegative | None = None
    min_snr_db: float | None = None
    max_bits_per_weight: Annotated[float, Field(gt=0)] | None = None


class Validation(Section):
    """How artifacts are compared with the reference.

    Attributes:
        sequence_length: tokens per window; windows do not overlap.
        tokens: how many are scored.
        engine: whether the engine's own arithmetic is scored too.
        engine_tokens: how many the engine scores; as many as `tokens` unless given.
        engines: that run every artifact that they load, beside the arithmetic.
    """

    dataset: Dataset
    sequence_length: WindowLength = 512
    tokens: Annotated[int, Field(validate_default=True)] = 40960
    greedy: Greedy = Greedy()
    engine: bool = True
    engine_tokens: int = Field(default_factory=lambda data: data["tokens"])
    engines: list[Literal["vllm", "gptqmodel", "transformers"]] = []
    gates: Gates = Gates()

    @field_validator("tokens", "engine_tokens")
    @classmethod
    def _at_least_a_window(cls, tokens: int, info: ValidationInfo) -> int:
        window = info.data.get("sequence_length", 2)
        if tokens < window:
            raise broken_rule(f"expected at least one window (sequence_length {window}), found {tokens}")
        if tokens > info.data.get("tokens", tokens):
            raise broken_rule(f"expected at most tokens ({info.data['tokens']}), found {tokens}")
        return tokens

    @field_validator("engine_tokens")
    @classmethod
    def _engine_runs(cls, tokens: int, info: ValidationInfo) -> int:
        if info.data.get("engine") is False:
            raise broken_rule("`engine: false` would ignore this key")
        return tokens

    @field_validator("gates")
    @classmethod
    def _gates_can_hold(cls, gates: Gates, info: ValidationInfo) -> Gates:
        reasons = {}
        greedy: Greedy | None = info.data.get("greedy")
        if greedy and (gates.min_greedy_identical or 0) > greedy.prompts:
            reasons["min_greedy_identical"] = (
                f"expected at most greedy.prompts ({greedy.prompts}), found {gates.min_greedy_identical}"
            )
        if gates.max_engine_gap is not None and info.data.get("engine") is False and not info.data.get("engines"):
            reasons["max_engine_gap"] = "this gate needs `engine: true` or engines"
        if reasons:
            raise broken_rules(reasons)
        return gates


class Output(Section):
    """Where artifacts go: a folder a target below `path`, weights in files of at most `shard_size` (1 GB is 10^9)."""

    path: Text = "output"
    shard_size: str = "2GB"

    @property
    def shard_bytes(self) -> int:
        """`shard_size` in bytes."""
        match = _SIZE.fullmatch(self.shard_size)
        assert match  # the validator has seen it
        return int(match[1]) * _SIZE_UNITS[match[2]]

    @field_validator("shard_size")
    @classmethod
    def _size(cls, size: str) -> str:
        if not _SIZE.fullmatch(size):
            raise expected("a size such as 500MB or 2GB")
        return size


def _output(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


class Pipeline(Section):
    """A whole pipeline.yaml."""

    model: Model
    calibration: Calibration | None = None
    targets: Annotated[list[Target], Field(min_length=1)]
    validation: Validation | None = None
    engines: Engines = Engines()
    output: Annotated[Output, BeforeValidator(_output)] = Output()
    work: Annotated[Text, Field(validate_default=True)] = "work"
    _path: Path = PrivateAttr(default=Path("pipeline.yaml"))

    @field_validator("work")
    @classmethod
    def _work_is_not_output(cls, work: str, info: ValidationInfo) -> str:
        output = info.data.get("output")
        if output and resolve_path(work, Path("/")) == resolve_path(output.path, Path("/")):
            raise broken_rule(f"expected a folder other than output ('{output.path}')")
        return work

    @property
    def path(self) -> Path:
        """The yaml."""
        return self._path

    @property
    def folder(self) -> Path:
        """The yaml's folder, absolute: where relative paths start."""
        return self._path.absolute().parent

    @property
    def output_folder(self) -> Path:
        """Absolute folder of the artifacts."""
        return resolve_path(self.output.path, self.folder)

    @property
    def work_folder(self) -> Path:
        """Absolute folder of the intermediate results."""
        return resolve_path(self.work, self.folder)

    def with_work(self, folder: Path) -> Pipeline:
        """This pipeline with another work folder, relative to the current folder."""
        other = self.model_copy(update={"work": str(folder.absolute())})
        other._path = self._path
        if other.work_folder == other.output_folder:
            raise BadInput(f"--work {folder}: expected a folder other than output")
        return other

    @property
    def source(self) -> str:
        """The model's source: an absolute path, or the hub id or `package:` name as it stands in the file."""
        source = self.model.source
        if source.startswith("package:") or not is_path(source, self.folder):
            return source
        return str(resolve_path(source, self.folder))

    def device_file(self, target: Target) -> Path | None:
        """The device profile that a target of format auto names."""
        return None if target.device is None else resolve_path(target.device, self.folder)

    def dataset_arguments(self, dataset: Dataset) -> dict[str, Any]:
        """See `dataset_arguments`."""
        return dataset_arguments(dataset, self.folder)

    def portable(self, dataset: Dataset, folder: Path) -> dict[str, Any]:
        """A data set in the words of the yaml, with paths that start at ``folder`` instead of the yaml's folder.

        An absolute path, or any path to an output that is absolute, says something of this machine only: its last
        part stands for it.
        """
        absolute = Path(self.output.path).expanduser().is_absolute()

        def moved(raw: str) -> str:
            if absolute or Path(raw).expanduser().is_absolute():
                return "./" + Path(raw).name
            return os.path.relpath(resolve_path(raw, self.folder), folder)

        values: dict[str, Any] = dataset.model_dump(mode="json")
        if dataset.path in _FILE_BUILDERS:
            files = list_of_one(dataset.data_files) or []
            values["data_files"] = [file if "://" in file else moved(file) for file in files] or None
        elif is_path(dataset.path, self.folder):
            # As a path even where only its name is left, so that it is not taken for a hub id.
            name = moved(dataset.path)
            values["path"] = name if name.startswith(".") else f"./{name}"
        return values


def dataset_arguments(dataset: Dataset, folder: Path) -> dict[str, Any]:
    """Keyword arguments for `datasets.load_dataset`, with absolute paths for what is on this machine.

    Args:
        folder: where the data set's relative paths start.
    """
    arguments: dict[str, Any] = {"path": dataset.path, "split": dataset.split}
    if is_path(dataset.path, folder) and dataset.path not in _FILE_BUILDERS:
        arguments["path"] = str(resolve_path(dataset.path, folder))
    if dataset.name is not None:
        arguments["name"] = dataset.name
    if dataset.data_files is not None:
        # Patterns of local files need the folder as well; a hub data set's files are relative to the data set.
        local = dataset.path in _FILE_BUILDERS
        arguments["data_files"] = [
            str(resolve_path(file, folder)) if local and "://" not in file else file
            for file in list_of_one(dataset.data_files)
        ]
    return arguments


def load(path: Path) -> Pipeline:
    """Reads and checks a pipeline.yaml; raises BadInput with every problem and its line."""
    document = read(path)
    pipeline = document.validate(Pipeline, _names_used_twice(document.data))
    pipeline._path = path
    return pipeline


def _names_used_twice(data: Any) -> list[Problem]:
    """On the raw data, so that it is found also when a target has another problem."""
    targets = data.get("targets") if isinstance(data, dict) else None
    problems: list[Problem] = []
    first: dict[str, int] = {}
    for index, target in enumerate(targets if isinstance(targets, list) else []):
        name = target.get("name", target.get("format")) if isinstance(target, dict) else None
        if not isinstance(name, str):
            continue
        # Some file systems do not tell Gptq from gptq.
        earlier = first.setdefault(name.casefold(), index)
        if earlier != index:
            problems.append(
                (("targets", index, "name"), f"'{name}' is used twice, first by targets[{earlier}]; each needs its own")
            )
    return problems
