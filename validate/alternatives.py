"""What other grids and methods would cost and save, estimated from the weights' errors.

The divergence that a linear causes goes with the energy of its output's error, so its attributed part is scaled by how
that energy changes when some of its rows are quantised in the other way. An estimate: only a run measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from calibrate.composition import METHODS
from calibrate.grid import Grid
from calibrate.methods import choose
from calibrate.quantize import batches
from calibrate.replay import Replay
from calibrate.statistics import Inputs, observe
from export.layout import Layout
from export.ledger import LinearRow
from models.family import Linear
from models.opened import OpenedModel
from models.skeleton import Reader

# Output channels of each linear that are tried, evenly spread.
ROWS = 32
GROUP_SIZES = (256, 128, 64, 32)
# Stands for methods that want to know more than a pass over a little text gives.
STAND_IN = "search"


@dataclass(frozen=True)
class Alternative:
    """A change of the whole target.

    Attributes:
        change: keys of the target in a pipeline.yaml.
        kl: the divergence that it would buy back, in nats per token, by estimate.
        extra_bits: what it would cost.
    """

    change: Mapping[str, Any]
    kl: float
    extra_bits: float


@torch.no_grad()
def observed_hidden(
    model: OpenedModel, windows: torch.Tensor, dtype: torch.dtype, progress: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The source's final hidden states [windows, tokens, hidden], and the second moments of its linears' inputs.

    Returns also fp32 [K] by the checkpoint's module; the head's are not among them.
    """
    replay = Replay(model.checkpoint, dtype)
    hidden = replay.embed(batches(windows))
    moments: dict[str, torch.Tensor] = {}
    for index in range(len(replay)):
        progress(index, len(replay))
        names = {linear.module for linear in model.linears if linear.layer == index}
        with replay.layer(index) as layer:
            prefix = f"{replay.prefix(index)}."
            with observe({name: layer.get_submodule(name.removeprefix(prefix)) for name in names}) as observed:
                hidden = [replay.run(layer, index, part) for part in hidden]
            moments |= {name: found.second_moments() for name, found in observed.items()}
    progress(len(replay), len(replay))
    return torch.cat(hidden), moments


def alternatives(
    linears: Sequence[Linear],
    rows: Mapping[str, LinearRow],
    parts: Mapping[str, float],
    moments: Mapping[str, torch.Tensor],
    grids: Mapping[str, Grid],
    layout: Layout | None,
    read: Reader,
) -> list[Alternative]:
    """Smaller groups and other methods, where the layout takes them, each alone.

    Args:
        linears: quantised ones whose weights are the source's apart from rounding.
        rows: of the ledger, by linear.
        parts: the divergence attributed to each.
        moments: as from `observed_hidden`.
        grids: of each linear.
        layout: None where every linear has one group a row.
        read: the source's tensors by the model's names.
    """
    changes = _changes(linears, rows, layout)
    if not changes:
        return []
    kl = [0.0] * len(changes)
    bits = [0.0] * len(changes)
    for linear in linears:
        row = rows[linear.name]
        weight = read(f"{linear.module}.weight")[linear.start : linear.stop]
        weight = weight[:: max(1, len(weight) // ROWS)].float()
        found = moments.get(linear.module)
        inputs = None if found is None else Inputs(found)
        now, names = grids[linear.name], _simple(row.method)
        before = choose(weight, now, names, inputs).error
        for index, change in enumerate(changes):
            grid = replace(now, group_size=change.get("group_size", now.group_size))
            after = choose(weight, grid, change.get("method", names), inputs).error
            kl[index] += parts[linear.name] * (1 - (after / before) ** 2 if before else 0)
            bits[index] += (grid.bits_per_weight - now.bits_per_weight) * linear.weights
    return [Alternative(change, *found) for change, *found in zip(changes, kl, bits, strict=True)]


def _changes(linears: Sequence[Linear], rows: Mapping[str, LinearRow], layout: Layout | None) -> list[dict[str, Any]]:
    sizes = [
        size
        for size in GROUP_SIZES
        if layout is not None
        and all(
            size < rows[linear.name].group_size
            and linear.columns % size == 0
            and not layout.shape_problems(linear.rows, linear.columns, size)
            for linear in linears
        )
    ]
    used = {name for linear in linears for name in rows[linear.name].method}
    methods = [
        name
        for name, method in METHODS.items()
        if method.stage == "codes" and method.needs != "hessian" and name not in used
    ]
    # A method that wants to know more is not given up for one that is content with less.
    if any(METHODS[name].needs == "hessian" for name in used if name in METHODS):
        methods = []
    return [{"group_size": size} for size in sizes] + [{"method": [name]} for name in methods]


def untried(rows: Mapping[str, LinearRow]) -> list[str]:
    """Methods for the same bits that cannot be estimated here: they want more text than is looked at."""
    used = {name for row in rows.values() for name in row.method}
    return [name for name, method in METHODS.items() if method.needs == "hessian" and name not in used]


def _simple(names: Sequence[str]) -> list[str]:
    """The method that chooses the codes, or what stands for it."""
    chosen = [name for name in names if name in METHODS and METHODS[name].stage == "codes"]
    return chosen if chosen and METHODS[chosen[0]].needs != "hessian" else [STAND_IN]
