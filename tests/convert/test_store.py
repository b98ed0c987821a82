"""The work folder: names by content, one run at a time, and `force` that renews each stage once."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from convert.store import STAGE_VERSIONS, Store, digest
from models.errors import BadInput


def test_a_digest_depends_on_content_and_not_on_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": [1, 2]}) == digest({"b": [1, 2], "a": 1})
    assert len({digest({"a": [1, 2]}), digest({"a": [2, 1]}), digest({"a": "1"}), digest({"a": 1})}) == 4


def test_a_stage_is_named_by_its_kind_its_content_and_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    first = store.stage("calibrate", {"x": 1})
    assert first == store.stage("calibrate", {"x": 1})
    assert json.loads((first / "key.json").read_text()) == {"x": 1}
    others = {store.stage("calibrate", {"x": 2}), store.stage("measure", {"x": 1})}
    monkeypatch.setitem(STAGE_VERSIONS, "calibrate", 99)
    others.add(store.stage("calibrate", {"x": 1}))
    assert len(others | {first}) == 4


def test_without_force_a_stage_keeps_what_it_holds(tmp_path: Path) -> None:
    (Store(tmp_path).stage("measure", {}) / "result").write_text("kept")
    assert (Store(tmp_path).stage("measure", {}) / "result").read_text() == "kept"


def test_force_renews_a_stage_once_and_spares_what_this_run_made(tmp_path: Path) -> None:
    (Store(tmp_path).stage("measure", {}) / "old").write_text("old")
    forced = Store(tmp_path, force=True)
    folder = forced.stage("measure", {})
    assert [path.name for path in folder.iterdir()] == ["key.json"]
    (folder / "new").write_text("new")
    assert (forced.stage("measure", {}) / "new").is_file()


def test_a_second_process_is_kept_out_until_the_first_ends(tmp_path: Path) -> None:
    with Store(tmp_path).locked(), ProcessPoolExecutor(1, get_context("fork")) as processes:
        refused = processes.submit(_enter, tmp_path).exception(timeout=60)
        assert isinstance(refused, BadInput) and "another run is using this work folder" in str(refused)
    with ProcessPoolExecutor(1, get_context("fork")) as processes:
        assert processes.submit(_enter, tmp_path).result(timeout=60) == "in"


def _enter(folder: Path) -> str:
    with Store(folder).locked():
        return "in"


def test_the_lock_is_given_back_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="mine"), Store(tmp_path).locked():
        raise BadInput("mine")
    with Store(tmp_path).locked():
        pass
