"""How much of an artifact's KL divergence each of its linears causes, all of them from one backward pass.

With d the change of all weights, the divergence of a model that has lost little is near ``d^T H d / 2``: zero and flat
at the source. Half-way between source and artifact its gradient is ``H d / 2``, so that the inner product of the
gradient there with a linear's own change is that linear's part of ``d^T H d / 2``, and the parts of all linears sum to
the whole. This is the integral of the gradient along the straight path (integrated gradients, Sundararajan et al.
2017, arXiv 1703.01365) by the midpoint rule, which is exact where the divergence is quadratic.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from calibrate.replay import Replay
from models.checkpoint import Checkpoint, View
from models.family import Linear
from models.opened import OpenedModel
from models.skeleton import Reader

Progress = Callable[[int, int], None]


class Midpoint(View):
    """The mean of an artifact's and its source's weights, fp32, under the artifact's names.

    Args:
        read: the source's tensors by the model's names, so that a head which the source ties is found.
    """

    def __init__(self, artifact: Checkpoint, read: Reader) -> None:
        super().__init__(artifact)
        self.name, self._read = "midpoint", read

    def read(self, name: str) -> torch.Tensor:
        value = self.base.read(name)
        return (value.float() + self._read(name).float()) / 2 if value.is_floating_point() else value


def attribute(
    model: OpenedModel,
    artifact: Checkpoint,
    reference_hidden: torch.Tensor,
    windows: torch.Tensor,
    dtype: torch.dtype,
    progress: Progress,
) -> dict[str, float]:
    """The part of the mean KL divergence, in nats, that each linear causes, by its full name, the head included.

    Works in fp32, with one layer's weights and gradients in memory.

    Args:
        model: the source.
        artifact: as bf16 weights, see `export.artifact.Expansion`.
        reference_hidden: the source's final hidden states [windows, tokens, hidden], computed in ``dtype``.
        windows: int64 [windows, tokens].
    """
    source = Replay(model.checkpoint, dtype)
    replay = Replay(Midpoint(artifact, source.read), torch.float32)
    # A window at a time: activations of a whole batch would be too many.
    ids = list(windows.split(1))
    steps = 2 * len(replay) + 1
    inputs = [replay.embed(ids)]
    for index in range(len(replay)):
        progress(index, steps)
        with replay.layer(index) as layer:
            inputs.append([replay.run(layer, index, hidden) for hidden in inputs[-1]])
    by_layer: dict[int | None, list[Linear]] = {}
    for linear in model.linears:
        by_layer.setdefault(linear.layer, []).append(linear)
    (head,) = by_layer[None]
    parts: dict[str, float] = {}
    with source.end() as of_source, replay.end(gradients=True) as of_replay:
        module = replay.model.get_submodule(model.family.head)
        assert isinstance(module, nn.Linear)
        module.weight.requires_grad_(True)
        gradients = []
        for index, window in enumerate(ids):
            expected = of_source(window, reference_hidden[index : index + 1])[0, :-1].float()
            hidden = inputs[-1][index].requires_grad_(True)
            log_expected = torch.log_softmax(expected, -1)
            found = torch.log_softmax(of_replay(window, hidden)[0, :-1].float(), -1)
            loss = nn.functional.kl_div(found, log_expected, reduction="sum", log_target=True)
            (loss / (windows.shape[0] * (windows.shape[1] - 1))).backward()
            assert hidden.grad is not None
            gradients.append(hidden.grad)
        parts[head.name] = _part(module, head, artifact, source.read)
    inputs.pop()
    for index in reversed(range(len(replay))):
        progress(steps - 1 - index, steps)
        with replay.layer(index) as layer:
            prefix = f"{replay.prefix(index)}."
            modules = {x.module: layer.get_submodule(x.module.removeprefix(prefix)) for x in by_layer.get(index, ())}
            for module in modules.values():
                assert isinstance(module, nn.Linear)
                module.weight.requires_grad_(True)
            gradients = [
                _backward(replay, layer, index, hidden, gradient)
                for hidden, gradient in zip(inputs.pop(), gradients, strict=True)
            ]
            for linear in by_layer.get(index, ()):
                parts[linear.name] = _part(modules[linear.module], linear, artifact, source.read)
    progress(steps, steps)
    return {linear.name: parts[linear.name] for linear in model.linears}


def _backward(
    replay: Replay, layer: nn.Module, index: int, hidden: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """Runs a layer forward and backward; returns the gradient of its input, and adds to those of its weights."""
    hidden = hidden.detach().requires_grad_(True)
    with torch.enable_grad():
        replay.forward(layer, index, hidden).backward(gradient)
    assert hidden.grad is not None
    return hidden.grad


def _part(module: nn.Module, linear: Linear, artifact: Checkpoint, read: Reader) -> float:
    """The inner product of a linear's gradient with its change from source to artifact."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    name = f"{linear.module}.weight"
    if name not in artifact.tensors or weight.grad is None:
        # A tied head: it is the embedding, which is not quantised.
        return 0.0
    rows = slice(linear.start, linear.stop)
    change = artifact.read(name)[rows].float() - read(name)[rows].float()
    return float((weight.grad[rows].double() * change.double()).sum())
