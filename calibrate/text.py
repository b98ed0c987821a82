"""Token windows from `datasets`: the one place that decides how text becomes calibration and evaluation tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from models.errors import BadInput
from models.files import environment_problem

NO_BOS = "none: the text is tokenised whole without special tokens and cut into windows"
BosPolicy = Literal["auto", "never", "always"]


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
        bos: what stands before each window's text, in words.
        text_ids: int64 [tokens] of the whole text; empty where nobody needs them.
    """

    ids: torch.Tensor
    available: int
    text_sha256: str
    bos: str = NO_BOS
    text_ids: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    @property
    def tokens(self) -> int:
        return self.ids.numel()

    def digest(self) -> str:
        """SHA-256 of the ids and their shape: what a cache of results over them is keyed by."""
        return digest_of(self.ids)


def digest_of(ids: torch.Tensor) -> str:
    """SHA-256 of token ids and their shape."""
    return hashlib.sha256(ids.numpy().tobytes() + repr(tuple(ids.shape)).encode()).hexdigest()


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


@dataclass(frozen=True)
class Leading:
    """Tokens that stand before every window of text, and the policy in words."""

    ids: tuple[int, ...] = ()
    bos: str = NO_BOS


def leading_tokens(tokenizer: Any, policy: BosPolicy) -> Leading:
    """What a window begins with: by ``auto`` what the tokenizer itself puts before a text, if anything.

    Perplexities under different policies do not compare; models that were trained with a first token do badly
    without it.

    Raises:
        BadInput: when ``always`` is asked of a tokenizer that has no such token.
    """
    if policy == "never":
        return Leading()
    found = _leading(tokenizer)
    if policy == "always" and not found:
        if tokenizer.bos_token_id is None:
            raise BadInput("validation: bos: always: the tokenizer has no token for the beginning of a text")
        found = (tokenizer.bos_token_id,)
    if not found:
        return Leading(bos=f"{NO_BOS} (this tokenizer adds no token before a text)")
    names = "".join(map(str, tokenizer.convert_ids_to_tokens(list(found))))
    return Leading(found, f"{names} before every window; the text itself is tokenised whole without special tokens")


def _leading(tokenizer: Any) -> tuple[int, ...]:
    plain, whole = (tokenizer("a", add_special_tokens=add)["input_ids"] for add in (False, True))
    places = [i for i in range(len(whole)) if plain and whole[i : i + len(plain)] == plain]
    return tuple(whole[: places[0]]) if places else ()


def with_leading(leading: Leading, ids: torch.Tensor, count: int, length: int, what: str) -> torch.Tensor:
    """`cut_windows` of the text, each of ``length`` tokens with the leading ones; int64 [count, length]."""
    first = torch.tensor(leading.ids, dtype=torch.int64)
    if length - len(first) < 1:
        raise BadInput(f"{what}: expected windows longer than the {len(first)} tokens before each, found {length}")
    return torch.cat([first.expand(count, -1), cut_windows(ids, count, length - len(first), what)], dim=1)


def evaluation_windows(tokenizer: Any, text: str, tokens: int, length: int, leading: Leading = Leading()) -> Windows:
    """Evenly spread windows that hold ``tokens`` tokens (rounded down to whole windows, at least one)."""
    ids = tokenise(tokenizer, text)
    windows = with_leading(leading, ids, max(1, tokens // length), length, "validation text")
    available = len(ids) // (length - len(leading.ids))
    return Windows(windows, available, hashlib.sha256(text.encode()).hexdigest(), leading.bos)


def calibration_windows(
    tokenizer: Any, text: str, samples: int, length: int, seed: int, leading: Leading = Leading()
) -> Windows:
    """``samples`` windows chosen at random by ``seed`` among all non-overlapping ones, in text order.

    Args:
        leading: what stands before each: that which stands before the windows that will judge the result.
    """
    ids = tokenise(tokenizer, text)
    available = len(ids) // max(1, length - len(leading.ids))
    every = with_leading(leading, ids, max(samples, available), length, "calibration text")
    chosen = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))[:samples].sort().values
    return Windows(every[chosen], len(every), hashlib.sha256(text.encode()).hexdigest(), leading.bos, ids)


def check_vocabulary(tokenizer: Any, ids: torch.Tensor, vocabulary: int, name: str) -> None:
    """Raises BadInput when the tokenizer gives ids that the embedding table does not have."""
    largest = int(ids.max())
    if largest >= vocabulary:
        raise BadInput(
            f"{name}: the tokenizer does not match the model: expected ids below {vocabulary}"
            f" (config.json: vocab_size), found {largest}"
        )
