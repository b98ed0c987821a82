"""What the model's loss says of each linear's outputs: its Fisher information, one backward pass over the windows.

To second order the KL divergence that errors E [N, K] of a weight cause is half the sum over tokens of (g^T E x)^2,
with the linear's inputs x and the gradients g, at its outputs, of the log-likelihood of a token drawn from the model.
The methods take it as a product: tr(O E H E^T) with O of the outputs (`calibrate.outputs`) and H, the inputs' second
moments (GuidedQuant, arXiv 2505.07004, weights H by |g|^2; YAQA, arXiv 2505.22988, derives both factors). Few tokens
hold most of |g|^2, and such an H or O is theirs, not the text's: here a token counts |g| in both (docs/fidelity.md).

Forward keeps every layer's input on disk, backward takes one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from calibrate.drawing import draw
from calibrate.products import gram
from calibrate.replay import Replay, batches
from calibrate.results import save_tensors
from models.checkpoint import Checkpoint
from models.family import Linear

Progress = Callable[[str, int, int], None]
# Output channels whose gradients' products are kept: those of channels further apart are taken to be none.
SPAN = 2048
# Tokens whose logits are in memory at once.
ROWS = 128
# Of a gradient that is divided by its size.
SMALLEST = 1e-30
# What a token counts at most, in means: a single one's gradient shall not decide.
LARGEST = 100.0
TOKENS, OUTPUTS = "tokens:", "outputs:"


@dataclass(frozen=True)
class LayerFisher:
    """Of a layer's linears, by full name.

    Attributes:
        tokens: fp32 [tokens], each token's |g|.
        outputs: fp32 [rows, rows] for each span of SPAN output channels: E[g g^T / |g|].
    """

    tokens: Mapping[str, torch.Tensor]
    outputs: Mapping[str, list[torch.Tensor]]

    def counts(self, names: Sequence[str]) -> torch.Tensor:
        """What each token counts for linears that read the same input, fp32 [tokens], 1 on the mean."""
        sizes = [self.tokens[name] for name in names]
        total = torch.stack([size / size.mean().clamp_min(torch.finfo(size.dtype).tiny) for size in sizes]).mean(0)
        total = total.clamp_max(LARGEST)
        return total / total.mean()


class Fisher:
    """A folder of finished layers, and on the way of what is left to do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, index: int) -> LayerFisher:
        """Of layer ``index``."""
        tokens: dict[str, torch.Tensor] = {}
        outputs: dict[str, list[torch.Tensor]] = {}
        with safe_open(self.file("layer", index), "pt") as file:
            for key in sorted(file.keys()):
                if key.startswith(TOKENS):
                    tokens[key.removeprefix(TOKENS)] = file.get_tensor(key)
                else:
                    name = key.removeprefix(OUTPUTS).rpartition(":")[0]
                    outputs.setdefault(name, []).append(file.get_tensor(key))
        return LayerFisher(tokens, outputs)

    def file(self, kind: str, index: int) -> Path:
        return self.folder / f"{kind}-{index:05d}.safetensors"

    def done(self, kind: str, index: int) -> bool:
        return self.file(kind, index).is_file()

    def write(self, kind: str, index: int, tensors: Sequence[torch.Tensor]) -> None:
        save_tensors(self.file(kind, index), {f"{i:06d}": tensor.contiguous() for i, tensor in enumerate(tensors)})

    def read(self, kind: str, index: int) -> list[torch.Tensor]:
        with safe_open(self.file(kind, index), "pt") as file:
            return [file.get_tensor(key) for key in sorted(file.keys())]

    def drop_spent(self, index: int) -> None:
        """Removes what only a committed layer needed."""
        self.drop("gradient", index + 1)
        self.drop("hidden", index)

    def drop(self, kind: str, index: int) -> None:
        self.file(kind, index).unlink(missing_ok=True)


def measure(
    checkpoint: Checkpoint,
    linears: Sequence[Linear],
    dtype: torch.dtype,
    windows: torch.Tensor,
    folder: Path,
    progress: Progress = lambda what, done, total: None,
    seed: int = 0,
) -> Fisher:
    """The Fisher information of a model's linears; a killed run continues with the layer that it was at.

    Args:
        checkpoint: what will be quantised.
        linears: those that are asked about; a head among them is passed over.
        dtype: what the model computes in.
        windows: calibration token ids [count, tokens].
        folder: for the result, and until then for every layer's inputs.
        seed: of the tokens that are drawn.

    Raises:
        BadInput: for a non-finite weight, naming tensor and index.
    """
    fisher = Fisher(folder)
    # The sums of gradients do not fit into the range of float16.
    replay = Replay(checkpoint, torch.bfloat16 if dtype == torch.float16 else dtype)
    run = _Run(checkpoint.name, fisher, replay, batches(windows), seed, progress)
    by_layer: dict[int, list[Linear]] = {}
    for linear in linears:
        if linear.layer is not None:
            by_layer.setdefault(linear.layer, []).append(linear)
    left = []
    for index in range(len(replay)):
        if fisher.done("layer", index):
            # A run that was killed before it could.
            fisher.drop_spent(index)
        else:
            left.append(index)
    if left:
        if len(left) == len(replay) and not fisher.done("gradient", len(replay)):
            run.forward()
            run.end()
        # So that the layers' arguments are recorded also in a run that continues.
        replay.embed(run.ids)
        for index in reversed(left):
            run.backward(index, by_layer.get(index, []))
    return fisher


@dataclass(frozen=True)
class _Run:
    """What the steps of a measurement share."""

    name: str
    fisher: Fisher
    replay: Replay
    ids: list[torch.Tensor]
    seed: int
    progress: Progress

    def _say(self, done: int) -> None:
        self.progress("fisher", done, 2 * len(self.replay) + 1)

    def forward(self) -> None:
        """Writes what enters each layer, and what leaves the last."""
        hidden = self.replay.embed(self.ids)
        start = 0
        # The last one that is there may be continued from.
        while self.fisher.done("hidden", start + 1):
            start += 1
        if start:
            hidden = self.fisher.read("hidden", start)
        else:
            self.fisher.write("hidden", 0, hidden)
        for index in range(start, len(self.replay)):
            self._say(index)
            with self.replay.layer(index, self.replay.read_finite) as layer:
                hidden = [self.replay.run(layer, index, h) for h in hidden]
            self.fisher.write("hidden", index + 1, hidden)

    def end(self) -> None:
        """Writes the gradients at the last layer's outputs of the log-likelihood of tokens drawn from the model."""
        self._say(len(self.replay))
        gradients = []
        hidden = self.fisher.read("hidden", len(self.replay))
        generator = torch.Generator().manual_seed(self.seed)
        with self.replay.end(gradients=True) as logits:
            for ids, h in zip(self.ids, hidden, strict=True):
                parts = [
                    _drawn(logits, part_ids, part, generator)
                    for part_ids, part in zip(ids.flatten().split(ROWS), h.flatten(0, 1).split(ROWS), strict=True)
                ]
                gradients.append(torch.cat(parts).view_as(h))
        self.fisher.write("gradient", len(self.replay), gradients)
        self.fisher.drop("hidden", len(self.replay))

    def backward(self, index: int, linears: Sequence[Linear]) -> None:
        """Takes the gradients through a layer, and commits what its linears saw of them."""
        replay, fisher = self.replay, self.fisher
        self._say(2 * len(replay) - index)
        gradients, entered = fisher.read("gradient", index + 1), fisher.read("hidden", index)
        seen = {linear.name: _Gradients() for linear in linears}
        before = []
        with replay.layer(index) as layer, _observed(layer, replay.prefix(index) + ".", linears, seen):
            for hidden, gradient in zip(entered, gradients, strict=True):
                hidden.requires_grad_()
                with torch.enable_grad():
                    output = replay.forward(layer, index, hidden)
                output.backward(gradient)
                assert hidden.grad is not None
                before.append(hidden.grad)
        if index:
            fisher.write("gradient", index, before)
        tensors = {f"{TOKENS}{name}": found.tokens() for name, found in seen.items()}
        for name, found in seen.items():
            tensors |= {f"{OUTPUTS}{name}:{i:04d}": moments for i, moments in enumerate(found.outputs())}
        save_tensors(fisher.file("layer", index), tensors)
        fisher.drop_spent(index)


@dataclass
class _Gradients:
    """The gradients at one linear's outputs, summed up."""

    sizes: list[torch.Tensor] = field(default_factory=list)
    products: list[torch.Tensor] = field(default_factory=list)

    def add(self, gradient: torch.Tensor) -> None:
        """Takes gradients [..., N]."""
        gradient = gradient.reshape(-1, gradient.shape[-1])
        sizes = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True, dtype=torch.float32)
        self.sizes.append(sizes[:, 0])
        gradient = (gradient * sizes.clamp_min(SMALLEST).rsqrt()).to(gradient.dtype)
        parts = [gram(span) for span in gradient.split(SPAN, -1)]
        self.products = [a.add_(b) for a, b in zip(self.products, parts, strict=True)] if self.products else parts

    def tokens(self) -> torch.Tensor:
        return torch.cat(self.sizes)

    def outputs(self) -> list[torch.Tensor]:
        count = sum(map(len, self.sizes))
        return [product / count for product in self.products]


def _drawn(
    logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ids: torch.Tensor,
    hidden: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    """The gradient [tokens, hidden] of -log p(token), for a token drawn at each place."""
    hidden = hidden.detach().requires_grad_()
    found = logits(ids[None], hidden[None])[0]
    gradient = torch.softmax(found.detach().float(), -1)
    drawn = draw(gradient, generator)
    gradient.scatter_add_(1, drawn, torch.full_like(gradient[:, :1], -1.0))
    found.backward(gradient.to(found.dtype))
    assert hidden.grad is not None
    return hidden.grad


@contextmanager
def _observed(
    layer: nn.Module, prefix: str, linears: Sequence[Linear], seen: Mapping[str, _Gradients]
) -> Iterator[None]:
    """Hands on what gradients come to the linears' outputs, for the length of the block."""
    modules: dict[str, list[Linear]] = {}
    for linear in linears:
        modules.setdefault(linear.module, []).append(linear)

    def watched(parts: Sequence[Linear]) -> Callable[[nn.Module, object, torch.Tensor], None]:
        def take(gradient: torch.Tensor) -> None:
            for part in parts:
                seen[part.name].add(gradient[..., part.start : part.stop])

        def watch(_: nn.Module, __: object, output: torch.Tensor) -> None:
            output.register_hook(take)

        return watch

    handles = [
        layer.get_submodule(name.removeprefix(prefix)).register_forward_hook(watched(parts))
        for name, parts in modules.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
