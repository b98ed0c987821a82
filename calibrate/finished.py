"""What the finished parts of a layer give, kept instead of computed again.

A layer runs once for each group of its linears, as each group sees what those before it give once they are quantised.
Attention and the MLP hand on what their last linear gives: once that one is quantised, its outputs for the inputs that
were looked at stand in for the whole part in the runs that are left, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from calibrate.statistics import Enough

Run = Callable[[], object]


@dataclass(frozen=True)
class _Part:
    """A child module of the layer that needs no run any more.

    Attributes:
        outputs: of its last linear, batch by batch.
        place: where the output stands in the tuple that the child returns; None where it is all that it returns.
        length: of that tuple.
    """

    outputs: list[torch.Tensor]
    place: int | None
    length: int

    def returned(self, batch: int) -> Any:
        if self.place is None:
            return self.outputs[batch]
        return tuple(self.outputs[batch] if place == self.place else None for place in range(self.length))


class Finished:
    """The finished children of one layer."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._parts: dict[str, _Part] = {}

    @staticmethod
    def ends_part(module: str, later: Sequence[str]) -> bool:
        """Whether no module that is still to be quantised lies in the same child of the layer."""
        child = _child(module)
        return not any(_child(other) == child for other in later)

    @torch.no_grad()
    def keep(self, module: str, inputs: list[torch.Tensor], first: Run) -> None:
        """Lets a linear's outputs stand in for the child that it ends, where that is what the child gives.

        Args:
            module: the linear's name in the layer; it has its final weight, as all others in that child.
            inputs: what it reads, batch by batch; emptied on the way.
            first: runs the layer on the first batch.
        """
        child, linear = _child(module), self._layer.get_submodule(module)
        outputs = [linear(inputs.pop(0))]
        with self.standing_in(0):
            given = _given(self._layer.get_submodule(child), first)
        whole = given if isinstance(given, tuple) else (given,)
        tensors = [place for place, value in enumerate(whole) if value is not None]
        if len(tensors) != 1 or not isinstance(value := whole[tensors[0]], torch.Tensor):
            return
        if value.shape != outputs[0].shape or not torch.equal(value, outputs[0]):
            return
        while inputs:
            outputs.append(linear(inputs.pop(0)))
        self._parts[child] = _Part(outputs, tensors[0] if isinstance(given, tuple) else None, len(whole))

    @contextmanager
    def standing_in(self, batch: int) -> Iterator[None]:
        """What is kept of a batch takes the children's places for the length of the block."""
        try:
            for child, part in self._parts.items():
                # An instance's own `forward` goes before its class's.
                self._layer.get_submodule(child).forward = _always(part.returned(batch))
            yield
        finally:
            for child in self._parts:
                self._layer.get_submodule(child).__dict__.pop("forward", None)


def _child(module: str) -> str:
    return module.partition(".")[0]


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _given(child: nn.Module, run: Run) -> Any:
    """What a child returns in a run, which ends behind it."""
    given: list[Any] = []

    def stop(_: nn.Module, __: Any, output: Any) -> None:
        given.append(output)
        raise Enough

    handle = child.register_forward_hook(stop)
    try:
        run()
    except Enough:
        return given[0]
    finally:
        handle.remove()
    raise ValueError("the module was not run")
