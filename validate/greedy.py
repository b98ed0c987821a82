"""Greedy continuations, and where two models' continuations part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteriaList

from models.checkpoint import Checkpoint
from models.skeleton import load_model
from validate.score import Progress, no_progress

# What stands for bytes that are no character yet.
PART = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Continuations:
    """Greedy tokens of one model.

    Attributes:
        tokens: int64 [prompts, tokens].
        margins: fp32 [prompts, tokens], the most likely logit minus the second at each step.
    """

    tokens: torch.Tensor
    margins: torch.Tensor


@dataclass(frozen=True)
class Divergence:
    """The first step at which a continuation leaves the reference's.

    Attributes:
        margin: of the reference's logits there; a small one is a near-tie.
    """

    prompt: int
    step: int
    reference_token: int
    token: int
    margin: float


@torch.no_grad()
def continue_greedily(
    checkpoint: Checkpoint,
    prompts: torch.Tensor,
    tokens: int,
    dtype: torch.dtype,
    progress: Progress = no_progress,
) -> Continuations:
    """Continues prompts int64 [prompts, length] by exactly ``tokens`` tokens each (end of text is not special)."""
    model = load_model(checkpoint, dtype)

    def watch(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        """As a stopping criterion it is called after every token; it stops nothing."""
        progress(ids.shape[1] - prompts.shape[1], tokens)
        return torch.zeros(len(ids), dtype=torch.bool)

    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        # Checkpoints for chats prefer others, which no scoring of text knows.
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([watch]),
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(output.logits, dim=1).float().topk(2).values
    return Continuations(output.sequences[:, prompts.shape[1] :], best[..., 0] - best[..., 1])


def pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """What each token adds to the text, spaces included.

    A token that holds a part of a character only is shown as the tokenizer names it. Without a tokenizer, the ids.
    """
    if tokenizer is None:
        return [f"[{token}]" for token in ids]
    found, before = [], ""
    for index, token in enumerate(ids):
        text = tokenizer.decode(ids[: index + 1], clean_up_tokenization_spaces=False)
        whole = text.rstrip(PART)
        added = whole[len(before) :] if whole.startswith(before) else ""
        found.append(added or str(tokenizer.convert_ids_to_tokens(token)))
        before = whole if whole.startswith(before) else before
    return found


def divergences(reference: Continuations, other: Continuations) -> list[Divergence]:
    """One entry for every prompt whose continuations differ."""
    found = []
    for prompt, (a, b) in enumerate(zip(reference.tokens, other.tokens, strict=True)):
        different = (a != b).nonzero()
        if len(different):
            step = int(different[0])
            margin = float(reference.margins[prompt, step])
            found.append(Divergence(prompt, step, int(a[step]), int(b[step]), margin))
    return found
