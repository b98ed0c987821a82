"""Text that the model writes itself, to calibrate on beside real text.

A calibration text is of one kind; what the model samples from its own distribution is of every kind that it was
trained on, so that what compensates for errors does not follow the one text alone (Williams et al., arXiv 2410.17170).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from calibrate.drawing import draw
from calibrate.grid import check_finite
from calibrate.results import save_tensors
from models.checkpoint import Checkpoint
from models.errors import BadInput
from models.skeleton import load_model

Progress = Callable[[int, int], None]
# Tokens in one batch: a step reads all weights whatever the number of windows, and the KV cache grows with it.
BATCH_TOKENS = 16384


@dataclass(frozen=True)
class Generation:
    """Which windows a model writes.

    Attributes:
        count, length: of the windows, and of each in tokens.
        first: the tokens that each is written behind.
        keeps_first: whether they stand in the window.
        seed: of the draws.
        dtype: parameters' and compute dtype, as torch names it.
    """

    count: int
    length: int
    first: tuple[int, ...]
    keeps_first: bool
    seed: int
    dtype: str


def first_tokens(tokenizer: Any) -> tuple[int, ...]:
    """What a text of the model's own begins behind where nothing stands before every window: the token that marks a
    text's beginning, or else its end, which models are trained to read before the next text.

    Raises:
        BadInput: when the tokenizer has neither.
    """
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return (token,)
    raise BadInput(
        "calibration: generated: the tokenizer has no token for the beginning or the end of a text, behind which the"
        " model could begin one of its own"
    )


def batch_sizes(count: int, length: int) -> list[int]:
    """How many of ``count`` windows of ``length`` tokens are written together, batch by batch."""
    size = max(1, BATCH_TOKENS // length)
    return [min(size, count - start) for start in range(0, count, size)]


@torch.no_grad()
def generate(
    checkpoint: Checkpoint,
    wanted: Generation,
    folder: Path,
    progress: Progress = lambda done, total: None,
) -> torch.Tensor:
    """Windows sampled token by token from the model's own distribution (temperature 1, nothing cut off); the end of a
    text is a token like others. The whole model is in memory, with the KV cache of a batch.

    Args:
        folder: gets a file for each batch; those that are there are not written again.

    Returns:
        int64 [count, length].

    Raises:
        BadInput: where the logits are not finite, naming the weight that is not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = None
    sizes = batch_sizes(wanted.count, wanted.length)
    parts = []
    for number, size in enumerate(sizes):
        file = folder / f"batch-{number:05d}.safetensors"
        if not file.is_file():
            model = model or load_model(checkpoint, getattr(torch, wanted.dtype))
            watch = partial(_told, progress, sum(sizes[:number]), size, wanted)
            save_tensors(file, {"ids": _sample(model, wanted, size, wanted.seed + number, watch)})
        parts.append(load_file(file)["ids"])
    return torch.cat(parts)


def _told(progress: Progress, before: int, size: int, wanted: Generation, length: int) -> None:
    """Tokens that are written, of all, when the windows of a batch have reached a length."""
    progress(before * wanted.length + size * min(length, wanted.length), wanted.count * wanted.length)


def _sample(
    model: PreTrainedModel, wanted: Generation, size: int, seed: int, watch: Callable[[int], None]
) -> torch.Tensor:
    """``size`` windows, int64 [size, length]; ``watch`` is told their length after every token."""
    prompts = torch.tensor(wanted.first, dtype=torch.int64).expand(size, -1)

    def told(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        """As a stopping criterion it is called after every token; it stops nothing."""
        watch(ids.shape[1])
        return torch.zeros(len(ids), dtype=torch.bool)

    generator = torch.Generator().manual_seed(seed)

    def drawn(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Leaves of logits [size, vocabulary] only a token that is drawn by them."""
        probabilities = torch.softmax(logits.float(), -1)
        # A logit that is not a number, or positive and infinite, leaves none in its row.
        if probabilities[:, 0].isnan().any():
            for name, parameter in model.named_parameters():
                check_finite(name, parameter)
            raise BadInput(f"calibration: generated: logits that are not finite in {wanted.dtype}, of finite weights")
        return torch.full_like(logits, -torch.inf).scatter_(1, draw(probabilities, generator), 0.0)

    # In place of what the checkpoint prefers: transformers takes from there what is None here, and would fill a window
    # with padding behind the first end of a text.
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=wanted.length - len(wanted.first) * wanted.keeps_first,
        eos_token_id=None,
        pad_token_id=0,
    )
    ids: torch.Tensor = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        logits_processor=LogitsProcessorList([drawn]),
        stopping_criteria=StoppingCriteriaList([told]),
    )
    return ids[:, -wanted.length :].contiguous()
