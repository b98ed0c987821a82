"""Float graphs and artifacts of tiny models, each made once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import export.phone.graph
from export.phone.options import PhoneOptions
from export.phone.structure import Structure
from export.phone.trace import Traced
from models.checkpoint import Checkpoint
from tests import phone_written
from tests.phone import Make, maker


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return maker(tmp_path_factory)


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> phone_written.Make:
    return phone_written.builder(tmp_path_factory)


@pytest.fixture(scope="session")
def traced() -> dict[Any, Traced]:
    """What torch's exporter gave; where this is empty it runs again."""
    return {}


@pytest.fixture(scope="module", autouse=True)
def exported_once(traced: dict[Any, Traced]) -> Iterator[None]:
    """The exporter, which takes most of the seconds that writing takes, runs once for every configuration."""
    trace = export.phone.graph.trace

    def once(checkpoint: Checkpoint, structure: Structure, options: PhoneOptions) -> Traced:
        config = json.dumps(checkpoint.config, sort_keys=True, default=str)
        key = config, options.context, options.prefill, options.gelu, options.opset
        if key not in traced:
            traced[key] = trace(checkpoint, structure, options)
        return traced[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export.phone.graph, "trace", once)
        yield
