"""Quantises a model a decoder layer at a time; later layers see the error of the earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from calibrate.composition import compares, needs, trains, weighs
from calibrate.fisher import Fisher, LayerFisher
from calibrate.grid import Grid, check_finite
from calibrate.head import Part, parts
from calibrate.links import Smoother
from calibrate.methods import choose_together
from calibrate.replay import Replay, batches
from calibrate.results import Hidden, QuantizedLayer, Results
from calibrate.statistics import Inputs, Moments
from calibrate.stream import Passage, Stream
from models.checkpoint import Checkpoint
from models.family import Dimensions, Family, Linear
from models.skeleton import stored_name

# Tokens of a batch whose inputs are looked at one by one, where the engine rounds them.
SAMPLE = 128
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the codes of a model, apart from its weights and the calibration windows.

    Attributes:
        grids: (linear's full name, its grid), for the linears that are quantised.
        method: names of `calibrate.composition.METHODS`, in their one order.
        dtype: what the model computes in.
        int8_inputs: whether the engine rounds the linears' inputs to int8, each token by its largest.
    """

    grids: tuple[tuple[str, Grid], ...]
    method: tuple[str, ...]
    dtype: torch.dtype
    int8_inputs: bool = False

    @property
    def uses_text(self) -> bool:
        """Whether any method gains from calibration windows."""
        return needs(self.method) != "weights"

    @property
    def streams(self) -> int:
        """How many streams of hidden states the methods want: none, the quantised one, the source's too."""
        return self.uses_text * (1 + self.compares)

    @property
    def compares(self) -> bool:
        """Whether any method wants the hidden states of the source's layers too."""
        return compares(self.method)

    @property
    def trains(self) -> bool:
        """Whether `calibrate.tune` follows."""
        return trains(self.method)

    @property
    def weighs(self) -> bool:
        """Whether `calibrate.fisher` goes before."""
        return weighs(self.method)

    @property
    def smooths(self) -> bool:
        """Whether channels are rescaled along the family's links."""
        return "awq" in self.method


def quantize(
    checkpoint: Checkpoint,
    linears: Sequence[Linear],
    recipe: Recipe,
    windows: torch.Tensor | None,
    results: Results,
    progress: Progress = lambda what, done, total: None,
    fisher: Fisher | None = None,
) -> None:
    """Fills ``results`` with every layer's quantised linears and the head's, continuing where it stopped.

    Args:
        checkpoint: the source weights.
        linears: all linears of the checkpoint; those without a grid in the recipe stay as they are.
        recipe: grids and methods.
        windows: calibration token ids [count, tokens]; None quantises from the weights alone.
        progress: called with what is being done, and how much of how much is done.
        fisher: of the same windows, where the recipe weighs errors by it.

    Raises:
        BadInput: for a non-finite weight, naming tensor and index.
    """
    replay = Replay(checkpoint, recipe.dtype)
    count = len(replay) + 1
    start = results.first_missing(count)
    stream = None
    if windows is not None and recipe.uses_text:
        ids = batches(windows)
        embedded = replay.embed(ids)
        hidden = Hidden(embedded, embedded if recipe.compares else [])
        stream = Stream(replay, ids, results.load_hidden(start) if 0 < start <= len(replay) else hidden)
    smoother = None
    if stream is not None and recipe.smooths:
        named, head_dim = {linear.name: linear for linear in linears}, Dimensions.of(replay.model.config).head_dim
        smoother = Smoother(replay.family, named, recipe.method, head_dim, recipe.dtype)
    run = _Run(checkpoint, replay, dict(recipe.grids), recipe, stream, results, smoother, fisher)
    by_layer: dict[int, list[Linear]] = {}
    for linear in linears:
        if linear.name in run.grids:
            by_layer.setdefault(len(replay) if linear.layer is None else linear.layer, []).append(linear)
    for index in range(start):
        # A run that was killed before it could.
        results.drop_hidden(index)
    for index in range(start, count):
        progress("calibrate", index, count)
        if index < len(replay):
            _layer(run, index, by_layer.get(index, []))
        else:
            _head(run, by_layer.get(index, []))
    progress("calibrate", count, count)


@dataclass(frozen=True)
class _Run:
    """What every layer of a run shares."""

    checkpoint: Checkpoint
    replay: Replay
    grids: dict[str, Grid]
    recipe: Recipe
    stream: Stream | None
    results: Results
    smoother: Smoother | None = None
    fisher: Fisher | None = None

    def moments(self) -> Moments:
        keeps = SAMPLE if self.smoother is not None and self.recipe.int8_inputs else 0
        return Moments(needs(self.recipe.method) == "hessian", keeps)

    def choose(
        self,
        weights: Mapping[str, torch.Tensor],
        inputs: Inputs | None,
        found: QuantizedLayer,
        loss: LayerFisher | None = None,
        parts: Iterable[Part] | None = None,
    ) -> None:
        """Quantises linears, by name, that read the same inputs; those with the same grid together."""
        by_grid: dict[Grid, list[str]] = {}
        for name in weights:
            by_grid.setdefault(self.grids[name], []).append(name)
        for grid, names in by_grid.items():
            outputs = [] if loss is None else [span for name in names for span in loss.outputs[name]]
            together = [weights[name] for name in names]
            all_chosen = choose_together(together, grid, self.recipe.method, inputs, outputs, parts)
            for name, chosen in zip(names, all_chosen, strict=True):
                found.linears[name], found.errors[name] = chosen.quantized, chosen.error
                if chosen.fallback:
                    found.fallbacks[name] = chosen.fallback


def groups(family: Family, prefix: str, linears: Sequence[Linear]) -> list[list[Linear]]:
    """A layer's linears in the order of computation; those that read the same input (q, k, v; gate, up) together."""
    found: dict[tuple[str, ...], list[Linear]] = {}
    for linear in linears:
        name = linear.name.removeprefix(prefix)
        shard = next((shard for shard in family.shards if name in shard), (name,))
        found.setdefault(shard, []).append(linear)
    return list(found.values())


def _layer(run: _Run, index: int, linears: list[Linear]) -> None:
    """Each group of linears sees what the groups before it, quantised, give."""
    with run.replay.layer(index, run.replay.read_finite) as layer:
        prefix = run.replay.prefix(index) + "."
        found = QuantizedLayer()
        loss = None if run.fisher is None else run.fisher.load(index)
        together = {g[0].module.removeprefix(prefix): g for g in groups(run.replay.family, prefix, linears)}
        passage = None
        if run.stream is not None:
            modules = {first: [linear.module for linear in group] for first, group in together.items()}
            also = (
                {}
                if run.smoother is None
                else {first: run.smoother.changes(prefix, g) for first, g in together.items()}
            )
            passage = Passage(run.stream, layer, index, modules, also)
        for first, group in together.items():
            inputs, factors = None, None
            if passage is not None:
                counts = None if loss is None else loss.counts([linear.name for linear in group])
                inputs = passage.inputs(first, run.moments(), counts)
            if run.smoother is not None and inputs is not None:
                factors = run.smoother.smooth(layer, prefix, group, run.grids[group[0].name], inputs, found)
                inputs = inputs if factors is None else inputs.scaled(factors)
            rows = {
                linear.name: layer.get_parameter(f"{linear.module.removeprefix(prefix)}.weight")[
                    linear.start : linear.stop
                ]
                for linear in group
            }
            weights = rows if factors is None else {name: weight.float() * factors for name, weight in rows.items()}
            run.choose(weights, inputs, found, loss)
            for name, weight in rows.items():
                weight.copy_(found.linears[name].dequantize(run.recipe.dtype))
            if passage is not None:
                passage.quantized(first, moved=factors is not None)
        if passage is not None:
            passage.leave()
        run.results.save(index, found, None if run.stream is None else run.stream.hidden)


def _head(run: _Run, linears: list[Linear]) -> None:
    replay, stream = run.replay, run.stream
    found = QuantizedLayer()
    for linear in linears:
        name = stored_name(run.checkpoint, replay.model, f"{linear.module}.weight")
        weight = run.checkpoint.read(name)
        check_finite(f"{run.checkpoint.name}: {name}", weight)
        inputs, weight = None, weight.to(run.recipe.dtype)
        clusters: Iterable[Part] | None = None
        if stream is not None:
            seen, kept = run.moments(), []
            with replay.before_head() as read:
                for i, (ids, hidden) in enumerate(zip(stream.ids, stream.hidden.quantized, strict=True)):
                    x = read(ids, hidden)
                    seen.add(x, read(ids, stream.hidden.reference[i]) if run.recipe.compares else None)
                    kept += [x] if run.recipe.weighs else []
            inputs, clusters = seen.inputs(), parts(weight, kept) if kept else None
            if run.smoother is not None:
                factors = run.smoother.smooth_head(replay.read, linear, weight, run.grids[linear.name], inputs, found)
                if factors is not None:
                    weight, inputs = weight.float() * factors, inputs.scaled(factors)
                    clusters = clusters and _scaled(clusters, factors)
        run.choose({linear.name: weight}, inputs, found, parts=clusters)
    run.results.save(len(replay), found)


def _scaled(parts: Iterable[Part], factors: torch.Tensor) -> Iterator[Part]:
    for part in parts:
        yield replace(part, inputs=part.inputs.scaled(factors))
