"""Memory that a process has freed, given back to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


@cache
def _trim() -> Callable[[int], int] | None:
    """glibc's `malloc_trim`; None where the C library has none."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return trim


def give_back() -> bool:
    """Gives back what is free between blocks in use; returns whether the C library can.

    Without it a stream of layers takes more memory from layer to layer: tensors of other sizes do not fit into the gaps
    that the last layer's left.
    """
    trim = _trim()
    if trim is not None:
        trim(0)
    return trim is not None
