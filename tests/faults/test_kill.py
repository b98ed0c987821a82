"""`kill -9` anywhere, then the same command: it continues, repeats no finished layer, and ends with the same bytes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from export.artifact import Artifact
from tests.runs import TARGETS, VOLATILE, Zygote, content, project

# (function, which call of it, when). Targets are gptq alone; the model has two layers, so three results with the head.
POINTS: dict[str, tuple[str, int, str]] = {
    "before anything is saved": ("calibrate.results:save_tensors", 1, "before"),
    "between hidden states and their layer": ("calibrate.results:save_tensors", 1, "after"),
    "after layer 0": ("calibrate.results:save_tensors", 2, "after"),
    "in the middle of hidden states": ("calibrate.results:save_file", 3, "torn"),
    "in the middle of a layer": ("calibrate.results:save_file", 4, "torn"),
    "after layer 1, old hidden states still there": ("calibrate.results:save_tensors", 4, "after"),
    "in the middle of the artifact's weights": ("models.checkpoint:save_file", 1, "torn"),
    "before the artifact's ledger": ("export.ledger:replace_file", 1, "before"),
    "after the artifact has its final name": ("pathlib:Path.rename", 2, "after"),
    "in the middle of the reference": ("validate.measure:continue_greedily", 1, "before"),
    "before the measurement is saved": ("convert.judge:replace_file", 1, "before"),
    "before the ledger takes the measurement": ("convert.judge:_record", 1, "before"),
    "before the report": ("convert.judge:write_reports", 1, "before"),
    "between the report's files": ("convert.report_files:replace_file", 2, "after"),
    "in the middle of the history": ("convert.judge:entries_of", 1, "before"),
}
# How many finished layers each leaves: the test's points are where they say.
LAYERS = dict(zip(POINTS, (0, 0, 1, 1, 1, 2, *[3] * 9), strict=True))


def run(zygote: Zygote, folder: Path, kill: tuple[str, int, str] | None = None, options: tuple[str, ...] = ()) -> int:
    """Runs a project's pipeline to its end or its killing; what it said is in ``log``."""
    done = zygote.run("run", folder / "pipeline.yaml", *options, kill=kill)
    (folder / "log").write_text(done.stdout + done.stderr)
    return done.returncode


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that was never run."""
    return project(tmp_path_factory.mktemp("fresh") / "p", targets=[TARGETS[0]]).parent


@pytest.fixture(scope="module")
def undisturbed(zygote: Zygote, fresh: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the output holds after a run that nothing disturbed."""
    folder = shutil.copytree(fresh, tmp_path_factory.mktemp("undisturbed") / "p")
    assert run(zygote, folder) == 0, (folder / "log").read_text()
    return output(folder)


def output(folder: Path) -> dict[str, str]:
    """The output's content without the report's files, which hold seconds."""
    return {name: value for name, value in content(folder / "output").items() if name not in VOLATILE}


def finished_layers(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.glob("work/calibrate-*/layer-*.safetensors"))}


def check_whole(folder: Path) -> None:
    """What stands under a final name is whole."""
    artifact = folder / "output" / "gptq"
    if artifact.exists():
        Artifact(artifact).check()
    for file in folder.glob("output/report.json"):
        json.loads(file.read_text())


def check_continued(folder: Path, before: dict[str, int], undisturbed: dict[str, str]) -> None:
    assert output(folder) == undisturbed
    after = finished_layers(folder)
    assert len(after) == 3
    assert {name: time for name, time in after.items() if name in before} == before
    left = [path.name for path in (*folder.rglob(".*"), *folder.rglob("*.partial")) if path.name != ".lock"]
    assert left == [] and not list(folder.glob("work/calibrate-*/hidden-*"))


@pytest.mark.parametrize("point", POINTS)
def test_a_run_that_was_killed_continues_to_the_same_bytes(
    zygote: Zygote, fresh: Path, undisturbed: dict[str, str], tmp_path: Path, point: str
) -> None:
    folder = shutil.copytree(fresh, tmp_path / "p")
    assert run(zygote, folder, POINTS[point]) == -signal.SIGKILL, (folder / "log").read_text()
    check_whole(folder)
    before = finished_layers(folder)
    assert len(before) == LAYERS[point]
    assert run(zygote, folder) == 0, (folder / "log").read_text()
    check_continued(folder, before, undisturbed)


def test_a_run_that_was_killed_again_and_again_continues(
    zygote: Zygote, fresh: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    folder = shutil.copytree(fresh, tmp_path / "p")
    before: dict[str, int] = {}
    for function, when in (
        ("calibrate.results:save_tensors", "after"),
        ("calibrate.results:save_file", "torn"),
        ("export.artifact:sha256", "after"),
        ("validate.measure:save_tensors", "before"),
        ("convert.judge:_record", "before"),
    ):
        assert run(zygote, folder, (function, 2 if when == "torn" else 1, when)) == -signal.SIGKILL
        now = finished_layers(folder)
        assert before.items() <= now.items()
        before = now
        check_whole(folder)
    assert run(zygote, folder) == 0
    check_continued(folder, before, undisturbed)


@pytest.mark.parametrize("call, when", [(2, "before"), (2, "after"), (3, "after")])
def test_a_rewrite_that_was_killed_never_leaves_a_half_written_artifact(
    zygote: Zygote, fresh: Path, undisturbed: dict[str, str], tmp_path: Path, call: int, when: str
) -> None:
    folder = shutil.copytree(fresh, tmp_path / "p")
    assert run(zygote, folder) == 0
    # Renames: the weights', the old artifact's, the new one's.
    assert run(zygote, folder, ("pathlib:Path.rename", call, when), ("--force",)) == -signal.SIGKILL
    check_whole(folder)
    assert run(zygote, folder) == 0
    check_continued(folder, finished_layers(folder), undisturbed)


def test_a_real_process_that_is_killed_from_outside_continues(
    zygote: Zygote, fresh: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    folder = shutil.copytree(fresh, tmp_path / "p")
    process = zygote.start("run", folder / "pipeline.yaml")
    deadline = time.monotonic() + 120
    while not finished_layers(folder) and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(process, signal.SIGKILL)
    assert zygote.wait().returncode == -signal.SIGKILL
    check_whole(folder)
    before = finished_layers(folder)
    assert before and run(zygote, folder) == 0
    check_continued(folder, before, undisturbed)


def test_a_second_run_at_the_same_time_is_refused(fresh: Path, tmp_path: Path, zygote: Zygote) -> None:
    from convert.store import Store

    folder = shutil.copytree(fresh, tmp_path / "p")
    with Store(folder / "work").locked():
        assert run(zygote, folder) == 2
        said: Any = (folder / "log").read_text()
        assert said == (f"error: {folder}/work: another run is using this work folder; wait for it or set `work:`\n")
        assert not (folder / "output").exists()
    assert run(zygote, folder) == 0


def test_a_second_run_with_another_work_folder_is_kept_out_of_the_output(
    fresh: Path, tmp_path: Path, zygote: Zygote
) -> None:
    from convert.store import LOCK, locked

    folder = shutil.copytree(fresh, tmp_path / "p")
    with locked(folder / "output", "mine"):
        assert run(zygote, folder) == 2
        said: Any = (folder / "log").read_text()
        assert f"error: {folder}/output: another run is writing into this output folder" in said
        assert [path.name for path in (folder / "output").iterdir()] == [LOCK]
    assert run(zygote, folder) == 0
