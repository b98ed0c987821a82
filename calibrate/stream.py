"""The calibration text's hidden states on their way through the layers, as they are quantised and as the source's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from calibrate.finished import Finished
from calibrate.replay import Replay
from calibrate.results import Hidden
from calibrate.statistics import Inputs, Moments, first_inputs, reading
from models.family import Family


class Stream:
    """The batches between two layers.

    Args:
        replay: runs the layers.
        ids: token ids [batch, tokens] of every batch.
        hidden: what enters the next layer; the source's stream in it where methods compare with that.
    """

    def __init__(self, replay: Replay, ids: list[torch.Tensor], hidden: Hidden) -> None:
        self.replay, self.ids, self.hidden = replay, ids, hidden

    @property
    def compares(self) -> bool:
        """Whether the source's hidden states come along."""
        return bool(self.hidden.reference)

    def advance(self, layer: nn.Module, index: int, finished: Finished) -> None:
        """Takes the quantised stream through the quantised layer."""
        outputs = []
        for i, hidden in enumerate(self.hidden.quantized):
            with finished.standing_in(i):
                outputs.append(self.replay.run(layer, index, hidden))
        self.hidden.quantized = outputs

    def advance_reference(
        self, layer: nn.Module, index: int, readers: Sequence[str], writers: Sequence[str]
    ) -> dict[str, list[torch.Tensor]]:
        """Takes the source's stream through the source's layer.

        Returns:
            What ``readers`` among its modules read on the way, and what ``writers`` gave, by name and batch.
        """
        seen: dict[str, list[torch.Tensor]] = {name: [] for name in (*readers, *writers)}
        outputs = []
        modules = ({name: layer.get_submodule(name) for name in names} for names in (readers, writers))
        with reading(*modules) as last:
            for hidden in self.hidden.reference:
                outputs.append(self.replay.run(layer, index, hidden))
                for name, tensors in seen.items():
                    tensors.append(last[name])
        self.hidden.reference = outputs
        return seen


class Passage:
    """A stream's way through one layer, whose groups of linears are quantised one after another on the way.

    Args:
        stream: before the layer; behind it once `leave` was called.
        layer: with the source's weights; each group's are replaced by the caller between `inputs` and `quantized`.
        index: the layer's number.
        groups: modules of the layer that are quantised, in the order of computation, by the first of those that read
            the same input.
        also: other modules that change when a group is quantised.
    """

    def __init__(
        self,
        stream: Stream,
        layer: nn.Module,
        index: int,
        groups: Mapping[str, Sequence[str]],
        also: Mapping[str, Sequence[str]],
    ) -> None:
        self.stream, self.layer, self.index = stream, layer, index
        self._left = {first: set(modules) for first, modules in groups.items()}
        self._also, self._finished = also, Finished(layer)
        self._kept: list[torch.Tensor] = []
        self._source: dict[str, list[torch.Tensor]] = {}
        if stream.compares:
            norms = {name: norm for name in groups if (norm := self._norm_before(name)) is not None}
            readers = [name for name in groups if name not in norms]
            self._source = stream.advance_reference(layer, index, [*readers, *norms.values()], list(norms))

    def _norm_before(self, linear: str) -> str | None:
        family: Family = self.stream.replay.family
        return None if family.links is None else family.links.norm_before(linear)

    def inputs(self, first: str, seen: Moments, counts: torch.Tensor | None) -> Inputs:
        """What the next group's linears read, with the layer's weights as they are now, beside what they read in the
        source; where their outputs are added to the residual stream, what would make that the source's again.

        Args:
            first: the group's name.
            seen: gets it.
            counts: what each token counts.
        """
        batches = self.stream.hidden.quantized
        modules = self._left.pop(first)
        later = [module for name in self._left for module in (name, *self._also.get(name, ()))]
        keeps = len(modules) == 1 and Finished.ends_part(first, later)
        parts = None if counts is None else counts.split([hidden.shape[:2].numel() for hidden in batches])
        norm = self._norm_before(first) if self._source else None
        read = [self.layer.get_submodule(name) for name in (norm, first) if name is not None]
        for i in range(len(batches)):
            with self._finished.standing_in(i):
                *before, x = first_inputs(read, self._run(i))
            if keeps:
                self._kept.append(x)
            weights, source = None if parts is None else parts[i], self._source[first][i] if self._source else None
            if source is None or norm is None:
                seen.add(x, source, weights)
            else:
                seen.add(x, None, weights, self._source[norm][i] - before[0] + _without_bias(source, read[-1]))
        needed = {*self._left, *map(self._norm_before, self._left)}
        self._source = {name: tensors for name, tensors in self._source.items() if name in needed}
        return seen.inputs()

    def quantized(self, first: str, moved: bool) -> None:
        """The group has its final weights; ``moved`` says whether what it reads has changed with them."""
        if self._kept:
            module = self.layer.get_submodule(first)
            for i in range(len(self._kept)) if moved else ():
                with self._finished.standing_in(i):
                    (self._kept[i],) = first_inputs([module], self._run(i))
            self._finished.keep(first, self._kept, self._run(0))
            self._kept = []

    def _run(self, batch: int) -> Callable[[], torch.Tensor]:
        return partial(self.stream.replay.run, self.layer, self.index, self.stream.hidden.quantized[batch])

    def leave(self) -> None:
        """All groups have; the stream goes on behind the layer."""
        self.stream.advance(self.layer, self.index, self._finished)


def _without_bias(outputs: torch.Tensor, linear: nn.Module) -> torch.Tensor:
    assert isinstance(linear, nn.Linear)
    return outputs if linear.bias is None else outputs - linear.bias
