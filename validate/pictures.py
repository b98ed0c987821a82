"""The pictures of a report: drawn without a display, and readable on light pages and on dark ones."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from export.ledger import Ledger
from validate.entry import Entry

SVG = "http://www.w3.org/2000/svg"
# Stands for the page's own colour of text, which a picture inside the page takes.
INK = "#010203"
# Middle tones: at least 3:1 against white and against near-black.
COLOURS = ("#3b82f6", "#ea580c", "#16a34a", "#a855f7", "#db2777", "#0891b2", "#a16207", "#64748b")
MARKERS = "osD^vPX*"
WIDTH = 4.6
# Of a legend below a picture, in inches.
LEGEND_COLUMNS, LEGEND_LINE = 3, 0.2
# Any: matplotlib types every key by itself.
STYLE: Any = {
    "font.size": 10,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#808080",
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True)
class Point:
    """An artifact, or a build of others, in the plane of size and loss."""

    name: str
    bits: float
    ratio: float
    se: float
    ours: bool = True


@contextmanager
def _style() -> Iterator[None]:
    with matplotlib.rc_context(STYLE):
        yield


def _figure(height: float, bottom: float) -> Figure:
    """A figure of that height with fixed margins, all in inches: finding them out would draw everything twice."""
    figure = Figure(figsize=(WIDTH, height))
    figure.subplots_adjust(left=0.8 / WIDTH, right=1 - 0.1 / WIDTH, bottom=bottom / height, top=1 - 0.3 / height)
    return figure


def _legend_height(entries: int) -> float:
    """What a legend of so many entries takes, in inches."""
    return LEGEND_LINE * math.ceil(entries / LEGEND_COLUMNS)


def _legend(figure: Figure) -> None:
    """What the marks of all panels stand for, below them, where no mark can be."""
    entries = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if entries:
        figure.legend(
            entries.values(), entries.keys(), loc="lower center", ncols=LEGEND_COLUMNS, fontsize=8, handlelength=1.5
        )


def pareto(points: Sequence[Point]) -> Figure:
    """Bits per weight against the perplexity ratio to the reference, with its standard error; down and left is good."""
    with _style():
        legend = _legend_height(len(points))
        figure = _figure(3.1 + legend, bottom=0.6 + legend)
        axes: Axes = figure.subplots()
        for index, point in enumerate(points):
            marker = MARKERS[index % len(MARKERS)]
            style: dict[str, Any] = {"markerfacecolor": "none"} if not point.ours else {}
            axes.errorbar(
                point.bits,
                point.ratio,
                yerr=point.se,
                fmt=marker,
                color=COLOURS[index % len(COLOURS)],
                capsize=3,
                label=point.name,
                **style,
            )
        axes.axhline(1.0, color=INK, linewidth=0.8, linestyle="--")
        axes.margins(x=0.2, y=0.15)
        axes.set_xlabel("bits per weight")
        axes.set_ylabel("perplexity / reference's")
        _legend(figure)
        return figure


def layer_errors(ledgers: Mapping[str, Ledger]) -> Figure:
    """The relative output error of every linear by layer, a panel a target; the head stands after the last layer."""
    kinds = list(dict.fromkeys(kind for ledger in ledgers.values() for kind in _errors(ledger)))
    legend = _legend_height(len(kinds))
    with _style():
        figure = _figure(0.8 + 1.9 * len(ledgers) + legend, bottom=0.6 + legend)
        panels = figure.subplots(len(ledgers), 1, sharex=True, squeeze=False, gridspec_kw={"hspace": 0.25})[:, 0]
        for axes, (name, ledger) in zip(panels, ledgers.items(), strict=True):
            for kind, (layers, errors) in _errors(ledger).items():
                index = kinds.index(kind)
                style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
                axes.plot(layers, errors, markersize=3, linewidth=1, label=kind, **style)
            axes.set_ylabel("relative error")
            axes.set_title(name, fontsize=10, loc="left")
        panels[-1].xaxis.get_major_locator().set_params(integer=True)
        panels[-1].set_xlabel("layer (the head stands after the last)")
        _legend(figure)
        return figure


def _errors(ledger: Ledger) -> dict[str, tuple[list[int], list[float]]]:
    """Layers and errors by the kind of the linear, that is its name without the layer."""
    linears = [linear for row in ledger.tensors for linear in row.linears]
    found: dict[str, list[tuple[int, float]]] = {}
    numbers = [int(match[1]) for linear in linears if (match := re.search(r"\.(\d+)\.", linear.linear))]
    after = max(numbers, default=-1) + 1
    for linear in linears:
        match = re.search(r"\.(\d+)\.(.+)", linear.linear)
        layer, kind = (int(match[1]), match[2].rpartition(".")[2]) if match else (after, linear.linear)
        if math.isfinite(linear.error):
            found.setdefault(kind, []).append((layer, linear.error))
    return {
        kind: ([layer for layer, _ in sorted(pairs)], [error for _, error in sorted(pairs)])
        for kind, pairs in found.items()
    }


def trend(entries: Sequence[Entry]) -> Figure:
    """The perplexity ratio to the reference over the runs, a line a target, oldest first."""
    with _style():
        targets = list(dict.fromkeys(entry.target for entry in entries))
        legend = _legend_height(len(targets))
        figure = _figure(2.9 + legend, bottom=0.6 + legend)
        axes: Axes = figure.subplots()
        runs = list(dict.fromkeys(entry.run for entry in entries))
        for index, target in enumerate(targets):
            points = [(runs.index(e.run), e.figures["perplexity_ratio"], e) for e in entries if e.target == target]
            finite = [(x, y, entry.figures["perplexity_ratio_se"] or 0.0) for x, y, entry in points if y is not None]
            style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
            if finite:
                xs, ys, errors = zip(*finite, strict=True)
                axes.errorbar(xs, ys, yerr=errors, capsize=2, markersize=4, linewidth=1, label=target, **style)
            failed = [(x, y) for x, y, entry in points if y is not None and not entry.passed]
            if failed:
                xs, ys = zip(*failed, strict=True)
                axes.scatter(xs, ys, s=90, facecolors="none", edgecolors="#dc2626", linewidths=1.4, zorder=3)
        step = max(1, math.ceil(len(runs) / 8))
        shown = list(range(0, len(runs), step))
        axes.set_xticks(shown, [runs[i][5:10] for i in shown])
        axes.set_xlabel("run (a red ring: a gate failed)")
        axes.set_ylabel("perplexity / reference's")
        _legend(figure)
        return figure


def to_svg(figure: Figure, label: str) -> str:
    """The picture as an element for a page, whose text takes the page's colour; the same bytes for the same figure."""
    stream = io.BytesIO()
    # Ids in one page must not clash, and must not change from run to run.
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": label}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ElementTree.fromstring(stream.getvalue())
    for element in root.findall(f"{{{SVG}}}metadata"):
        root.remove(element)
    for name in ("width", "height"):
        root.attrib.pop(name, None)
    root.attrib.update({"role": "img", "aria-label": label})
    prefix = re.sub(r"\W+", "-", label)
    text = ElementTree.tostring(root, encoding="unicode")
    ids = set(re.findall(r'\bid="([^"]+)"', text))
    own = re.sub(
        r'(\bid="|#)([^"\)]+)(?=["\)])',
        lambda match: f"{match[1]}{prefix}-{match[2]}" if match[2] in ids else match[0],
        text,
    )
    return own.replace(INK, "currentColor")


def save_png(figure: Figure, path: Path) -> None:
    """The picture as a file, on white, whole or not at all."""
    from models.files import replace_file

    stream = io.BytesIO()
    arguments: dict[str, Any] = {"format": "png", "dpi": 200, "facecolor": "white"}
    figure.savefig(stream, **arguments)
    replace_file(path, stream.getvalue())
