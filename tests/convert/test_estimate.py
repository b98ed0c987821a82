"""Estimates hold: a run needs no more disk than was promised, and is refused where there is less."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from convert.config import load
from convert.estimate import Estimate, check_room, estimate, size
from convert.prepare import prepare
from models.errors import EnvironmentProblem
from tests.runs import invoke

MEGABYTE = 10**6


class Usage(NamedTuple):
    free: int


def needs(output: int = 0, work: int = 0, memory: int = 0) -> Estimate:
    return Estimate((), memory, output, work)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how much every disk has left."""

    def set_free(count: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(count))

    return set_free


def test_a_finished_run_took_no_more_than_was_promised(finished: Path) -> None:
    promised = estimate(prepare(load(finished / "pipeline.yaml")))

    def used(folder: str, pattern: str) -> int:
        return sum(file.stat().st_size for file in (finished / folder).glob(pattern))

    for target in promised.targets:
        written = used("output", f"{target.plan.spec.name}/*.safetensors")
        # Beside the tensors, a file has a header.
        assert target.file_bytes < written < target.file_bytes + 20_000
    layers = used("work", "calibrate-*/*.safetensors")
    reference = used("work", "reference-*/*.safetensors")
    assert layers + reference < promised.work_bytes < 1.5 * (layers + reference)


def test_room_is_measured_on_the_disk_of_each_folder(tmp_path: Path, free: Callable[[int], None]) -> None:
    free(10 * MEGABYTE)
    check_room(needs(5 * MEGABYTE, 5 * MEGABYTE), tmp_path / "a" / "b", tmp_path / "c")
    with pytest.raises(EnvironmentProblem) as caught:
        check_room(needs(5 * MEGABYTE, 6 * MEGABYTE), tmp_path / "a" / "b", tmp_path / "c")
    (problem,) = caught.value.problems
    assert problem == f"{tmp_path}/a/b and {tmp_path}/c: the run needs 11 MB of disk, found 10 MB free"
    assert caught.value.exit_code == 3


def test_what_an_earlier_run_left_counts_as_room(tmp_path: Path, free: Callable[[int], None]) -> None:
    (tmp_path / "work" / "deep").mkdir(parents=True)
    (tmp_path / "work" / "deep" / "layer").write_bytes(b"x" * 4 * MEGABYTE)
    free(2 * MEGABYTE)
    check_room(needs(MEGABYTE, 5 * MEGABYTE), tmp_path / "output", tmp_path / "work")
    with pytest.raises(EnvironmentProblem):
        check_room(needs(MEGABYTE, 6 * MEGABYTE), tmp_path / "output", tmp_path / "work")


def test_too_little_memory_is_refused_with_both_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory(NamedTuple):
        available: int = 2 * 10**9

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    with pytest.raises(EnvironmentProblem, match="needs about 3 GB of memory, found 2 GB available"):
        check_room(needs(memory=3 * 10**9), tmp_path, tmp_path)


def test_a_run_without_room_is_refused_before_it_writes(
    finished: Path, tmp_path: Path, free: Callable[[int], None]
) -> None:
    folder = tmp_path / "p"
    shutil.copytree(finished, folder, ignore=shutil.ignore_patterns("work", "output"))
    free(1000)
    result = invoke("run", folder / "pipeline.yaml")
    assert result.exit_code == 3 and "of disk, found 1 kB free" in result.output
    assert not (folder / "output").exists() and not (folder / "work").exists()


def test_a_finished_run_needs_no_more_room_than_hidden_states_take(
    finished: Path, tmp_path: Path, free: Callable[[int], None]
) -> None:
    folder = shutil.copytree(finished, tmp_path / "p")
    # Two times 4 calibration windows of 32 tokens, 128 numbers each.
    free(2 * 4 * 32 * 128 * 4)
    result = invoke("run", folder / "pipeline.yaml")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_234_000, "1.23 MB"), (2e9, "2 GB"), (3.5e12, "3.5 TB")],
)
def test_sizes_are_short_and_in_powers_of_a_thousand(count: Any, text: str) -> None:
    assert size(count) == text
