"""The one scorer: final hidden states of any checkpoint, layer by layer, and what two models' logits differ in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from calibrate.quantize import batches
from calibrate.replay import Replay
from models.checkpoint import Checkpoint

# Logits per pass over a window: a few rows at a time stay in cache through all the sums
# (511 rows of 49,152 on one busy core: 0.41 s four rows at a time, 0.79 s all at once).
CHUNK = 1 << 18
TOP = 5
# Columns whose largest is found first: sorting out the largest of all of them at once takes five times as long.
BLOCK = 64
Progress = Callable[[int, int], None]
# What stands for "no difference": fp32 logits cannot come this near without being equal, and JSON has no infinity.
SNR_LIMIT_DB = 200.0
Swap = Callable[[str], nn.Module | None]
LogitsOf = Callable[[int], torch.Tensor]


def no_swap(module: str) -> nn.Module | None:
    """Every module computes as transformers has it."""
    return None


def no_progress(done: int, total: int) -> None:
    """Nobody watches."""


@dataclass(frozen=True)
class Stream:
    """Token windows int64 [count, tokens], and what computes them (see `final_hidden`)."""

    windows: torch.Tensor
    swap: Swap = no_swap


def final_hidden(
    checkpoint: Checkpoint,
    windows: torch.Tensor,
    dtype: torch.dtype,
    swap: Swap = no_swap,
    progress: Progress = no_progress,
) -> torch.Tensor:
    """The last decoder layer's output for token windows, with one layer's weights in memory.

    Args:
        windows: int64 [count, tokens].
        dtype: parameters' and compute dtype.
        swap: gives a module that computes instead of the linear of that full name, or None to leave it.

    Returns:
        [count, tokens, hidden], in the dtype of the model's residual stream.
    """
    return final_hiddens(checkpoint, [Stream(windows, swap)], dtype, progress)[0]


@torch.no_grad()
def final_hiddens(
    checkpoint: Checkpoint, streams: Sequence[Stream], dtype: torch.dtype, progress: Progress = no_progress
) -> list[torch.Tensor]:
    """As `final_hidden`, of several streams that share one reading of each layer's weights."""
    replay = Replay(checkpoint, dtype)
    states = [replay.embed(batches(stream.windows)) for stream in streams]
    for index in range(len(replay)):
        progress(index, len(replay))
        with replay.layer(index) as layer:
            for number, stream in enumerate(streams):
                with swapped(layer, replay.prefix(index), stream.swap):
                    states[number] = [replay.run(layer, index, hidden) for hidden in states[number]]
    progress(len(replay), len(replay))
    return [torch.cat(hidden) for hidden in states]


@contextmanager
def swapped(parent: nn.Module, prefix: str, swap: Swap) -> Iterator[None]:
    """Replaces linears below ``parent`` by what ``swap`` gives for their full names, for the length of the block."""
    originals: dict[str, nn.Module] = {}
    for name, module in list(parent.named_modules()):
        if isinstance(module, nn.Linear) and (other := swap(f"{prefix}.{name}" if prefix else name)) is not None:
            originals[name] = module
            parent.set_submodule(name, other)
    try:
        yield
    finally:
        for name, module in originals.items():
            parent.set_submodule(name, module)


@dataclass(frozen=True)
class Comparison:
    """What a model loses against its reference, over the predicted tokens of all windows (the first of each window
    predicts nothing that is scored).

    Attributes:
        reference_perplexity, perplexity: exp of the mean negative log-likelihood in nats.
        perplexity_se, reference_perplexity_se: standard errors, by the windows' means (delta method).
        perplexity_ratio, perplexity_ratio_se: exp of the mean difference, and its paired standard error.
        kl: mean KL divergence reference || model, in nats.
        top1: share of positions with the same most likely token.
        top5_overlap: mean share of the reference's five most likely tokens among the model's.
        snr_db: energy of the reference's logits over that of the difference, within ± SNR_LIMIT_DB, which stands for
            equal logits.
        max_logit_difference: the largest.
        tokens, windows: how many predictions were scored, in how many windows.
        nll: the model's mean negative log-likelihood of each window.
    """

    perplexity: float
    perplexity_se: float
    reference_perplexity: float
    reference_perplexity_se: float
    perplexity_ratio: float
    perplexity_ratio_se: float
    kl: float
    top1: float
    top5_overlap: float
    snr_db: float
    max_logit_difference: float
    tokens: int
    windows: int
    nll: tuple[float, ...]


@torch.no_grad()
def compare(
    reference: Checkpoint,
    reference_hidden: torch.Tensor,
    model: Checkpoint,
    model_hidden: torch.Tensor,
    windows: torch.Tensor,
    dtype: torch.dtype,
    swap: Swap = no_swap,
    progress: Progress = no_progress,
) -> Comparison:
    """Compares logits window by window, from both models' final hidden states; no table of logits is ever stored.

    Args:
        reference_hidden, model_hidden: as from `final_hidden`, [count, tokens, hidden].
        windows: int64 [count, tokens].
        swap: as in `final_hidden`, for the model's head.
    """
    end = Replay(model, dtype)
    with end.end() as logits, swapped(end.model, "", swap):
        return compare_logits(
            reference,
            reference_hidden,
            lambda index: logits(windows[index : index + 1], model_hidden[index : index + 1])[0],
            windows,
            dtype,
            progress,
        )


@torch.no_grad()
def compare_logits(
    reference: Checkpoint,
    reference_hidden: torch.Tensor,
    logits: LogitsOf,
    windows: torch.Tensor,
    dtype: torch.dtype,
    progress: Progress = no_progress,
) -> Comparison:
    """As `compare`, of whatever gives logits [tokens, vocabulary] for the index of a window."""
    sums = _Sums()
    with Replay(reference, dtype).end() as reference_logits:
        for index, window in enumerate(windows.split(1)):
            progress(index, len(windows))
            a = reference_logits(window, reference_hidden[index : index + 1])[0, :-1]
            sums.add(a, logits(index)[:-1], window[0, 1:])
    progress(len(windows), len(windows))
    return sums.comparison()


class _Sums:
    """Running sums; per-window means for the standard errors."""

    def __init__(self) -> None:
        self.reference: list[float] = []
        self.model: list[float] = []
        self.kl = self.top1 = self.top5 = self.signal = self.noise = self.largest = 0.0
        self.tokens = 0

    def add(self, a: torch.Tensor, b: torch.Tensor, targets: torch.Tensor) -> None:
        """Takes one window's logits [tokens, vocab] of reference and model, and the tokens that they predict."""
        rows = max(1, CHUNK // a.shape[1])
        likelihoods = [
            self._add_rows(*chunk) for chunk in zip(a.split(rows), b.split(rows), targets.split(rows), strict=True)
        ]
        of_reference, of_model = (torch.cat(column) for column in zip(*likelihoods, strict=True))
        self.reference.append(-float(of_reference.mean()))
        self.model.append(-float(of_model.mean()))
        self.tokens += len(targets)

    def _add_rows(self, a: torch.Tensor, b: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds a few rows to the sums; returns the log-likelihoods of the targets, fp64 [rows], of both models.

        With s = log sum exp, the divergence of a row is ``sum softmax(a) * (a - b) - s_a + s_b``.
        """
        a, b = a.float(), b.float()
        (top_a, largest_a), (top_b, largest_b) = top(a), top(b)
        self.top1 += float((top_a[:, 0] == top_b[:, 0]).sum())
        self.top5 += float((top_a[:, :, None] == top_b[:, None, :]).sum()) / TOP
        difference = a - b
        self.signal += float(torch.linalg.vector_norm(a, dim=-1).double().square().sum())
        self.noise += float(torch.linalg.vector_norm(difference, dim=-1).double().square().sum())
        low, high = torch.aminmax(difference)
        self.largest = max(self.largest, float(high), -float(low))
        of_targets = [x.gather(1, targets[:, None])[:, 0].double() for x in (a, b)]
        exp_a, exp_b = (a - largest_a).exp_(), (b - largest_b).exp_()
        sums = exp_a.sum(-1).double(), exp_b.sum(-1).double()
        log_a, log_b = (s.log() + m[:, 0].double() for s, m in zip(sums, (largest_a, largest_b), strict=True))
        weighted = torch.linalg.vecdot(exp_a, difference).double() / sums[0]
        self.kl += float((weighted - log_a + log_b).sum())
        return of_targets[0] - log_a, of_targets[1] - log_b

    def comparison(self) -> Comparison:
        reference, model = (torch.tensor(nll, dtype=torch.float64) for nll in (self.reference, self.model))
        # torch's exp: a broken model's perplexity is infinite, not an OverflowError.
        perplexity, reference_perplexity = float(model.mean().exp()), float(reference.mean().exp())
        ratio = float((model - reference).mean().exp())
        return Comparison(
            perplexity=perplexity,
            perplexity_se=perplexity * standard_error(model),
            reference_perplexity=reference_perplexity,
            reference_perplexity_se=reference_perplexity * standard_error(reference),
            perplexity_ratio=ratio,
            perplexity_ratio_se=ratio * standard_error(model - reference),
            kl=self.kl / self.tokens,
            top1=self.top1 / self.tokens,
            top5_overlap=self.top5 / self.tokens,
            snr_db=decibels(self.signal, self.noise),
            max_logit_difference=self.largest,
            tokens=self.tokens,
            windows=len(self.reference),
            nll=tuple(self.model),
        )


def top(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of the TOP largest logits of each row, largest first, int64 [rows, TOP], and the largest, [rows, 1].

    They are looked for in the TOP blocks of columns with the largest maxima, where they must be.

    Args:
        logits: [rows, vocabulary].
    """
    whole = logits.shape[1] // BLOCK * BLOCK
    if whole <= TOP * BLOCK:
        found = logits.topk(TOP)
        return found.indices, found.values[:, :1]
    blocks = logits[:, :whole].unflatten(1, (-1, BLOCK)).amax(-1).topk(TOP).indices
    inside = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK)).flatten(1)
    columns = torch.cat([inside, torch.arange(whole, logits.shape[1]).expand(len(logits), -1)], dim=1)
    found = logits.gather(1, columns).topk(TOP)
    return columns.gather(1, found.indices), found.values[:, :1]


def decibels(signal: float, noise: float) -> float:
    """The ratio of two energies, within ± SNR_LIMIT_DB."""
    if math.isnan(signal) or math.isnan(noise):
        return math.nan
    if not signal or not noise:
        return SNR_LIMIT_DB if not noise else -SNR_LIMIT_DB
    return max(-SNR_LIMIT_DB, min(SNR_LIMIT_DB, 10 * (math.log10(signal) - math.log10(noise))))


def standard_error(values: torch.Tensor) -> float:
    """Of the mean; 0 for a single window, which has no spread to estimate it from."""
    return float(values.std() / math.sqrt(len(values))) if len(values) > 1 else 0.0
