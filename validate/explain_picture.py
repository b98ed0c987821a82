"""The picture of `validate.explain`: what each layer costs, and which of its linears costs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

# Text stays text, and the same numbers give the same file.
_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "edge-convert", "font.size": 9}


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Draws an explanation into a file whose ending names the kind (.png, .svg, .pdf).

    Raises:
        ValueError: for an ending that matplotlib does not know.
    """
    layers = found["layers"]
    inside, cells = _cells(found)
    columns = [*layers, *_heads(found)]
    # A line below, where it does not run into the last layer's number.
    names = [str(index) for index in range(len(layers))] + [f"\n{row['name']}" for row in columns[len(layers) :]]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(max(6.0, 0.32 * len(columns) + 3), 6.0 if inside else 3.2), layout="constrained")
        panels = figure.subplots(2 if inside else 1, 1, squeeze=False)[:, 0]
        above = panels[0]
        restored = [(i, row["restored"]) for i, row in enumerate(columns) if row["restored"] is not None]
        if restored:
            above.bar(*zip(*restored, strict=True), color="#4477aa", label="restored: measured")
        attributed = [(i, row["attributed"]) for i, row in enumerate(columns) if row["attributed"] is not None]
        if attributed:
            above.plot(*zip(*attributed, strict=True), "k_", markersize=12, label="attributed")
        every = max(1, len(layers) // 16)
        ticks = [*range(0, len(layers), every), *range(len(layers), len(columns))]
        above.set_xticks(ticks, [names[tick] for tick in ticks])
        above.set_ylabel("KL, nats per token")
        above.set_title(
            f"{found['artifact']}: KL {found['kl']:.4g} over {found['tokens']} tokens; what each layer causes"
        )
        above.legend(frameon=False)
        above.set_xlim(-0.6, len(columns) - 0.4)
        if inside:
            below = panels[1]
            picture = below.imshow(cells, aspect="auto", cmap="viridis", vmin=0)
            below.set_yticks(range(len(inside)), inside)
            figure.colorbar(picture, ax=below, label="attributed KL")
            below.set_xticks(range(0, len(layers), every))
            # Each layer stands below its bar.
            below.set_xlim(above.get_xlim())
        panels[-1].set_xlabel("decoder layer")
        metadata: dict[str, Any] = {"Date": None} if file.suffix == ".svg" else {}
        figure.savefig(file, dpi=150, metadata=metadata)


def _heads(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The head's row, where it is quantised."""
    layers = tuple(f"{row['name']}." for row in found["layers"])
    return [row for row in found["linears"] if not row["name"].startswith(layers) and row["restored"] is not None]


def _cells(found: Mapping[str, Any]) -> tuple[list[str], list[list[float]]]:
    """Names of a layer's linears, and the attributed parts [linear][layer]; NaN where there is none."""
    prefixes = {row["name"] + ".": index for index, row in enumerate(found["layers"])}
    parts: dict[str, dict[int, float]] = {}
    for row in found["linears"]:
        prefix = next((prefix for prefix in prefixes if row["name"].startswith(prefix)), None)
        if prefix is not None:
            parts.setdefault(row["name"].removeprefix(prefix), {})[prefixes[prefix]] = row["attributed"]
    inside = sorted(parts)
    count = len(found["layers"])
    return inside, [[parts[name].get(layer, float("nan")) for layer in range(count)] for name in inside]
