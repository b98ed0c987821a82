"""What calibration learns about a linear's inputs, gathered by hooks while a layer runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from calibrate.hessian import Factor, factorise


@dataclass(frozen=True)
class Inputs:
    """A linear's inputs, as far as the methods want to know them.

    Attributes:
        moments: fp32 [K], second moments E[x_k^2].
        hessian: fp32 [K, K], E[x x^T], where a method wants it.
    """

    moments: torch.Tensor
    hessian: torch.Tensor | None = None

    @staticmethod
    def alike(columns: int) -> Inputs:
        """Of a linear that nothing is known of: every channel weighs the same, and for itself."""
        return Inputs(torch.ones(columns))

    @property
    def full(self) -> torch.Tensor:
        """All second moments, [K, K]: of independent channels where there are no others."""
        return torch.diag(self.moments) if self.hessian is None else self.hessian

    @property
    def second(self) -> torch.Tensor:
        """The fullest second moments there are, [K, K] or [K]: what the error of the output is measured by."""
        return self.moments if self.hessian is None else self.hessian

    @cached_property
    def factor(self) -> Factor:
        """Of the Hessian; of independent channels where there is none."""
        return factorise(self.full)


@dataclass
class Moments:
    """Running second moments of a linear's input.

    Attributes:
        full: whether products of different channels are summed too.
        total: fp64 [K], sum over tokens of x squared.
        products: fp32 [K, K], sum over tokens of x x^T; only when ``full``.
        tokens: how many tokens were summed.
    """

    full: bool = False
    total: torch.Tensor | None = None
    products: torch.Tensor | None = None
    tokens: int = 0

    def add(self, x: torch.Tensor) -> None:
        """Takes inputs [..., K]."""
        x = x.reshape(-1, x.shape[-1]).float()
        batch = x.square().sum(0).double()
        self.total = batch if self.total is None else self.total + batch
        if self.full:
            self.products = x.t() @ x if self.products is None else self.products.addmm_(x.t(), x)
        self.tokens += x.shape[0]

    def second_moments(self) -> torch.Tensor:
        """E[x^2] per input channel, fp32 [K]. Raises ValueError before any input was seen."""
        if self.total is None:
            raise ValueError("no inputs were seen")
        return (self.total / self.tokens).float()

    def inputs(self) -> Inputs:
        """What was seen. Raises ValueError before any input was."""
        moments = self.second_moments()
        return Inputs(moments, None if self.products is None else self.products / self.tokens)


class Enough(Exception):
    """Every observed module has seen its input: the rest of the forward pass would teach nothing."""


@contextmanager
def observe(modules: Mapping[str, nn.Module], full: bool = False, stop: bool = False) -> Iterator[dict[str, Moments]]:
    """Hooks modules for the length of the block.

    Args:
        modules: by name; each runs once in a forward pass.
        full: whether products of different channels are summed too.
        stop: whether a forward pass ends with `Enough` once every module has seen its input.

    Yields:
        The running moments of every module's input, by name.
    """
    observed = {name: Moments(full) for name in modules}
    waiting = set(modules)

    def see(name: str, x: torch.Tensor) -> None:
        observed[name].add(x)
        waiting.discard(name)
        if stop and not waiting:
            waiting.update(modules)
            raise Enough

    def hook(name: str) -> torch.utils.hooks.RemovableHandle:
        return modules[name].register_forward_pre_hook(lambda _, inputs: see(name, inputs[0]))

    handles = [hook(name) for name in modules]
    try:
        yield observed
    finally:
        for handle in handles:
            handle.remove()
