"""The rules of the house: which way imports run, how long a file may be, and what `--help` may cost."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

# Each may import those after it, and itself.
PACKAGES = ("convert", "validate", "export", "calibrate", "models")
SOURCES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
LONGEST = 450


def imported(file: Path) -> set[str]:
    """Top-level names of everything that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import"
            names.add((node.module or "").partition(".")[0])
    return names


def test_the_packages_are_found() -> None:
    assert {file.relative_to(ROOT).parts[0] for file in SOURCES} == set(PACKAGES)
    assert {"models", "torch"} <= imported(ROOT / "calibrate" / "replay.py")


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    allowed = set(PACKAGES[PACKAGES.index(package) :])
    wrong = {
        str(file.relative_to(ROOT)): sorted(imported(file) & (set(PACKAGES) - allowed | {"tests", "examples"}))
        for file in SOURCES
        if file.relative_to(ROOT).parts[0] == package
    }
    assert {file: names for file, names in wrong.items() if names} == {}


def test_no_file_is_longer_than_a_reader_bears() -> None:
    files = [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    lengths = {str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert len(lengths) > 40
    assert {file: length for file, length in lengths.items() if length > LONGEST} == {}


def test_every_module_says_what_it_is_for() -> None:
    silent = [str(f.relative_to(ROOT)) for f in SOURCES if not ast.get_docstring(ast.parse(f.read_text("utf-8")))]
    assert silent == []


HELP = """
import json, resource, sys
sys.argv = ["convert", "--help"]
import runpy
try:
    runpy.run_module("convert", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"seconds": usage.ru_utime + usage.ru_stime, "modules": sorted(sys.modules)}), file=sys.stderr)
"""


def test_help_starts_fast_and_without_the_heavy_packages() -> None:
    answers = []
    # The best of three: processor time too grows on a busy machine.
    for _ in range(3):
        process = subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True, check=True)
        assert "Usage:" in process.stdout and "run" in process.stdout
        answers.append(json.loads(process.stderr.splitlines()[-1]))
    heavy = {"torch", "transformers", "pydantic", "datasets", "numpy", "huggingface_hub"}
    assert heavy.isdisjoint(answers[0]["modules"])
    assert min(answer["seconds"] for answer in answers) < 0.3
