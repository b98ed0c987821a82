"""Files and folders that are whole or absent, and the errors of a full machine."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from models.errors import EnvironmentProblem
from models.files import atomic_folder, environment_problem, replace_file, sha256


def content(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_folder_appears_whole_and_replaces_an_old_one(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "final"
    for text in ("first", "second"):
        with atomic_folder(final) as folder:
            assert folder.parent == final.parent and folder != final
            (folder / "sub").mkdir()
            (folder / "sub" / text).write_text(text)
            assert not (final / "sub" / text).exists()
        assert content(tmp_path) == {f"deep/final/sub/{text}": text}
        assert list(final.parent.iterdir()) == [final]


def test_an_error_leaves_nothing_behind_and_the_old_folder_as_it_was(tmp_path: Path) -> None:
    final = tmp_path / "final"
    with pytest.raises(KeyboardInterrupt), atomic_folder(final) as folder:
        (folder / "a").write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with atomic_folder(final) as folder:
        (folder / "a").write_text("whole")
    with pytest.raises(OSError, match="full"), atomic_folder(final) as folder:
        (folder / "a").write_text("half")
        raise OSError("full")
    assert content(tmp_path) == {"final/a": "whole"} and list(tmp_path.iterdir()) == [final]


def test_what_a_killed_run_left_is_not_mixed_into_the_next(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as killed, pytest.raises(SystemExit), atomic_folder(tmp_path / "final") as folder:
        (folder / "old").write_text("old")
        # As after kill -9: nothing is cleaned up.
        killed.setattr("models.files.shutil.rmtree", lambda *_, **__: None)
        raise SystemExit
    assert content(tmp_path) != {}
    with atomic_folder(tmp_path / "final") as folder:
        (folder / "new").write_text("new")
    assert content(tmp_path) == {"final/new": "new"}


def test_the_old_folder_survives_an_error_between_the_two_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "final"
    with atomic_folder(final) as folder:
        (folder / "a").write_text("old")
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise OSError("no")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match="no"), atomic_folder(final) as folder:
            (folder / "a").write_text("new")
    assert content(final) == {"a": "old"}
    assert list(tmp_path.iterdir()) == [final]


def test_the_old_folder_survives_a_kill_between_the_two_renames(tmp_path: Path) -> None:
    final = tmp_path / "final"
    for name, text in ((".final.old", "old"), (".final.partial", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(text)
    with pytest.raises(KeyboardInterrupt), atomic_folder(final):
        raise KeyboardInterrupt
    assert content(tmp_path) == {"final/a": "old"} and list(tmp_path.iterdir()) == [final]


def test_replacing_a_file_keeps_the_old_content_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    replace_file(file, b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            replace_file(file, b"new")
    assert content(tmp_path) == {"a.json": "old"} and list(tmp_path.iterdir()) == [file]
    replace_file(file, b"new")
    assert content(tmp_path) == {"a.json": "new"} and list(tmp_path.iterdir()) == [file]


def test_sha256_reads_a_file_larger_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"abc")
    monkeypatch.setattr("models.files.CHUNK", 2)
    assert sha256(file) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "out/x"), "the disk is full while writing out/x: free"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk is full: free"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "the disk is full: free"),
        (RuntimeError("basic_ios::clear: unexpected: (os error 28)"), "the disk is full: free"),
        (MemoryError(), "out of memory: an allocation failed"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory: DefaultCPU"),
        (PermissionError(errno.EACCES, "Permission denied", "out"), "cannot write: .*'out'"),
        (OSError(errno.EROFS, "Read-only file system", "out"), "cannot write: .*'out'"),
    ],
)
def test_errors_of_the_machine_are_told_from_bugs(error: BaseException, message: str) -> None:
    found = environment_problem(error)
    assert isinstance(found, EnvironmentProblem) and found.exit_code == 3
    with pytest.raises(EnvironmentProblem, match=message):
        raise found


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("y"), FileNotFoundError(errno.ENOENT, "no such", "z")])
def test_other_errors_are_not_the_machine(error: BaseException) -> None:
    assert environment_problem(error) is None
