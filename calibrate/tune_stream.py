"""A model's forward and backward pass with one layer's weights and activations in memory.

Forward keeps only the hidden states at the layers' boundaries; backward runs each layer again, with gradients, from
the last to the first. The end of the model takes a few tokens at a time, so that no table of logits is ever whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from calibrate.grid import Quantized
from calibrate.replay import Replay
from calibrate.results import QuantizedLayer
from calibrate.tune_parameters import TrainedGrid, TrainedLayer
from models.wide import linear

Take = Callable[[torch.Tensor, torch.Tensor], None]
# Tokens whose logits are in memory at once.
ROWS = 128
# Logits in one pass of the elementwise arithmetic: they stay in cache through all of it.
CHUNK = 1 << 18
# Rows of a quantised head whose weights' gradients are in memory at once.
HEAD_ROWS = 4096


def divergence(reference: torch.Tensor, logits: torch.Tensor) -> tuple[float, torch.Tensor]:
    """KL(reference || model) of logits [rows, vocabulary], in nats summed over rows, and its gradient.

    The gradient with respect to the model's logits is softmax(logits) - softmax(reference), in the logits' dtype.
    """
    total, gradient = 0.0, torch.empty_like(logits)
    rows = max(1, CHUNK // logits.shape[1])
    for a, b, out in zip(reference.split(rows), logits.split(rows), gradient.split(rows), strict=True):
        log_a, log_b = torch.log_softmax(a.float(), -1), torch.log_softmax(b.float(), -1)
        difference = log_a - log_b
        probabilities = log_a.exp_()
        total += float(torch.linalg.vecdot(probabilities, difference).double().sum())
        torch.sub(log_b.exp_(), probabilities, out=difference)
        out.copy_(difference)
    return total, gradient


class Layers:
    """The decoder layers of a model whose stored numbers are under training.

    Args:
        load: a layer's codes and changed tensors, by index.
        trained: a layer's numbers under training, by index.
    """

    def __init__(self, replay: Replay, load: Callable[[int], QuantizedLayer], trained: Sequence[TrainedLayer]) -> None:
        self.replay, self.load, self.trained = replay, load, trained

    def forward(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Every layer's input and the last one's output, [batch, tokens, hidden] each."""
        boundaries = [hidden]
        for index in range(len(self.replay)):
            boundaries.append(self.last(boundaries[-1], index, index + 1))
        return boundaries

    def last(self, hidden: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The output of layer ``stop`` - 1 (the last one) for the input of layer ``start``."""
        for index in range(start, len(self.replay) if stop is None else stop):
            with self.replay.layer(index, self._reader(index, self.load(index))) as layer:
                hidden = self.replay.run(layer, index, hidden)
        return hidden

    def backward(self, boundaries: list[torch.Tensor], gradient: torch.Tensor) -> Iterator[int]:
        """Adds to the shifts' gradients, from the last layer to the first; yields each finished layer's index.

        Args:
            boundaries: as from `forward`; emptied on the way.
            gradient: the loss's with respect to the last boundary.
        """
        boundaries.pop()
        for index in reversed(range(len(self.replay))):
            hidden = boundaries.pop().detach().requires_grad_(index > 0)
            found, trained, prefix = self.load(index), self.trained[index], self.replay.prefix(index) + "."
            with self.replay.layer(index, self._reader(index, found)) as layer:
                trained.require_gradients(layer, prefix)
                with torch.enable_grad():
                    output = self.replay.forward(layer, index, hidden)
                output.backward(gradient)
                trained.add_gradients(found, layer, prefix)
            if hidden.grad is not None:
                gradient = hidden.grad
            yield index

    def _reader(self, index: int, found: QuantizedLayer) -> Callable[[str], torch.Tensor]:
        return self.trained[index].reader(found, self.replay.read, self.replay.dtype)


class End:
    """The end of a model under training (final norm, head) against the reference's, a few tokens at a time.

    Args:
        reference: gives the logits to match.
        replay: the model under training.
        found: the head's codes, where it is quantised.
        trained: the final norm's numbers, and those of a quantised head.
    """

    def __init__(self, reference: Replay, replay: Replay, found: QuantizedLayer, trained: TrainedLayer) -> None:
        self.reference, self.replay, self.found, self.trained = reference, replay, found, trained

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Holds the weights of both ends for the length of the block, in which the method below works."""
        model = self.replay.model
        head = model.get_output_embeddings()
        with self.reference.end() as self._expected, self.replay.end(gradients=True) as self._logits:
            try:
                for name, linear in self.found.linears.items():
                    model.set_output_embeddings(_TrainedHead(self.trained.grids[name], linear, head.bias))
                yield
            finally:
                model.set_output_embeddings(head)

    def loss(
        self, ids: torch.Tensor, reference: torch.Tensor, hidden: torch.Tensor, train: bool = False
    ) -> tuple[float, torch.Tensor | None]:
        """KL(reference || model) in nats, summed over all tokens.

        Args:
            ids: token ids [batch, tokens]; they only say how many there are.
            reference, hidden: both models' last layers' outputs [batch, tokens, hidden].
            train: whether to add to the shifts' gradients.

        Returns:
            The loss and, in training, its gradient with respect to ``hidden``, else None.
        """
        self._store()
        total, gradients = 0.0, []
        parts = (tensor.flatten(0, 1).split(ROWS) for tensor in (ids, reference, hidden))
        for part, known, own in zip(*parts, strict=True):
            with torch.no_grad():
                expected = self._expected(part[None], known[None])[0]
            own = own.detach().requires_grad_(train)
            with torch.set_grad_enabled(train):
                logits = self._logits(part[None], own[None])[0]
            loss, gradient = divergence(expected, logits.detach())
            total += loss
            if train:
                logits.backward(gradient)
                self._take()
                assert own.grad is not None
                gradients.append(own.grad)
        return total, torch.cat(gradients).view(hidden.shape) if train else None

    def _store(self) -> None:
        """Gives the loaded modules the numbers as they are stored now."""
        for name, trained in self.trained.tensors.items():
            parameter = self.replay.model.get_parameter(name)
            parameter.data = trained.value().to(self.replay.dtype)
            parameter.requires_grad_()
        head = self.replay.model.get_output_embeddings()
        if isinstance(head, _TrainedHead):
            head.store(self.replay.dtype)

    def _take(self) -> None:
        """Adds the gradients of the norm's numbers at once: a sum over many parts is too long for bf16."""
        for name, trained in self.trained.tensors.items():
            parameter = self.replay.model.get_parameter(name)
            assert parameter.grad is not None
            trained.add_gradient(parameter.grad)
            parameter.grad = None


class _TrainedHead(nn.Module):
    """A quantised head under training: the gradient of its weight [vocabulary, K] is never whole."""

    bias: nn.Parameter | None

    def __init__(self, grid: TrainedGrid, linear: Quantized, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.grid, self.linear = grid, linear
        self.register_parameter("bias", bias)

    def store(self, dtype: torch.dtype) -> None:
        self.weight = self.grid.weight(self.linear, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Product.apply(x, self.weight, self._take)
        return y if self.bias is None else y + self.bias

    def _take(self, x: torch.Tensor, gradient: torch.Tensor) -> None:
        """x [tokens, K], gradient of the logits [tokens, vocabulary]."""
        for start in range(0, len(self.weight), HEAD_ROWS):
            rows = gradient[:, start : start + HEAD_ROWS]
            self.grid.add_gradient(self.linear, linear(rows.t(), x.t()), start)


class _Product(torch.autograd.Function):
    """x @ weight.T; backward hands ``take`` what the weight's gradient is made of instead of making it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, take: Take) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.take = take
        return linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.take(x.flatten(0, -2), gradient.flatten(0, -2))
        return linear(gradient, weight.t()), None, None
