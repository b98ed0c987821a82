"""The sections of a pipeline.yaml that name a text: calibration and validation, with their data sets and gates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from calibrate.text import BosPolicy
from convert.yaml_lines import (
    Section,
    Text,
    broken_rule,
    broken_rules,
    expected,
    folder_of,
    is_names,
    is_path,
    list_of_one,
    resolve_path,
)

# Builders that `datasets` ships: their data files are files of this machine, so a missing one is found before any work.
FILE_BUILDERS = ("text", "json", "csv", "parquet", "arrow")
# The names of validate.positioning, without its imports; a test compares them.
Peer = Literal[
    "llama.cpp:Q4_0",
    "llama.cpp:Q5_0",
    "llama.cpp:Q8_0",
    "llama.cpp:Q4_K_S",
    "llama.cpp:Q4_K_M",
    "llama.cpp:Q5_K_S",
    "llama.cpp:Q5_K_M",
    "llama.cpp:Q6_K",
]
# One in so many tokens is scored by the engine as well, in windows enough to tell their spread.
ENGINE_SHARE, ENGINE_WINDOWS = 16, 2
Count = Annotated[int, Field(ge=1)]
# Windows of one token predict nothing.
WindowLength = Annotated[int, Field(ge=2)]
NotNegative = Annotated[float, Field(ge=0)]


def _file_names(value: Any) -> Any:
    if not (value is None or (isinstance(value, str) and value) or (is_names(value) and value)):
        raise expected("a file name or a list of file names")
    return value


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
        local = path not in FILE_BUILDERS and is_path(path, folder_of(info))
        if local and not resolve_path(path, folder_of(info)).exists():
            raise broken_rule(f"no such file or folder: {resolve_path(path, folder_of(info))}")
        return path

    @field_validator("data_files")
    @classmethod
    def _files_exist(cls, files: str | list[str] | None, info: ValidationInfo) -> str | list[str] | None:
        if info.data.get("path") in FILE_BUILDERS:
            for file in list_of_one(files) or []:
                special = "://" in file or any(character in file for character in "*?[")
                if not special and not resolve_path(file, folder_of(info)).is_file():
                    raise broken_rule(f"no such file: {resolve_path(file, folder_of(info))}")
        return files


class Calibration(Section):
    """The text that methods see: `samples` windows of `sequence_length` tokens, drawn with `seed`, and `generated`
    windows besides that the model writes itself."""

    dataset: Dataset
    samples: Count = 64
    generated: Annotated[int, Field(ge=0)] = 0
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
        no_worse_than: `last` or `best` of the history, a run's id there, or another run's report.json: the perplexity
            may not be above that run's by more than their noise.
    """

    max_perplexity_increase: NotNegative | None = None
    max_kl: NotNegative | None = None
    min_top1: Annotated[float, Field(ge=0, le=1)] | None = None
    min_greedy_identical: Annotated[int, Field(ge=0)] | None = None
    max_engine_gap: NotNegative | None = None
    min_snr_db: float | None = None
    max_bits_per_weight: Annotated[float, Field(gt=0)] | None = None
    no_worse_than: Text | None = None

    @field_validator("no_worse_than")
    @classmethod
    def _report_exists(cls, wanted: str | None, info: ValidationInfo) -> str | None:
        if wanted is not None and wanted.endswith(".json") and not resolve_path(wanted, folder_of(info)).is_file():
            raise broken_rule(f"no such file: {resolve_path(wanted, folder_of(info))}")
        return wanted


def _engine_tokens(tokens: int, sequence_length: int, **others: Any) -> int:
    return min(tokens, max(ENGINE_WINDOWS * sequence_length, tokens // ENGINE_SHARE))


class Validation(Section):
    """How artifacts are compared with the reference.

    Attributes:
        sequence_length: tokens per window; windows do not overlap.
        tokens: how many are scored.
        engine: whether the engine's own arithmetic is scored too.
        engine_tokens: how many the engine scores; unless given a sixteenth of `tokens`, as its arithmetic costs several
            times the weights' own, and at least two windows.
        engines: that run every artifact that they load, beside the arithmetic.
        bos: what stands before each window, of calibration text as well: what the tokenizer itself puts before a text
            (`auto`, also without this section), nothing (`never`), or its token for the beginning of a text (`always`).
        long_context: windows of four times the model's sliding window to score besides, with a needle in each.
        strict: refuse an evaluation text that is part of the calibration text, instead of warning.
        history: the file that every run adds to; `history.sqlite` in the output folder unless given.
        positioning: what others make of the same source, measured beside the artifacts.
    """

    dataset: Dataset
    sequence_length: WindowLength = 512
    tokens: Annotated[int, Field(validate_default=True)] = 40960
    greedy: Greedy = Greedy()
    engine: bool = True
    engine_tokens: int = Field(default_factory=lambda data: _engine_tokens(**data))
    engines: list[Literal["vllm", "gptqmodel", "transformers", "onnxruntime", "qnn"]] = []
    bos: BosPolicy = "auto"
    long_context: Annotated[int, Field(ge=0)] = 0
    strict: bool = False
    history: Text | None = None
    positioning: list[Peer] = []
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


def dataset_arguments(dataset: Dataset, folder: Path) -> dict[str, Any]:
    """Keyword arguments for `datasets.load_dataset`, with absolute paths for what is on this machine.

    Args:
        folder: where the data set's relative paths start.
    """
    arguments: dict[str, Any] = {"path": dataset.path, "split": dataset.split}
    if is_path(dataset.path, folder) and dataset.path not in FILE_BUILDERS:
        arguments["path"] = str(resolve_path(dataset.path, folder))
    if dataset.name is not None:
        arguments["name"] = dataset.name
    if dataset.data_files is not None:
        # Patterns of local files need the folder as well; a hub data set's files are relative to the data set.
        local = dataset.path in FILE_BUILDERS
        arguments["data_files"] = [
            str(resolve_path(file, folder)) if local and "://" not in file else file
            for file in list_of_one(dataset.data_files)
        ]
    return arguments
