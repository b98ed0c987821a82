"""Runs the real model a decoder layer at a time, with one layer's weights in memory.

No forward is written again here. The transformers model is built without weights, its decoder layers are replaced by
recorders, and the real forward runs once per batch shape with only the embedding loaded: each recorder keeps the
arguments that the model would have passed to its layer (masks and rotary embeddings per layer type, position ids).
A layer then runs on stored hidden states with its own recorded arguments. The end of the model (final norm, head,
any scaling of the logits) is the real forward again, with the last recorder handing over the final hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from calibrate.grid import check_finite
from models.checkpoint import Checkpoint
from models.family import Family, family_of
from models.memory import give_back
from models.skeleton import Reader, materialise, reader, release, skeleton

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# Tokens in one forward pass of a layer: enough to fill a matrix unit, small enough for eager attention.
BATCH_TOKENS = 4096


def batches(windows: torch.Tensor) -> list[torch.Tensor]:
    """Windows [count, tokens] in batches of about BATCH_TOKENS tokens."""
    return list(windows.split(max(1, BATCH_TOKENS // windows.shape[1])))


class Recorder(nn.Module):
    """Stands in for a decoder layer: keeps its arguments and passes the hidden states on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # In a tuple, so that the layer's parameters are not this module's.
        self._layer = (layer,)
        self.hidden: torch.Tensor | None = None
        self.arguments: Arguments | None = None
        self.output: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        # The model's forward may read its layers' attributes (attention_type, layer_type).
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_layer":
                raise
            return getattr(self._layer[0], name)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.hidden, self.arguments = hidden_states, (args, kwargs)
        return hidden_states if self.output is None else self.output


class Replay:
    """A checkpoint as a stream of layers.

    Args:
        checkpoint: weights; replaced per layer by ``read`` below where a caller wants others.
        dtype: parameters' dtype, and with it the compute dtype.
        attention: transformers' attention implementation.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, attention: str = "sdpa") -> None:
        self.name, self.dtype = checkpoint.name, dtype
        self.family: Family = family_of(checkpoint.config, checkpoint.name)
        self.model: PreTrainedModel = skeleton(checkpoint, dtype, attention)
        self.read: Reader = reader(checkpoint, self.model)
        stack = self.model.get_submodule(self.family.layers)
        assert isinstance(stack, nn.ModuleList)
        self.layers = list(stack)
        self.recorders = [Recorder(layer) for layer in self.layers]
        for index, recorder in enumerate(self.recorders):
            stack[index] = recorder
        self._recorded: dict[tuple[int, ...], list[Arguments]] = {}

    def __len__(self) -> int:
        return len(self.layers)

    def prefix(self, layer: int) -> str:
        return f"{self.family.layers}.{layer}"

    def read_finite(self, name: str) -> torch.Tensor:
        """A parameter as it stands in the file: a cast to the compute dtype could hide or make an infinity.

        Raises:
            BadInput: for one that is not finite, naming tensor and index.
        """
        value = self.read(name)
        check_finite(f"{self.name}: {name}", value)
        return value

    @torch.no_grad()
    def embed(self, batches: list[torch.Tensor]) -> list[torch.Tensor]:
        """The first layer's inputs for token ids [batch, tokens]; records every layer's arguments on the way."""
        embedding, norm = self.family.embedding, self.family.norm
        hidden = []
        with self._loaded(embedding), self._loaded(norm):
            for batch in batches:
                self.model.base_model(input_ids=batch, use_cache=False)
                hidden.append(self._take_first(batch))
        return hidden

    def _take_first(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.recorders[0].hidden
        assert hidden is not None
        if tuple(batch.shape) not in self._recorded:
            self._recorded[tuple(batch.shape)] = [recorder.arguments or ((), {}) for recorder in self.recorders]
        self._forget()
        return hidden

    def _forget(self) -> None:
        for recorder in self.recorders:
            recorder.hidden = recorder.arguments = recorder.output = None

    @contextmanager
    def layer(self, index: int, read: Reader | None = None) -> Iterator[nn.Module]:
        """Decoder layer ``index`` with its weights loaded; they are dropped at the end."""
        layer = self.layers[index]
        materialise(layer, self.prefix(index), read or self.read, self.dtype)
        try:
            yield layer
        finally:
            release(layer)
            give_back()

    @torch.no_grad()
    def run(self, layer: nn.Module, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output for hidden states [batch, tokens, hidden] of a recorded batch shape."""
        return self.forward(layer, index, hidden)

    def forward(self, layer: nn.Module, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """As `run`, with gradients where the caller's mode has them."""
        args, kwargs = self._recorded[tuple(hidden.shape[:2])][index]
        output = layer(hidden, *args, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    @contextmanager
    def end(self, gradients: bool = False) -> Iterator[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
        """Yields ``logits(ids, hidden)``: the real end of the model on the last layer's output.

        Embedding, norm and head stay loaded inside the block; the head may be replaced there
        (``replay.model.set_output_embeddings``). What the end does to a token depends on no other, so that tokens
        may come in batches of any shape.

        Args:
            gradients: whether they flow through the end, to ``hidden`` and to parameters that ask for them.
        """
        with self._ending():
            yield lambda ids, hidden: self._finish(self.model, ids, hidden, gradients).logits

    @contextmanager
    def before_head(self) -> Iterator[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
        """Yields ``inputs(ids, hidden)``: what the head reads, [batch, tokens, hidden]."""
        with self._loaded(self.family.embedding), self._loaded(self.family.norm):
            yield lambda ids, hidden: self._finish(self.model.base_model, ids, hidden).last_hidden_state

    @contextmanager
    def _ending(self) -> Iterator[None]:
        with (
            self._loaded(self.family.embedding),
            self._loaded(self.family.norm),
            self._loaded(self.family.head),
        ):
            yield

    def _finish(self, model: nn.Module, ids: torch.Tensor, hidden: torch.Tensor, gradients: bool = False) -> Any:
        self.recorders[-1].output = hidden
        try:
            with torch.set_grad_enabled(gradients):
                return model(input_ids=ids, use_cache=False)
        finally:
            self._forget()

    @contextmanager
    def _loaded(self, name: str) -> Iterator[None]:
        module = self.model.get_submodule(name)
        materialise(module, name, self.read, self.dtype)
        try:
            yield
        finally:
            release(module)
