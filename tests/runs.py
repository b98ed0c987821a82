"""Whole pipelines on tiny models, for the tests that run the product as a user does."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from ruamel.yaml import YAML

from convert.cli import main
from tests.helpers import ROOT, TEXT, tiny_checkpoint

TIMEOUT = 240
# Every run compares this many windows; a handful is enough to tell right from wrong.
LENGTH, WINDOWS, PROMPTS = 32, 6, 3
TARGETS: tuple[dict[str, Any], ...] = (
    {"name": "gptq", "format": "gptq", "group_size": 32},
    {"name": "awq", "format": "awq", "group_size": 32},
    {"name": "tiny", "format": "tinygemm", "group_size": 32},
)


def settings(**changes: Any) -> dict[str, Any]:
    """A pipeline.yaml's content that runs in seconds; ``changes`` replace whole sections."""
    text = {"path": "text", "data_files": "text.txt"}
    return {
        "model": {"source": "model"},
        "calibration": {"dataset": text, "samples": 4, "sequence_length": LENGTH},
        "targets": [dict(target) for target in TARGETS],
        "validation": {
            "dataset": text,
            "sequence_length": LENGTH,
            "tokens": LENGTH * WINDOWS,
            "greedy": {"prompts": PROMPTS, "prompt_tokens": 8, "tokens": 6},
        },
        "output": "output",
        "work": "work",
        **changes,
    }


def project(folder: Path, model_type: str = "llama", *, config: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A folder with a tiny model, a text and a pipeline.yaml; returns the yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_checkpoint(folder / "model", model_type, **(config or {}))
    (folder / "text.txt").write_bytes(TEXT.read_bytes()[:6000])
    return write_yaml(folder, settings(**changes))


def write_yaml(folder: Path, content: dict[str, Any]) -> Path:
    """Writes ``pipeline.yaml`` into a folder; returns it."""
    path = folder / "pipeline.yaml"
    YAML(typ="safe", pure=True).dump(content, path)
    return path


def command(*arguments: Any) -> list[str]:
    """The command line of ``convert`` in this interpreter."""
    return [sys.executable, "-m", "convert", *map(str, arguments)]


def environment() -> dict[str, str]:
    """A subprocess finds the packages of this checkout, whatever its folder is."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def convert(*arguments: Any, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the real command line and waits for it."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=TIMEOUT, cwd=cwd, env=environment()
    )


class Zygote:
    """The command line in forks of one process, without the seconds that imports take; see zygote.py.

    Args:
        environment: of all of them.
        folder: for what they say.
    """

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
            # What runs in the background of a shell inherits an ignored SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def start(
        self,
        *arguments: Any,
        kill: tuple[str, int, str] | None = None,
        cwd: Path | None = None,
        terminal: str | None = None,
        **environment: str,
    ) -> int:
        """Starts a command and returns its process id; `wait` comes before the next one.

        Args:
            kill: where it is killed.
            terminal: the device that is its standard error.
            environment: changes of it.
        """
        assert self._process.stdin and self._process.stdout
        for name in ("stdout", "stderr"):
            (self._folder / name).write_bytes(b"")
        request = {
            "arguments": [str(argument) for argument in arguments],
            "stdout": str(self._folder / "stdout"),
            "stderr": terminal or str(self._folder / "stderr"),
            "cwd": None if cwd is None else str(cwd),
            "environment": environment,
            "kill": kill,
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def wait(self) -> subprocess.CompletedProcess[str]:
        """The end of the command that was started last: its exit code, or minus the signal, and what it said."""
        assert self._process.stdout
        code = int(self._process.stdout.readline())
        said = ((self._folder / name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess([], code, *said)

    def run(self, *arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        """A command from `start` to its end."""
        self.start(*arguments, **options)
        return self.wait()

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=60)


def content(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, hidden ones included, by relative path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def times(folder: Path) -> dict[str, int]:
    """When each file below a folder was last written, by relative path."""
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in sorted(folder.rglob("*")) if p.is_file()}


# Files of the output that hold a run's id, time or seconds.
VOLATILE = ("report.json", "report.html", "junit.xml", "history.sqlite")


def same_report(report: dict[str, Any]) -> dict[str, Any]:
    """A report without what every run has of its own."""
    return {key: value for key, value in report.items() if key not in ("run", "seconds", "history")}


class Silent:
    """A reporter that keeps what it was told to say."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, what: str, done: int, total: int) -> None:
        """Progress is for people."""

    def say(self, line: str) -> None:
        self.lines.append(line)


def invoke(*arguments: Any) -> Result:
    """The same command line inside this process, without the seconds that imports take."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="convert")
