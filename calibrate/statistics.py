"""What calibration learns about a linear's inputs, gathered by hooks while a layer runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from calibrate.hessian import Factor, correction, damped, factorise
from calibrate.products import cross, gram


@dataclass(frozen=True)
class Inputs:
    """A linear's inputs, as far as the methods want to know them.

    Attributes:
        moments: fp32 [K], second moments E[x_k^2].
        hessian: fp32 [K, K], E[x x^T], where a method wants it.
        drift: fp32 [K, K], E[(x~ - x) x^T] with the inputs x~ of the source's model, where a method compares with it.
        wanted: fp32 [N, K], E[y x^T] with the outputs y that would give what follows its value in the source's model;
            instead of the drift, where that is known.
        sample: fp32 [tokens, K], some of the inputs, where a method looks at them one by one.
    """

    moments: torch.Tensor
    hessian: torch.Tensor | None = None
    drift: torch.Tensor | None = None
    wanted: torch.Tensor | None = None
    sample: torch.Tensor | None = None

    @staticmethod
    def alike(columns: int) -> Inputs:
        """Of a linear that nothing is known of: every channel weighs the same, and for itself."""
        return Inputs(torch.ones(columns))

    def scaled(self, factors: torch.Tensor) -> Inputs:
        """What a linear reads where each channel was divided by its factor [K]."""
        products = torch.outer(factors, factors)
        hessian, drift = (None if t is None else t / products for t in (self.hessian, self.drift))
        wanted, sample = (None if t is None else t / factors for t in (self.wanted, self.sample))
        return Inputs(self.moments / factors.square(), hessian, drift, wanted, sample)

    @property
    def full(self) -> torch.Tensor:
        """All second moments, [K, K]: of independent channels where there are no others."""
        return torch.diag(self.moments) if self.hessian is None else self.hessian

    def target(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight [N, K] that a quantised one should come near: see `calibrate.hessian.correction`."""
        if self.wanted is not None:
            missing = self.wanted - weight.float() @ self.full
        elif self.drift is not None:
            missing = weight.float() @ self.drift
        else:
            return weight
        return weight + correction(missing, self._cholesky)

    @cached_property
    def _cholesky(self) -> torch.Tensor:
        return torch.linalg.cholesky(damped(self.full))

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
        keeps: how many tokens of every batch are kept as they are, evenly spread.
        total: fp64 [K], sum over tokens of x squared.
        products: fp32 [K, K], sum over tokens of x x^T; only when ``full``.
        drift: fp32 [K, K], sum over tokens of (x~ - x) x^T, where inputs x~ of the source's model were given too.
        wanted: fp32 [N, K], sum over tokens of y x^T, where outputs y were given too.
        tokens: how many tokens were summed.
    """

    full: bool = False
    keeps: int = 0
    total: torch.Tensor | None = None
    products: torch.Tensor | None = None
    drift: torch.Tensor | None = None
    wanted: torch.Tensor | None = None
    tokens: int = 0
    kept: list[torch.Tensor] = field(default_factory=list)

    def add(
        self,
        x: torch.Tensor,
        reference: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        wanted: torch.Tensor | None = None,
    ) -> None:
        """Takes inputs.

        Args:
            x: [..., K].
            reference: what the source's model has in their place.
            weights: what each token counts, fp32 [...].
            wanted: what the outputs should be, [..., N], without bias.
        """
        if weights is not None:
            roots = weights.sqrt().to(x.dtype).view(*x.shape[:-1], 1)
            x, reference, wanted = x * roots, *(None if t is None else t * roots for t in (reference, wanted))
        x = x.reshape(-1, x.shape[-1])
        self.total = _sum(self.total, x.float().square().sum(0).double())
        if self.full:
            self.products = _sum(self.products, gram(x))
        if reference is not None:
            # The difference in the inputs' own dtype: its rounding is far below theirs.
            self.drift = _sum(self.drift, cross(reference.reshape(x.shape) - x, x))
        if wanted is not None:
            self.wanted = _sum(self.wanted, cross(wanted.reshape(len(x), -1).to(x.dtype), x))
        if self.keeps:
            self.kept.append(x[:: max(1, len(x) // self.keeps)].to(torch.float32, copy=True))
        self.tokens += x.shape[0]

    def second_moments(self) -> torch.Tensor:
        """E[x^2] per input channel, fp32 [K]. Raises ValueError before any input was seen."""
        if self.total is None:
            raise ValueError("no inputs were seen")
        return (self.total / self.tokens).float()

    def inputs(self) -> Inputs:
        """What was seen. Raises ValueError before any input was."""
        moments = self.second_moments()
        sums = (self.products, self.drift, self.wanted)
        hessian, drift, wanted = (None if t is None else t / self.tokens for t in sums)
        return Inputs(moments, hessian, drift, wanted, torch.cat(self.kept) if self.kept else None)


def _sum(total: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
    return part if total is None else total.add_(part)


@contextmanager
def observe(modules: Mapping[str, nn.Module], full: bool = False) -> Iterator[dict[str, Moments]]:
    """Hooks modules for the length of the block.

    Args:
        modules: by name.
        full: whether products of different channels are summed too.

    Yields:
        The running moments of every module's input, by name.
    """
    observed = {name: Moments(full) for name in modules}

    def hook(name: str) -> torch.utils.hooks.RemovableHandle:
        return modules[name].register_forward_pre_hook(lambda _, inputs: observed[name].add(inputs[0]))

    handles = [hook(name) for name in modules]
    try:
        yield observed
    finally:
        for handle in handles:
            handle.remove()


class Enough(Exception):
    """A module's input was seen: the rest of the forward pass would teach nothing."""


def first_inputs(modules: Sequence[nn.Module], forward: Callable[[], object]) -> list[torch.Tensor]:
    """What modules read in a forward pass, which ends at the last of them.

    Raises:
        ValueError: when the forward pass does not come to that.
    """

    def stop(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        raise Enough

    with reading({str(i): module for i, module in enumerate(modules)}) as seen:
        handle = modules[-1].register_forward_pre_hook(stop)
        try:
            forward()
        except Enough:
            return [seen[str(i)] for i in range(len(modules))]
        finally:
            handle.remove()
    raise ValueError("the module was not run")


@contextmanager
def reading(
    modules: Mapping[str, nn.Module], writers: Mapping[str, nn.Module] | None = None
) -> Iterator[dict[str, torch.Tensor]]:
    """Yields what modules read in the last forward pass of the block, and what others gave, by name."""
    seen: dict[str, torch.Tensor] = {}

    def read(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        return module.register_forward_pre_hook(lambda _, inputs: seen.__setitem__(name, inputs[0]))

    def written(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        return module.register_forward_hook(lambda _, __, output: seen.__setitem__(name, output))

    handles = [read(name, module) for name, module in modules.items()]
    handles += [written(name, module) for name, module in (writers or {}).items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
