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

from calibrate.composition import TRAINING_WINDOWS, measures, trains
from convert.engines import Engines
from convert.sections import FILE_BUILDERS, Calibration, Dataset, Validation, dataset_arguments
from convert.target import Target
from convert.yaml_lines import (
    Problem,
    Section,
    Text,
    broken_rule,
    expected,
    folder_of,
    is_names,
    is_path,
    list_of_one,
    read,
    resolve_path,
)
from models.errors import BadInput

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_REPO = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_PACKAGE = re.compile(r"package:[A-Za-z][\w.-]*(/.+\.gguf)?")
_SIZE = re.compile(r"([1-9][0-9]*)\s*(KB|MB|GB)")
_SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def _allowed_names(value: Any) -> Any:
    if value is not False and not is_names(value):
        raise expected("false, or the list of what is allowed by name")
    return value


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


class Upload(Section):
    """Where `convert upload` and `convert run --upload` put artifacts; nothing is uploaded without being asked for.

    Attributes:
        repo: owner/name on the hub; `{target}` in it stands for a target's name.
        revision: the branch.
        create: whether the repository, and the branch, may be made.
        private: of a repository that is made; one that is there already must be private.
        base_model: the source's id on the hub, where it does not come from there.
        license: the source's, as the hub names licences, where its own card does not say.
    """

    repo: Text
    revision: Text = "main"
    create: bool = False
    private: bool = False
    base_model: Text | None = None
    license: Text | None = None

    @field_validator("repo", "base_model")
    @classmethod
    def _owner_and_name(cls, repo: str | None) -> str | None:
        if repo is not None and not _REPO.fullmatch(repo.replace("{target}", "target")):
            raise expected("owner/name, of letters, digits, '-', '_' and '.'")
        return repo


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
    upload: Upload | None = None
    work: Annotated[Text, Field(validate_default=True)] = "work"
    _path: Path = PrivateAttr(default=Path("pipeline.yaml"))

    @field_validator("targets")
    @classmethod
    def _methods_have_text(cls, targets: list[Target], info: ValidationInfo) -> list[Target]:
        # A calibration section with a problem of its own is not there.
        calibration = info.data.get("calibration", Calibration.model_construct(samples=TRAINING_WINDOWS))
        if any(trains(target.method) for target in targets) and getattr(calibration, "samples", 0) < TRAINING_WINDOWS:
            raise broken_rule(
                "method tune trains on some calibration windows and judges by others: it needs a `calibration`"
                f" section with at least {TRAINING_WINDOWS} samples"
            )
        measuring = [f"method {name}" for target in targets for name in measures(target.method)]
        measuring += ["bits_per_weight" for target in targets if target.bits_per_weight is not None]
        if measuring and calibration is None:
            raise broken_rule(f"{measuring[0]} measures on calibration text: it needs a `calibration` section")
        return targets

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

    @property
    def history_file(self) -> Path:
        """Absolute path of the history."""
        given = self.validation.history if self.validation else None
        return resolve_path(given, self.folder) if given else self.output_folder / "history.sqlite"

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

    @property
    def from_hub(self) -> bool:
        """Whether the model's source is a hub id."""
        source = self.model.source
        return not source.startswith("package:") and not is_path(source, self.folder)

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
        if dataset.path in FILE_BUILDERS:
            files = list_of_one(dataset.data_files) or []
            values["data_files"] = [file if "://" in file else moved(file) for file in files] or None
        elif is_path(dataset.path, self.folder):
            # As a path even where only its name is left, so that it is not taken for a hub id.
            name = moved(dataset.path)
            values["path"] = name if name.startswith(".") else f"./{name}"
        return values


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
