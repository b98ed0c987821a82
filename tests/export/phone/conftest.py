"""Float graphs of tiny models, each exported once."""

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
from tests.phone import Make, maker


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return maker(tmp_path_factory)


@pytest.fixture(scope="module", autouse=True)
def traced() -> Iterator[dict[Any, Traced]]:
    """torch's exporter, which takes most of the seconds that writing takes, runs once for every configuration; clearing
    this makes it run again."""
    found: dict[Any, Traced] = {}
    trace = export.phone.graph.trace

    def once(checkpoint: Checkpoint, structure: Structure, options: PhoneOptions) -> Traced:
        config = json.dumps(checkpoint.config, sort_keys=True, default=str)
        key = config, options.context, options.prefill, options.gelu, options.opset
        if key not in found:
            found[key] = trace(checkpoint, structure, options)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export.phone.graph, "trace", once)
        yield found
