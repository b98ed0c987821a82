"""The history: it only grows, survives two writers and `kill -9`, and tells what it cannot read."""

from __future__ import annotations

import math
import multiprocessing
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.errors import BadInput, EnvironmentProblem
from validate import history as module
from validate.entry import Entry
from validate.history import SCHEMA, History


def entry(run: str = "run-1", target: str = "gptq", **changes: Any) -> Entry:
    """An entry that held its gates."""
    values: dict[str, Any] = {
        "run": run,
        "time": "2026-01-02T03:04:05Z",
        "target": target,
        "format": "gptq",
        "source": "model",
        "model_sha256": "m" * 64,
        "text_sha256": "t" * 64,
        "windows_sha256": "w" * 64,
        "dtype": "bfloat16",
        "artifact_sha256": "a" * 64,
        "versions": {"torch": "2.13.0"},
        "figures": {"perplexity": 12.0, "perplexity_ratio": 1.1, "perplexity_ratio_se": 0.01, "kl": None},
        "nll": (2.0, 2.5, math.nan),
        "reference_perplexity": 11.0,
        "gates": [{"gate": "max_kl", "bound": 1.0, "measured": 0.1, "passed": True, "note": ""}],
        "passed": True,
    }
    return Entry(**{**values, **changes})


def same(a: Entry, b: Entry) -> bool:
    """Equal, where NaN equals NaN."""
    return repr(a) == repr(b)


def test_entries_come_back_as_they_were_in_the_order_of_their_coming(tmp_path: Path) -> None:
    history = History(tmp_path / "deep" / "history.sqlite")
    assert history.entries() == []
    assert not history.path.exists()
    first, second = [entry("b", "x"), entry("b", "y")], [entry("a", "x", passed=False, figures={}, nll=())]
    history.append(first)
    history.append(second)
    found = history.entries()
    assert len(found) == 3 and all(same(a, b) for a, b in zip(found, first + second, strict=True))
    # One file at rest.
    assert [path.name for path in history.path.parent.iterdir()] == ["history.sqlite"]


def test_a_run_is_appended_whole_or_not_at_all(tmp_path: Path) -> None:
    history = History(tmp_path / "h")
    history.append([entry("a")])
    with pytest.raises(EnvironmentProblem, match="UNIQUE"):
        history.append([entry("b"), entry("a")])
    assert [found.run for found in history.entries()] == ["a"]


@pytest.mark.parametrize("statement", ["UPDATE entry SET passed = 1", "DELETE FROM entry", "DELETE FROM accepted"])
def test_nothing_is_changed_or_taken_away(tmp_path: Path, statement: str) -> None:
    history = History(tmp_path / "h")
    history.append([entry(passed=False)])
    history.accept("run-1", "now")
    connection = sqlite3.connect(history.path)
    with pytest.raises(sqlite3.IntegrityError, match="only grows"):
        connection.execute(statement)
    connection.close()


def test_an_accepted_run_measures_others_although_it_failed(tmp_path: Path) -> None:
    history = History(tmp_path / "h")
    gates = [{"gate": "max_kl", "bound": 1.0, "measured": 2.0, "passed": False, "note": ""}]
    history.append([entry(passed=False, gates=gates)])
    assert not history.entries()[0].measures_others
    history.accept("run-1", "now")
    history.accept("run-1", "later")
    (found,) = history.entries()
    assert found.accepted and found.measures_others and not found.passed


def test_the_first_run_measures_others_although_it_had_nothing_to_be_compared_with() -> None:
    none = {"gate": "no_worse_than", "bound": None, "measured": None, "passed": False, "note": "last: no"}
    worse = {"gate": "no_worse_than", "bound": 0.1, "measured": 0.2, "passed": False, "note": "last: worse"}
    other = {"gate": "max_kl", "bound": 1.0, "measured": None, "passed": False, "note": ""}
    assert entry(gates=[none], passed=False).measures_others
    assert not entry(gates=[worse], passed=False).measures_others
    assert not entry(gates=[none, other], passed=False).measures_others
    # No gate failed, but an engine did not run.
    assert not entry(gates=[], passed=False).measures_others


def write(path: Path, name: str, runs: int, told: Any) -> None:
    """Appends runs of three targets each, and says after each that it is there."""
    for index in range(runs):
        History(path).append([entry(f"{name}-{index}", target) for target in "xyz"])
        told.send(index)


def writer(path: Path, name: str, runs: int) -> tuple[Any, Any]:
    """A process that writes, and what it tells. Forked, which spares it the seconds of its imports."""
    context = multiprocessing.get_context("fork")
    told, tell = context.Pipe(duplex=False)
    process = context.Process(target=write, args=(path, name, runs, tell))
    process.start()
    tell.close()
    return process, told


def test_two_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "h"
    for process, told in [writer(path, name, 20) for name in "ab"]:
        process.join(120)
        assert process.exitcode == 0
        told.close()
    runs = [found.run for found in History(path).entries()]
    assert sorted(runs) == sorted(f"{name}-{index}" for name in "ab" for index in range(20) for _ in range(3))
    # A run's entries lie together: no writer came between them.
    assert all(runs[i] == runs[i + 1] == runs[i + 2] for i in range(0, len(runs), 3))


def test_a_killed_writer_leaves_whole_runs_and_a_history_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "h"
    for attempt in range(8):
        process, told = writer(path, f"w{attempt}", 10_000)
        last = [told.recv() for _ in range(3)][-1]
        time.sleep(0.002 * attempt)
        process.kill()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        while told.poll():
            try:
                last = told.recv()
            except EOFError:
                break
        runs = [found.run for found in History(path).entries() if found.run.startswith(f"w{attempt}-")]
        # Whole runs, and every one that was said to be there.
        assert {runs.count(run) for run in runs} == {3}
        assert {f"w{attempt}-{index}" for index in range(last + 1)} <= set(runs)
    History(path).append([entry("after")])
    assert History(path).entries()[-1].run == "after"


def test_a_writer_that_is_killed_in_its_transaction_leaves_nothing_of_it(tmp_path: Path) -> None:
    path = tmp_path / "h"
    History(path).append([entry("before")])
    code = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
# Pages go to the file before the end of the transaction.
connection.execute("PRAGMA cache_size = 1")
connection.execute("BEGIN IMMEDIATE")
connection.execute("CREATE TABLE half (a)")
connection.executemany("INSERT INTO half VALUES (?)", [("x" * 3000,) for _ in range(200)])
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code, str(path)], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert path.with_name("h-journal").exists()
    assert [found.run for found in History(path).entries()] == ["before"]
    History(path).append([entry("after")])
    assert [found.run for found in History(path).entries()] == ["before", "after"]


def test_a_writer_that_is_kept_waiting_too_long_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    history = History(tmp_path / "h")
    history.append([entry()])
    other = sqlite3.connect(history.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(EnvironmentProblem, match="another run has held the history"):
        history.append([entry("b")])
    other.close()
    history.append([entry("b")])


def test_a_history_of_a_newer_schema_is_refused(tmp_path: Path) -> None:
    history = History(tmp_path / "h")
    history.append([entry()])
    connection = sqlite3.connect(history.path)
    connection.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    connection.close()
    for action in (history.check, history.entries, lambda: history.append([entry("b")])):
        with pytest.raises(BadInput, match=f"schema: expected {SCHEMA} at most, found {SCHEMA + 1}: a newer"):
            action()


def test_what_is_no_history_is_refused(tmp_path: Path) -> None:
    text, other = tmp_path / "text", tmp_path / "other"
    text.write_text("Call me Ishmael. " * 100)
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE mine (a)")
    connection.close()
    with pytest.raises(BadInput, match="expected a history of edge-convert, found: file is not a database"):
        History(text).check()
    with pytest.raises(BadInput, match="found another SQLite file"):
        History(other).append([entry()])
    with pytest.raises(BadInput, match="expected a history file"):
        History(tmp_path).check()
    # A writer was killed before its first page.
    (tmp_path / "empty").touch()
    assert History(tmp_path / "empty").entries() == []
    History(tmp_path / "empty").append([entry()])
    assert len(History(tmp_path / "empty").entries()) == 1


def test_what_losses_are_of_decides_whether_they_compare() -> None:
    base = entry().subject
    assert base.differs(base) == []
    assert base.differs(replace(base, model_sha256="n" * 64)) == [
        f"it is of another model ({'n' * 12}, this one mmmmmmmmmmmm)"
    ]
    text = base.differs(replace(base, text_sha256="u" * 64, windows_sha256="v" * 64))
    assert len(text) == 1 and "another text" in text[0]
    assert "other windows of the text" in base.differs(replace(base, windows_sha256="v" * 64))[0]
    assert "another compute dtype" in base.differs(replace(base, dtype="float32"))[0]
