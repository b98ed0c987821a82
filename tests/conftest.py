"""What every test needs: no network, no cache of the user's, and one thread (the fastest for tiny models)."""

from __future__ import annotations

import os
import tempfile

# Before anything imports transformers or datasets, which read these once.
_CACHE = tempfile.TemporaryDirectory(prefix="edge-convert-tests-")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HOME"] = _CACHE.name
os.environ["HF_DATASETS_CACHE"] = os.path.join(_CACHE.name, "datasets")
os.environ["HF_HUB_CACHE"] = os.path.join(_CACHE.name, "hub")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# The commands that tests start are small too.
os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Iterator  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

import pytest  # noqa: E402

if TYPE_CHECKING:
    from tests.runs import Zygote


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """The command line in forks of one process."""
    from tests.runs import Zygote, environment

    process = Zygote(environment(), tmp_path_factory.mktemp("zygote"))
    yield process
    process.close()


@pytest.fixture
def avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor with AVX-512: where engines have a kernel for every format."""
    monkeypatch.setattr("validate.engines.run.has_avx512", lambda: True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The runs on real weights take minutes: first, so that no worker ends with them alone."""
    items.sort(key=lambda item: item.path.name != "test_smollm2.py")
