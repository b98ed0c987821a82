"""A full disk: exit code 3, a message that says so, nothing half-written, and the same command ends well with room."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from calibrate.quantize import quantize
from convert.store import LOCK
from export.artifact import Artifact
from models.errors import EnvironmentProblem
from tests.runs import TARGETS, content, invoke, project, settings, write_yaml
from tests.validate.test_history import entry
from validate.history import History

FULL = "error: the disk is full"


class Disk:
    """A small file system of its own, in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def mount(self, size: str) -> None:
        self.folder.mkdir(exist_ok=True)
        options = f"size={size}" + (",remount" if self.folder.is_mount() else "")
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"a small tmpfs cannot be mounted here (that needs root): {done.stderr.strip()}")

    def fill(self, left: int = 0) -> Path:
        """Another file takes the room, but for ``left`` bytes; returns it."""
        other = self.folder / "other"
        with other.open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(b"x" * 4096)
        os.truncate(other, other.stat().st_size - left)
        return other


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command here")
    found = Disk(tmp_path / "disk")
    yield found
    if found.folder.is_mount():
        subprocess.run(["umount", str(found.folder)], check=True)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("fresh") / "p", targets=[TARGETS[0]]).parent


@pytest.fixture(scope="module")
def weights(fresh: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The artifact's weights after a run with room enough."""
    folder = shutil.copytree(fresh, tmp_path_factory.mktemp("roomy") / "p")
    assert invoke("run", folder / "pipeline.yaml").exit_code == 0
    return _weights(folder / "output" / "gptq")


def _weights(artifact: Path) -> dict[str, str]:
    Artifact(artifact).check()
    return {name: value for name, value in content(artifact).items() if name.endswith(".safetensors")}


def prepare(fresh: Path, disk: Disk, key: str) -> Path:
    """A project whose output or work lies on the small disk; returns the yaml."""
    folder = shutil.copytree(fresh, disk.folder.parent / "p")
    return write_yaml(folder, settings(targets=[TARGETS[0]], **{key: str(disk.folder / key)}))


def no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the disk had had room when the run began."""
    monkeypatch.setattr("convert.run.check_room", lambda *_: None)


@pytest.mark.parametrize("key", ["output", "work"])
def test_a_disk_that_is_too_small_is_refused_before_any_work(fresh: Path, disk: Disk, key: str) -> None:
    disk.mount("100k")
    result = invoke("run", prepare(fresh, disk, key))
    assert result.exit_code == 3
    assert f"error: {disk.folder}/{key}: the run needs " in result.stderr and "found 102 kB free" in result.stderr
    assert list(disk.folder.iterdir()) == []


@pytest.mark.parametrize("size", ["4k", "32k", "300k"])
def test_an_output_disk_that_fills_up_ends_with_a_message_and_no_artifact(
    fresh: Path, disk: Disk, weights: dict[str, str], monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    disk.mount(size)
    yaml = prepare(fresh, disk, "output")
    no_check(monkeypatch)
    result = invoke("run", yaml)
    assert result.exit_code == 3 and FULL in result.stderr and "Traceback" not in result.output
    assert sorted(path.name for path in (disk.folder / "output").iterdir()) == [LOCK, "run.json"]
    disk.mount("4m")
    result = invoke("run", yaml)
    assert result.exit_code == 0, result.output
    assert _weights(disk.folder / "output" / "gptq") == weights


@pytest.mark.parametrize("size", ["4k", "8k", "16k", "100k", "300k", "440k"])
def test_a_work_disk_that_fills_up_ends_with_a_message_and_continues_with_room(
    fresh: Path, disk: Disk, weights: dict[str, str], monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    disk.mount(size)
    yaml = prepare(fresh, disk, "work")
    no_check(monkeypatch)
    result = invoke("run", yaml)
    assert result.exit_code == 3 and FULL in result.stderr and "Traceback" not in result.output
    output = yaml.parent / "output"
    assert not (output / "report.json").exists()
    if (output / "gptq").exists():
        # Filled up while it was measured.
        assert _weights(output / "gptq") == weights
    assert not list(disk.folder.rglob("*.partial"))
    layers = {path: path.stat().st_mtime_ns for path in disk.folder.rglob("layer-*.safetensors")}
    disk.mount("4m")
    result = invoke("run", yaml)
    assert result.exit_code == 0, result.output
    assert _weights(output / "gptq") == weights
    assert all(path.stat().st_mtime_ns == time for path, time in layers.items())


def test_another_file_that_takes_the_room_meanwhile_ends_the_run_the_same_way(
    fresh: Path, disk: Disk, weights: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.mount("4m")
    yaml = prepare(fresh, disk, "output")

    def fill(*arguments: Any) -> None:
        disk.fill()
        quantize(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("convert.run.quantize", fill)
        result = invoke("run", yaml)
    assert result.exit_code == 3 and FULL in result.stderr
    assert sorted(path.name for path in (disk.folder / "output").iterdir()) == [LOCK, "run.json"]
    (disk.folder / "other").unlink()
    assert invoke("run", yaml).exit_code == 0
    assert _weights(disk.folder / "output" / "gptq") == weights


def test_a_history_whose_disk_is_full_stays_as_it_was(fresh: Path, disk: Disk) -> None:
    disk.mount("1m")
    folder, file = shutil.copytree(fresh, disk.folder.parent / "p"), disk.folder / "history.sqlite"
    validation = settings()["validation"] | {"history": str(file)}
    yaml = write_yaml(folder, settings(targets=[TARGETS[0]], validation=validation))
    assert invoke("run", yaml).exit_code == 0
    before, other = file.read_bytes(), disk.fill()
    result = invoke("nightly", yaml)
    assert result.exit_code == 3 and FULL in result.stderr and str(file) in result.stderr, result.output
    assert "Traceback" not in result.output
    assert file.read_bytes() == before and {path.name for path in disk.folder.iterdir()} == {file.name, other.name}
    assert len(History(file).entries()) == 1
    other.unlink()
    assert invoke("nightly", yaml).exit_code == 0
    assert len(History(file).entries()) == 2


def test_wherever_an_append_runs_out_of_room_nothing_of_it_stays(disk: Disk) -> None:
    """In the journal, in the file, or nowhere: an entry that takes some thirty pages, with room for fewer and fewer."""
    disk.mount("1m")
    history = History(disk.folder / "history.sqlite")
    history.append([entry(run="first")])
    before = history.path.read_bytes()
    for left in range(0, 28, 3):
        other = disk.fill(left * 4096)
        with pytest.raises(EnvironmentProblem, match="the disk is full while writing .*history.sqlite"):
            history.append([entry(run="second", nll=(1.2345678901234567,) * 6000)])
        assert history.path.read_bytes() == before
        assert {path.name for path in disk.folder.iterdir()} == {"history.sqlite", other.name}
        other.unlink()
    history.append([entry(run="second")])
    assert [found.run for found in history.entries()] == ["first", "second"]


@pytest.mark.parametrize("left", [0, 8192])
def test_reports_whose_disk_is_full_are_the_old_ones_or_whole(fresh: Path, disk: Disk, left: int) -> None:
    disk.mount("4m")
    yaml, output = prepare(fresh, disk, "output"), disk.folder / "output"
    assert invoke("run", yaml).exit_code == 0
    before, other = content(output), disk.fill(left)
    result = invoke("validate", yaml)
    assert result.exit_code == 3 and FULL in result.stderr and "Traceback" not in result.output
    after = content(output)
    changed = {name for name in before if after[name] != before[name]}
    # With a little room the first of the files, which is small, is the new one; the history has no run without them.
    assert after.keys() == before.keys() and changed == ({"junit.xml"} if left else set())
    assert ElementTree.parse(output / "junit.xml").getroot().tag == "testsuites"
    other.unlink()
    assert invoke("validate", yaml).exit_code == 0


@pytest.fixture
def expanded(fresh: Path, tmp_path: Path) -> Callable[[Path], Any]:
    folder = shutil.copytree(fresh, tmp_path / "source")
    assert invoke("run", folder / "pipeline.yaml").exit_code == 0
    return lambda out: invoke("expand", folder / "output" / "gptq", out)


def test_an_expansion_that_finds_no_room_leaves_nothing(expanded: Callable[[Path], Any], disk: Disk) -> None:
    disk.mount("100k")
    result = expanded(disk.folder / "out")
    assert result.exit_code == 3 and FULL in result.stderr
    assert list(disk.folder.iterdir()) == []
    disk.mount("4m")
    assert expanded(disk.folder / "out").exit_code == 0
