"""Lets vLLM's CPU backend load its own compiled graphs again, instead of compiling at every start.

vLLM 0.32 saves the graph that it compiled for a model, and after loading one calls ``finalize_loading``, which only the
artifact of its GPU backend has. On the CPU the loaded object is torch's own, the call fails, and vLLM compiles again
("Compiling model again due to a load failure ... has no attribute 'finalize_loading'"). Torch's object is complete
when it is loaded, so it gets a method that does nothing.

The shim acts on a loaded object that lacks the method and on nothing else: a vLLM that does not need it never
sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

METHOD = "finalize_loading"
# Set on the wrapped loader; ``__wrapped__`` will not do, as torch decorates it too.
MARK = "completes_loaded_graphs"


def install() -> None:
    """Wraps torch's loader of compiled functions; calling it again changes nothing."""
    load = torch.compiler.load_compiled_function
    if not hasattr(load, MARK):
        torch.compiler.load_compiled_function = completing(load)


def completing(load: Callable[..., Any]) -> Callable[..., Any]:
    """The loader, whose graphs have the method that vLLM calls."""

    @wraps(load)
    def completed(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        function = getattr(getattr(loaded, "_artifacts", None), "compiled_fn", None)
        if callable(function) and not hasattr(function, METHOD):
            setattr(function, METHOD, _nothing)
        return loaded

    setattr(completed, MARK, True)
    return completed


def _nothing(vllm_config: Any) -> None:
    """There is nothing to finalise."""
