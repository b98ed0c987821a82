"""What calibration learns about a linear's inputs, gathered by hooks while a layer runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass
class Moments:
    """Running second moments of a linear's input.

    Attributes:
        total: fp64 [K], sum over tokens of x squared.
        tokens: how many tokens were summed.
    """

    total: torch.Tensor | None = None
    tokens: int = 0

    def add(self, x: torch.Tensor) -> None:
        """Takes inputs [..., K]."""
        x = x.reshape(-1, x.shape[-1]).float()
        batch = x.square().sum(0).double()
        self.total = batch if self.total is None else self.total + batch
        self.tokens += x.shape[0]

    def second_moments(self) -> torch.Tensor:
        """E[x^2] per input channel, fp32 [K]. Raises ValueError before any input was seen."""
        if self.total is None:
            raise ValueError("no inputs were seen")
        return (self.total / self.tokens).float()


@dataclass
class Observed:
    """The moments of every hooked module's input, by module name."""

    moments: dict[str, Moments] = field(default_factory=dict)


@contextmanager
def observe(modules: Mapping[str, nn.Module]) -> Iterator[Observed]:
    """Hooks the modules for the length of the block."""
    observed = Observed({name: Moments() for name in modules})

    def hook(name: str) -> torch.utils.hooks.RemovableHandle:
        return modules[name].register_forward_pre_hook(lambda _, inputs: observed.moments[name].add(inputs[0]))

    handles = [hook(name) for name in modules]
    try:
        yield observed
    finally:
        for handle in handles:
            handle.remove()
