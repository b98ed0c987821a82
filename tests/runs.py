"""Whole pipelines on tiny models, for the tests that run the product as a user does."""

from __future__ import annotations

import hashlib
import os
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
