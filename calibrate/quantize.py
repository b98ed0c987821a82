"""Quantises a model a decoder layer at a time; later layers see the error of the earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from calibrate.grid import Grid, Quantized, check_finite
from calibrate.methods import METHODS
from calibrate.replay import Replay
from calibrate.results import QuantizedLayer, Results
from calibrate.search import error
from calibrate.statistics import observe
from models.checkpoint import Checkpoint
from models.family import Linear
from models.skeleton import stored_name

# Tokens in one forward pass of a layer: enough to fill a matrix unit, small enough for eager attention.
BATCH_TOKENS = 4096
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the codes of a model, apart from its weights and the calibration windows.

    Attributes:
        grids: (linear's full name, its grid), for the linears that are quantised.
        method: names of `calibrate.methods.METHODS`.
        dtype: what the model computes in.
    """

    grids: tuple[tuple[str, Grid], ...]
    method: tuple[str, ...]
    dtype: torch.dtype

    @property
    def uses_moments(self) -> bool:
        return any(METHODS[name].uses_moments for name in self.method)


def batches(windows: torch.Tensor) -> list[torch.Tensor]:
    """Windows [count, tokens] in batches of about BATCH_TOKENS tokens."""
    return list(windows.split(max(1, BATCH_TOKENS // windows.shape[1])))


def quantize(
    checkpoint: Checkpoint,
    linears: Sequence[Linear],
    recipe: Recipe,
    windows: torch.Tensor | None,
    results: Results,
    progress: Progress = lambda what, done, total: None,
) -> None:
    """Fills ``results`` with every layer's quantised linears and the head's, continuing where it stopped.

    Args:
        checkpoint: the source weights.
        linears: all linears of the checkpoint; those without a grid in the recipe stay as they are.
        recipe: grids and methods.
        windows: calibration token ids [count, tokens]; None quantises from the weights alone.
        progress: called with what is being done, and how much of how much is done.

    Raises:
        BadInput: for a non-finite weight, naming tensor and index.
    """
    replay = Replay(checkpoint, recipe.dtype)
    grids = dict(recipe.grids)
    count = len(replay) + 1
    start = results.first_missing(count)
    stream = _Stream(replay, batches(windows), results, start) if windows is not None and recipe.uses_moments else None
    by_layer: dict[int, list[Linear]] = {}
    for linear in linears:
        by_layer.setdefault(len(replay) if linear.layer is None else linear.layer, []).append(linear)
    for index in range(start):
        # A run that was killed before it could.
        results.drop_hidden(index)
    for index in range(start, count):
        progress("calibrate", index, count)
        chosen = [linear for linear in by_layer.get(index, ()) if linear.name in grids]
        if index < len(replay):
            _layer(checkpoint, replay, index, chosen, grids, recipe, stream, results)
        else:
            _head(checkpoint, replay, chosen, grids, recipe, stream, results)
    progress("calibrate", count, count)


class _Stream:
    """The calibration batches' hidden states on their way through the layers."""

    def __init__(self, replay: Replay, ids: list[torch.Tensor], results: Results, start: int) -> None:
        self.ids = ids
        embedded = replay.embed(ids)
        self.hidden = embedded if start == 0 else results.load_hidden(start) if start <= len(replay) else []


def _layer(
    checkpoint: Checkpoint,
    replay: Replay,
    index: int,
    linears: list[Linear],
    grids: dict[str, Grid],
    recipe: Recipe,
    stream: _Stream | None,
    results: Results,
) -> None:
    with replay.layer(index) as layer:
        prefix = replay.prefix(index) + "."
        modules = {linear.module: layer.get_submodule(linear.module.removeprefix(prefix)) for linear in linears}
        for name in modules:
            # From the file, not from the module: a cast to the compute dtype could hide or make an infinity.
            check_finite(f"{checkpoint.name}: {name}.weight", checkpoint.read(f"{name}.weight"))
        moments: dict[str, torch.Tensor] = {}
        if stream is not None and linears:
            with observe(modules) as observed:
                for hidden in stream.hidden:
                    replay.run(layer, index, hidden)
            moments = {name: m.second_moments() for name, m in observed.moments.items()}
        found = QuantizedLayer({}, {})
        for linear in linears:
            module = modules[linear.module]
            assert isinstance(module, nn.Linear)
            rows = module.weight[linear.start : linear.stop]
            quantized = _choose(rows, grids[linear.name], recipe, moments.get(linear.module))
            found.linears[linear.name] = quantized
            found.errors[linear.name] = error(rows, quantized, moments.get(linear.module))
            rows.copy_(quantized.dequantize(recipe.dtype))
        if stream is not None:
            stream.hidden = [replay.run(layer, index, hidden) for hidden in stream.hidden]
        results.save(index, found, None if stream is None else stream.hidden)


def _head(
    checkpoint: Checkpoint,
    replay: Replay,
    linears: list[Linear],
    grids: dict[str, Grid],
    recipe: Recipe,
    stream: _Stream | None,
    results: Results,
) -> None:
    found = QuantizedLayer({}, {})
    for linear in linears:
        name = stored_name(checkpoint, replay.model, f"{linear.module}.weight")
        weight = checkpoint.read(name)
        check_finite(f"{checkpoint.name}: {name}", weight)
        moments = None
        if stream is not None:
            # The identity stands in for the head: only its input is wanted, not a table of logits.
            with replay.before_head() as inputs, observe({linear.name: (probe := nn.Identity())}) as observed:
                for ids, hidden in zip(stream.ids, stream.hidden, strict=True):
                    probe(inputs(ids, hidden))
            moments = observed.moments[linear.name].second_moments()
        quantized = _choose(weight.to(recipe.dtype), grids[linear.name], recipe, moments)
        found.linears[linear.name] = quantized
        found.errors[linear.name] = error(weight.to(recipe.dtype), quantized, moments)
    results.save(len(replay), found)


def _choose(weight: torch.Tensor, grid: Grid, recipe: Recipe, moments: torch.Tensor | None) -> Quantized:
    (method,) = recipe.method
    return METHODS[method].choose(weight, grid, moments)
