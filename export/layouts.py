"""The layouts by name."""

from __future__ import annotations

from collections.abc import Mapping

from export import awq, gptq, tinygemm
from export.layout import Layout
from models.errors import BadInput

LAYOUTS: Mapping[str, Layout] = {"gptq": gptq, "awq": awq, "tinygemm": tinygemm}


def layout_of(format: str) -> Layout:
    """The layout of that name. Raises BadInput naming the known ones."""
    if format not in LAYOUTS:
        raise BadInput(f"{format}: unknown layout; known: {', '.join(LAYOUTS)}")
    return LAYOUTS[format]
