"""The compile-cache shim completes loaded graphs and touches nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from export.serving import compile_cache


def loaded(compiled: Any) -> Any:
    return SimpleNamespace(_artifacts=SimpleNamespace(compiled_fn=compiled))


def test_a_graph_gets_the_method_that_vllm_calls() -> None:
    def graph(x: int) -> int:
        return x + 1

    answer = compile_cache.completing(lambda file: loaded(graph))("file")
    assert answer._artifacts.compiled_fn is graph and graph(1) == 2
    assert answer._artifacts.compiled_fn.finalize_loading("configuration") is None


def test_an_object_with_the_method_or_of_another_kind_is_left_alone() -> None:
    class Artifact:
        def finalize_loading(self, config: str) -> str:
            return config

    artifact = Artifact()
    answer = compile_cache.completing(lambda: loaded(artifact))()
    assert answer._artifacts.compiled_fn.finalize_loading("mine") == "mine" and vars(artifact) == {}
    silent = SimpleNamespace()
    for other in (None, 3, SimpleNamespace(), loaded(silent)):
        assert compile_cache.completing(lambda other=other: other)() is other
    assert not hasattr(silent, "finalize_loading")


def test_installing_twice_wraps_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(file: str) -> str:
        return file

    monkeypatch.setattr(torch.compiler, "load_compiled_function", load)
    compile_cache.install()
    compile_cache.install()
    assert torch.compiler.load_compiled_function.__wrapped__ is load  # type: ignore[attr-defined]
    assert torch.compiler.load_compiled_function("file") == "file"


def test_torchs_own_loader_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    load = torch.compiler.load_compiled_function
    monkeypatch.setattr(torch.compiler, "load_compiled_function", load)
    compile_cache.install()
    assert torch.compiler.load_compiled_function is not load
