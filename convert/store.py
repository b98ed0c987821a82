"""The work folder: one folder a stage, named by the hash of everything that decides its content."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from models.errors import BadInput
from models.files import replace_file, to_json

# Raised when a stage's code changes what it computes, so that older results are not taken for its own.
STAGE_VERSIONS = {
    "generated": 2,
    "calibrate": 6,
    "fisher": 3,
    "sensitivity": 1,
    "observe": 1,
    "reference": 1,
    "export": 5,
    "measure": 5,
    "position": 1,
}


# The file that a run holds in each of its folders.
LOCK = ".lock"


def digest(value: Any) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


@contextmanager
def locked(folder: Path, taken: str) -> Iterator[None]:
    """Keeps a second run out of a folder for the length of the block; the lock ends with the process, however it ends.

    Args:
        taken: what to say when another run holds the folder.

    Raises:
        BadInput: then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise BadInput(f"{folder}: {taken}") from error
    try:
        yield
    finally:
        lock.release()


class Store:
    """A run's work folder.

    Args:
        force: makes every stage anew, once.
    """

    def __init__(self, folder: Path, force: bool = False) -> None:
        self.folder = folder
        self._force = force
        self._renewed: set[str] = set()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps a second run out of the work folder, see `locked`."""
        with locked(self.folder, "another run is using this work folder; wait for it or set `work:`"):
            yield

    def key(self, stage: str, content: Mapping[str, Any]) -> str:
        """What a stage's folder and an artifact's ledger are named by."""
        return digest({"stage": stage, "version": STAGE_VERSIONS[stage], **content})

    def path(self, stage: str, content: Mapping[str, Any]) -> Path:
        """Where a stage's folder is, or would be."""
        return self.folder / f"{stage}-{self.key(stage, content)[:16]}"

    def present(self) -> list[Path]:
        """The folders of all stages that are there, by name."""
        names = re.compile(rf"({'|'.join(STAGE_VERSIONS)})-[0-9a-f]{{16}}")
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(path for path in found if names.fullmatch(path.name) and path.is_dir())

    def stage(self, stage: str, content: Mapping[str, Any]) -> Path:
        """The stage's folder, made when it is not there.

        ``key.json`` in it says in words what the hash stands for.
        """
        folder = self.path(stage, content)
        # Targets may share a stage: what the first has made anew is new enough for the second.
        if self._force and folder.name not in self._renewed:
            shutil.rmtree(folder, ignore_errors=True)
        self._renewed.add(folder.name)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "key.json").is_file():
            replace_file(folder / "key.json", to_json(json.loads(json.dumps(content, default=str))))
        return folder
