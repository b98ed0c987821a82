"""`convert clean`: what is still of use stays, what no run would look at goes, and only when that is said."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from convert.store import Store
from tests.runs import TARGETS, invoke, settings, times, write_yaml

Copy = Callable[[], Path]


def clean(*arguments: Any, code: int = 0) -> str:
    result = invoke("clean", *arguments)
    assert result.exit_code == code, result.output
    return result.output


def stages(folder: Path) -> set[str]:
    return {path.name for path in Store(folder / "work").present()}


def kept(folder: Path) -> dict[str, int]:
    """When each file was written, what `datasets` keeps aside."""
    return {name: time for name, time in times(folder).items() if "datasets" not in name}


def finer(folder: Path) -> Path:
    """Another group size for `awq`, and `gptq` in smaller files, both written; returns the yaml."""
    targets = [dict(target) for target in TARGETS]
    targets[1]["group_size"] = 64
    yaml = write_yaml(folder, settings(targets=targets, output={"path": "output", "shard_size": "100KB"}))
    assert invoke("run", yaml, "--only", "awq", "--only", "gptq").exit_code == 0
    return yaml


def test_after_a_run_nothing_is_unused(copy: Copy) -> None:
    folder = copy()
    before = kept(folder)
    assert clean(folder / "pipeline.yaml", "--yes") == "0 unused stages, 0 B: removed\n"
    assert kept(folder) == before and len(stages(folder)) == 7


def test_what_a_change_left_behind_is_listed_and_removed_when_that_is_said(copy: Copy) -> None:
    folder = copy()
    before = stages(folder)
    yaml = finer(folder)
    # Of gptq, whose codes are the same, what was measured of the other files; of awq both.
    found = json.loads(clean(yaml, "--json"))
    names = {Path(entry["folder"]).name for entry in found}
    assert sorted(entry["stage"] for entry in found) == ["calibrate", "measure", "measure"] and names < before
    assert all(entry["bytes"] > 0 for entry in found) and names < stages(folder)
    (folder / "work" / "mine").mkdir()
    (folder / "work" / "calibrate-notes").mkdir()
    text = clean(yaml)
    assert "3 unused stages, " in text and text.endswith("pass --yes to remove them\n")
    assert all(entry["folder"] in text for entry in found) and names < stages(folder)
    assert clean(yaml, "--yes").endswith(": removed\n")
    assert not names & stages(folder) and (folder / "work" / "mine").is_dir()
    assert (folder / "work" / "calibrate-notes").is_dir()


def test_what_is_left_spares_a_run_all_that_it_spared_before(copy: Copy) -> None:
    folder = copy()
    clean(finer(folder), "--yes")
    done = kept(folder / "work")
    # Also the calibration of an artifact that has to be written again.
    shutil.rmtree(folder / "output" / "awq")
    assert invoke("run", folder / "pipeline.yaml").exit_code == 0
    assert done.items() <= kept(folder / "work").items()
    # `tiny` is in smaller files now, so what was measured of the others is of no use any more.
    assert clean(folder / "pipeline.yaml", "--yes").count("measure-") == 1


def test_pipelines_that_share_a_work_folder_are_named_together(copy: Copy) -> None:
    folder = copy()
    other = folder / "other.yaml"
    shutil.copy(folder / "pipeline.yaml", other)
    yaml = write_yaml(folder, settings(targets=[TARGETS[0]]))
    assert clean(yaml, other).startswith("0 unused stages")
    assert clean(yaml).count("measure-") == 2
    elsewhere = shutil.copytree(folder, folder.parent / "elsewhere") / "other.yaml"
    text = clean(yaml, elsewhere, "--yes", code=2)
    assert f"error: {elsewhere}: expected the work folder of {yaml} ({folder}/work), found " in text
    assert len(stages(folder)) == 7


def test_a_work_folder_that_a_run_uses_is_left_alone(copy: Copy) -> None:
    folder = copy()
    yaml = write_yaml(folder, settings(targets=[TARGETS[0]]))
    with Store(folder / "work").locked():
        assert "another run is using this work folder" in clean(yaml, "--yes", code=2)
    assert len(stages(folder)) == 7


def test_without_a_work_folder_there_is_nothing_to_remove_and_none_is_made(copy: Copy) -> None:
    folder = copy()
    shutil.rmtree(folder / "work")
    assert clean(folder / "pipeline.yaml", "--yes").startswith("0 unused stages")
    assert not (folder / "work").exists()


def test_a_peers_figures_stay_also_where_its_package_is_gone(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy()
    values = settings()
    values["validation"]["positioning"] = ["llama.cpp:Q4_0"]
    yaml = write_yaml(folder, values)
    assert invoke("run", yaml, "--only", "tiny").exit_code == 0
    (position,) = (name for name in stages(folder) if name.startswith("position-"))
    assert clean(yaml, "--yes").startswith("0 unused stages")

    def absent(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.version", absent)
        assert clean(yaml, "--yes").startswith("0 unused stages")
    assert position in stages(folder)
    assert position in clean(write_yaml(folder, settings()))
