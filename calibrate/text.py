"""Token windows from `datasets`: the one place that decides how text becomes calibration and evaluation tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from models.errors import BadInput
from models.files import environment_problem


@dataclass(frozen=True)
class Text:
    """Where text comes from; the arguments of ``datasets.load_dataset``.

    Attributes:
        path: a dataset's hub id, or a builder's name (``text``, ``json``, ``parquet``, ``csv``).
        name: the dataset's configuration.
        data_files: resolved paths or patterns for a builder.
        split, column: which rows, and which column of them.
    """

    path: str
    name: str | None = None
    data_files: tuple[str, ...] = ()
    split: str = "train"
    column: str = "text"


def load_text(text: Text, cache: Path) -> str:
    """The rows of the column joined by line breaks, which gives a text file back up to its last line break.

    Raises:
        BadInput: when the dataset, split or column does not exist, or holds no text.
        EnvironmentProblem: when there is no room for the copy that `datasets` makes.
    """
    import datasets

    datasets.disable_progress_bars()
    local = [Path(f) for f in text.data_files if "://" not in f and "*" not in f]
    missing = [file for file in local if not file.is_file()]
    if missing:
        raise BadInput(f"dataset: expected a file, found none at {file}" for file in missing)
    empty = f"dataset {text.path} {' '.join(text.data_files)}: the text is empty"
    # `datasets` has a message of its own for this, about features.
    if local and len(local) == len(text.data_files) and not any(file.stat().st_size for file in local):
        raise BadInput(empty)
    try:
        rows = datasets.load_dataset(
            text.path,
            text.name,
            data_files=list(text.data_files) or None,
            split=text.split,
            cache_dir=str(cache),
        )
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        # `datasets` writes a copy of the text, and wraps what goes wrong then in errors of its own.
        known = None if isinstance(error, PermissionError) else environment_problem(error)
        if known is not None:
            raise known from error
        # What failed is in the cause; the error itself only says that something did.
        told = " ".join(f"{error} {error.__cause__ or ''}".split())
        raise BadInput(f"dataset {text.path} {' '.join(text.data_files)}: {told}") from error
    if text.column not in rows.column_names:
        raise BadInput(f"dataset {text.path}: column: expected one of {rows.column_names}, found {text.column!r}")
    joined = "\n".join("" if row is None else str(row) for row in rows[text.column])
    if not joined.strip():
        raise BadInput(empty)
    return joined


@dataclass(frozen=True)
class Windows:
    """Token windows cut from a text.

    Attributes:
        ids: int64 [windows, sequence_length].
        available: how many full windows the whole text holds.
        text_sha256: of the text that was tokenised.
    """

    ids: torch.Tensor
    available: int
    text_sha256: str

    @property
    def tokens(self) -> int:
        return self.ids.numel()

    def digest(self) -> str:
        """SHA-256 of the ids and their shape: what a cache of results over them is keyed by."""
        content = self.ids.numpy().tobytes() + repr(tuple(self.ids.shape)).encode()
        return hashlib.sha256(content).hexdigest()


def tokenise(tokenizer: Any, text: str) -> torch.Tensor:
    """The whole text's token ids, int64 [tokens], without special tokens."""
    # A whole book is longer than the model's context: that is meant, and cut into windows below.
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def cut_windows(ids: torch.Tensor, count: int, length: int, what: str) -> torch.Tensor:
    """``count`` non-overlapping windows of ``length`` tokens, evenly spread: number i * total // count.

    Args:
        ids: int64 [tokens].
        what: names the text in the error.

    Raises:
        BadInput: when the text has fewer full windows than asked for.
    """
    total = len(ids) // length
    if total < count:
        raise BadInput(
            f"{what}: expected at least {count} windows of {length} tokens ({count * length} tokens),"
            f" found {len(ids)} tokens ({total} windows)"
        )
    chosen = [i * total // count for i in range(count)]
    return ids[: total * length].view(total, length)[chosen]


def evaluation_windows(tokenizer: Any, text: str, tokens: int, length: int) -> Windows:
    """Evenly spread windows that hold ``tokens`` tokens (rounded down to whole windows, at least one)."""
    ids = tokenise(tokenizer, text)
    windows = cut_windows(ids, max(1, tokens // length), length, "validation text")
    return Windows(windows, len(ids) // length, hashlib.sha256(text.encode()).hexdigest())


def calibration_windows(tokenizer: Any, text: str, samples: int, length: int, seed: int) -> Windows:
    """``samples`` windows chosen at random by ``seed`` among all non-overlapping ones, in text order."""
    ids = tokenise(tokenizer, text)
    every = cut_windows(ids, max(samples, len(ids) // length), length, "calibration text")
    chosen = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))[:samples].sort().values
    return Windows(every[chosen], len(every), hashlib.sha256(text.encode()).hexdigest())


def check_vocabulary(tokenizer: Any, ids: torch.Tensor, vocabulary: int, name: str) -> None:
    """Raises BadInput when the tokenizer gives ids that the embedding table does not have."""
    largest = int(ids.max())
    if largest >= vocabulary:
        raise BadInput(
            f"{name}: the tokenizer does not match the model: expected ids below {vocabulary}"
            f" (config.json: vocab_size), found {largest}"
        )
