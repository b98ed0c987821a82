"""The engines' tests run in the environment of `make engines`; without it they fail instead of being skipped.

``EDGE_CONVERT_ENGINES`` names another environment's folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers import ROOT

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engines)


@pytest.fixture(scope="session")
def engines_python() -> Path:
    """The interpreter of the engines' environment."""
    python = Path(os.environ.get("EDGE_CONVERT_ENGINES", ROOT / ".venv-engines")) / "bin" / "python"
    assert python.is_file(), f"{python}: run `make engines` first"
    return python
