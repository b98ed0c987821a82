"""Files that are either whole or absent: hashing, atomic folders and what a full disk looks like."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from models.errors import EnvironmentProblem

CHUNK = 1 << 22


def sha256(path: Path) -> str:
    """The file's SHA-256, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Forces a file's or a folder's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file so that a reader sees the old content or the new one, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def to_json(value: Any) -> bytes:
    """Indented JSON with a final newline; key order is the caller's."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def recover_folder(final: Path) -> None:
    """Clears away what `atomic_folder` left when its process was killed; the old folder comes back if it was gone."""
    partial, old = _siblings(final)
    # Killed between the two renames: the old folder is under this name only.
    if old.exists() and not final.exists():
        old.rename(final)
    for left in (partial, old):
        shutil.rmtree(left, ignore_errors=True)


def _siblings(final: Path) -> tuple[Path, Path]:
    return final.with_name(f".{final.name}.partial"), final.with_name(f".{final.name}.old")


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """Yields a temporary sibling folder that becomes ``final`` when the block ends without an error.

    An older ``final`` is replaced; what an interrupted run left behind under the temporary name is removed.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    recover_folder(final)
    partial, old = _siblings(final)
    partial.mkdir()
    try:
        yield partial
        for path in partial.rglob("*"):
            sync(path)
        sync(partial)
        if final.exists():
            final.rename(old)
            partial.rename(final)
            shutil.rmtree(old, ignore_errors=True)
        else:
            partial.rename(final)
        sync(final.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists() and not final.exists():
            old.rename(final)
        raise


def environment_problem(error: BaseException) -> EnvironmentProblem | None:
    """The user's message for an error that a full or read-only disk or too little memory caused, else None.

    Libraries wrap such errors in their own, so an error's cause is looked at too.
    """
    text = str(error)
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return EnvironmentProblem(f"out of memory: {text or 'an allocation failed'}")
    code = error.errno if isinstance(error, OSError) else None
    # safetensors and torch wrap the system's error in their own types, text only.
    if code in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in text or "os error 28" in text:
        where = f" while writing {error.filename}" if isinstance(error, OSError) and error.filename else ""
        return EnvironmentProblem(f"the disk is full{where}: free some space and run the same command again")
    if code in (errno.EACCES, errno.EROFS, errno.EPERM):
        return EnvironmentProblem(f"cannot write: {text}")
    return None if error.__cause__ is None else environment_problem(error.__cause__)
