"""End-to-end tuning: scales, zeros, norm weights and biases trained so that the model's logits match the reference's.

The loss is the mean KL divergence from the reference's next-token distribution to the quantised model's, on
calibration windows; codes and layout stay as they are (as EfficientQAT's second phase does with the likelihood of
text, arXiv 2407.11062; the reference's whole distribution says more per token). Windows that neither training nor the
methods before it see decide how far it goes: what does not improve them is not kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open

from calibrate.replay import Replay
from calibrate.results import Results, save_tensors
from calibrate.tune_parameters import Trained, TrainedGrid, TrainedLayer, trained_vector
from calibrate.tune_stream import End, Layers
from models.checkpoint import Checkpoint
from models.family import Linear
from models.files import atomic_folder

Progress = Callable[[str, int, int], None]
BETAS = (0.9, 0.99)
# Gradients are sums over tokens, far above it.
EPSILON = 1e-12
WARM_UP = 5
# Beside the layers: a training that is not finished. In the tuned folder: what to say of it.
MOMENTS = ("exp_avg", "exp_avg_sq")
STATE, NOTE = "tuning.safetensors", "note.json"


@dataclass(frozen=True)
class Training:
    """How long and how fast.

    Attributes:
        steps: of the optimiser, at most.
        rounds: how often each window is seen, at most: more of them fit the windows and not the model.
        tokens: calibration tokens in a step.
        learning_rate: largest change of a scale relative to its size, or of a norm's weight relative to the norm's,
            in a step; it warms up over WARM_UP steps and then falls to zero linearly.
        every: steps between two looks at the held-out windows.
        held_out: one window of so many is held out.
        seed: of the windows' order.
    """

    steps: int = 160
    rounds: int = 3
    tokens: int = 1024
    learning_rate: float = 5e-4
    every: int = 20
    held_out: int = 8
    seed: int = 0

    def fitted(self, windows: int, length: int) -> Training:
        """With as many steps as that many windows of ``length`` tokens are worth."""
        size = min(windows, max(1, self.tokens // length))
        return replace(self, steps=min(self.steps, self.rounds * (windows // size)))

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.learning_rate * min(1.0, (step + 1) / WARM_UP) * (1 - step / self.steps)

    def split(self, windows: int) -> tuple[list[int], list[int]]:
        """The windows to train on, and those held out, evenly spread among them."""
        held = list(range(self.held_out - 1, windows, self.held_out)) or [windows - 1]
        return [index for index in range(windows) if index not in held], held

    def batch(self, step: int, windows: Sequence[int], length: int) -> list[int]:
        """The windows of a step: every one once before any comes again, in an order of its own each time."""
        size = min(len(windows), max(1, self.tokens // length))
        rounds, place = divmod(step, len(windows) // size)
        generator = torch.Generator().manual_seed(self.seed + rounds)
        order = torch.randperm(len(windows), generator=generator)[place * size : (place + 1) * size]
        return [windows[index] for index in order.tolist()]


@dataclass(frozen=True)
class Tuned:
    """What came of it.

    Attributes:
        results: the layers as they are to be written.
        note: for the ledger.
    """

    results: Results
    note: str


def seen(windows: torch.Tensor, training: Training = Training()) -> torch.Tensor:
    """Of calibration windows [count, tokens] those that other methods may see: what they fit judges no training."""
    return windows[training.split(len(windows))[0]]


def tune(
    source: Checkpoint,
    checkpoint: Checkpoint,
    linears: Sequence[Linear],
    dtype: torch.dtype,
    windows: torch.Tensor,
    results: Results,
    progress: Progress = lambda what, done, total: None,
    training: Training = Training(),
) -> Tuned:
    """Trains what ``results`` holds; a killed run continues where it last looked at the held-out windows.

    Args:
        source: the reference.
        checkpoint: what was quantised: the source, or the same function in other weights.
        linears: all linears of the checkpoint.
        dtype: what the artifact stores and computes in.
        windows: calibration token ids [count, tokens], two at least.
        results: every layer's, and the head's; tuned ones go into a folder in it.
        progress: called with what is being done, and how much of how much is done.
    """
    folder = results.folder / "tuned"
    if not folder.is_dir():
        trainer = _Trainer(source, checkpoint, linears, dtype, windows, results, training)
        note = trainer.run(progress)
        with atomic_folder(folder) as partial:
            trainer.write(Results(partial))
            (partial / NOTE).write_text(json.dumps(note), encoding="utf-8")
    (results.folder / STATE).unlink(missing_ok=True)
    return Tuned(Results(folder), json.loads((folder / NOTE).read_text(encoding="utf-8")))


@dataclass
class _State:
    """Where a training stands, beside the shifts."""

    step: int = 0
    first: float = 0.0
    best: float = 0.0
    best_step: int = 0


class _Trainer:
    """A training, from the start or from where an earlier process last looked."""

    def __init__(
        self,
        source: Checkpoint,
        checkpoint: Checkpoint,
        linears: Sequence[Linear],
        dtype: torch.dtype,
        windows: torch.Tensor,
        results: Results,
        training: Training,
    ) -> None:
        # Sums of gradients do not fit into the range of float16.
        compute = torch.bfloat16 if dtype == torch.float16 else dtype
        self.results, self.windows = results, windows
        self.replay, reference = Replay(checkpoint, compute), Replay(source, compute)
        self.train, self.held = training.split(len(windows))
        self.training = training = training.fitted(len(self.train), windows.shape[1])
        self.size = len(training.batch(0, self.train, windows.shape[1]))
        self.expected = _run(reference, windows, self.size)
        self.embedded = torch.cat(self.replay.embed(list(windows.split(self.size))))
        self.replay.embed([windows[part] for part in self._held()])
        self.trained = [self._trained(index, linears, dtype) for index in range(len(self.replay) + 1)]
        self.layers = Layers(self.replay, results.load, self.trained)
        self.end = End(reference, self.replay, results.load(len(self.replay)), self.trained[-1])
        self.parameters = [p for layer in self.trained for p in layer.parameters()]
        # Each layer's own, so that only one layer's gradients are in memory.
        self.optimisers = [_optimiser(layer) for layer in self.trained]
        self.state = _State()
        self.best = [p.shift.clone() for p in self.parameters]

    def _held(self) -> list[list[int]]:
        return [self.held[start : start + self.size] for start in range(0, len(self.held), self.size)]

    def _trained(self, index: int, linears: Sequence[Linear], dtype: torch.dtype) -> TrainedLayer:
        """Layer ``index``, or the end of the model, before training."""
        found = self.results.load(index)
        where = {linear.name: linear for linear in linears if linear.name in found.linears}
        grids = {name: TrainedGrid.of(found.linears[name]) for name in where}
        names = _vectors(self.replay, index)
        read = self.replay.read
        tensors = {name: found.tensors[name] if name in found.tensors else read(name) for name in names}
        vectors = {name: trained_vector(value.to(dtype)) for name, value in tensors.items()}
        return TrainedLayer(where, _rows(self.replay, index, where), grids, vectors)

    def run(self, progress: Progress) -> str:
        """Trains; returns a note for the ledger. Afterwards the shifts are the best that were found."""
        steps, file = self.training.steps, self.results.folder / STATE
        with self.end.loaded():
            if file.is_file():
                self._load(file)
            else:
                self.state.first = self.state.best = self._look()
            state = self.state
            for step in range(state.step, steps):
                progress("tune", step, steps)
                self._step(step)
                state.step = step + 1
                if state.step % self.training.every == 0 or state.step == steps:
                    loss = self._look()
                    if loss < state.best:
                        state.best, state.best_step = loss, state.step
                        self.best = [p.shift.clone() for p in self.parameters]
                    self._save(file)
        progress("tune", steps, steps)
        for parameter, best in zip(self.parameters, self.best, strict=True):
            parameter.shift = best
        looked = f"mean KL divergence on {len(self.held)} held-out calibration windows"
        if not state.best_step:
            return f"tune: {steps} steps did not improve the {looked}, {state.first:.4f}: nothing of them was kept"
        return (
            f"tune: {looked} from {state.first:.4f} to {state.best:.4f}, after {state.best_step} of {steps} steps;"
            " the linears' errors are those before it"
        )

    def write(self, tuned: Results) -> None:
        """Commits every layer as it is stored after training."""
        for index, layer in enumerate(self.trained):
            found = self.results.load(index)
            for name, grid in layer.grids.items():
                found.linears[name] = grid.quantized(found.linears[name])
            for name, trained in layer.tensors.items():
                if not torch.equal(value := trained.value(), trained.start):
                    found.tensors[name] = value
                    found.reasons[name] = "; ".join(filter(None, (found.reasons.get(name), "tuned")))
            tuned.save(index, found)

    def _step(self, step: int) -> None:
        batch = self.training.batch(step, self.train, self.windows.shape[1])
        boundaries = self.layers.forward(self.embedded[batch])
        _, gradient = self.end.loss(self.windows[batch], self.expected[batch], boundaries[-1], train=True)
        assert gradient is not None
        self._update(len(self.replay), step)
        for index in self.layers.backward(boundaries, gradient):
            self._update(index, step)

    def _update(self, index: int, step: int) -> None:
        optimiser = self.optimisers[index]
        if optimiser is not None:
            optimiser.param_groups[0]["lr"] = self.training.rate(step)
            optimiser.step()
            optimiser.zero_grad()

    def _look(self) -> float:
        """The loss on the held-out windows, in nats per token."""
        total = 0.0
        for part in self._held():
            hidden = self.layers.last(self.embedded[part])
            total += self.end.loss(self.windows[part], self.expected[part], hidden)[0]
        return total / (len(self.held) * self.windows.shape[1])

    def _save(self, file: Path) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter, best, moments in self._named():
            tensors |= {f"{name}.shift": parameter.shift, f"{name}.best": best}
            tensors |= {f"{name}.{key}": moments[key] for key in MOMENTS}
        save_tensors(file, tensors, {"state": json.dumps(asdict(self.state))})

    def _load(self, file: Path) -> None:
        with safe_open(file, "pt") as saved:
            self.state = _State(**json.loads(saved.metadata()["state"]))
            for name, parameter, best, moments in self._named():
                parameter.shift.copy_(saved.get_tensor(f"{name}.shift"))
                best.copy_(saved.get_tensor(f"{name}.best"))
                moments["step"] = torch.tensor(float(self.state.step))
                moments |= {key: saved.get_tensor(f"{name}.{key}") for key in MOMENTS}

    def _named(self) -> Iterator[tuple[str, Trained, torch.Tensor, dict[str, torch.Tensor]]]:
        """Each parameter under a name of its own, with its best shift and its optimiser's state."""
        best = iter(self.best)
        for index, (layer, optimiser) in enumerate(zip(self.trained, self.optimisers, strict=True)):
            for number, parameter in enumerate(layer.parameters()):
                assert optimiser is not None
                yield f"{index:05d}.{number:03d}", parameter, next(best), optimiser.state[parameter.shift]


def _run(replay: Replay, windows: torch.Tensor, size: int) -> torch.Tensor:
    """The last layer's output [count, tokens, hidden] for windows, ``size`` at a time."""
    hidden = replay.embed(list(windows.split(size)))
    for index in range(len(replay)):
        with replay.layer(index) as layer:
            hidden = [replay.run(layer, index, h) for h in hidden]
    return torch.cat(hidden)


def _vectors(replay: Replay, index: int) -> list[str]:
    """Full names of the norm weights and biases of a layer, or of the model's end behind the last one."""
    if index < len(replay):
        # Not from the model, where a recorder stands in its place.
        modules = {replay.prefix(index): replay.layers[index]}
    else:
        modules = {name: replay.model.get_submodule(name) for name in (replay.family.norm, replay.family.head)}
    return [f"{prefix}.{name}" for prefix, m in modules.items() for name, p in m.named_parameters() if p.dim() == 1]


def _rows(replay: Replay, index: int, where: Mapping[str, Linear]) -> dict[str, int]:
    """Output channels of the weights that hold a layer's linears; the head's are never fused."""
    if index == len(replay):
        return {f"{linear.module}.weight": linear.rows for linear in where.values()}
    layer, prefix = replay.layers[index], replay.prefix(index) + "."
    weights = {f"{linear.module}.weight" for linear in where.values()}
    return {weight: len(layer.get_parameter(weight.removeprefix(prefix))) for weight in weights}


def _optimiser(layer: TrainedLayer) -> torch.optim.Adam | None:
    shifts = [parameter.shift for parameter in layer.parameters()]
    return torch.optim.Adam(shifts, betas=BETAS, eps=EPSILON) if shifts else None
