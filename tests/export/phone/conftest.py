"""Float graphs of tiny models, each exported once."""

from __future__ import annotations

import pytest

from tests.phone import Make, maker


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return maker(tmp_path_factory)
