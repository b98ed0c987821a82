"""One finished run that many tests look at or copy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs import invoke, project


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of all three formats; not to be changed."""
    folder = tmp_path_factory.mktemp("finished") / "project"
    result = invoke("run", project(folder))
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Callable[[], Path]:
    """Gives a copy of the finished run, which may be changed."""
    return lambda: shutil.copytree(finished, tmp_path / "project")
