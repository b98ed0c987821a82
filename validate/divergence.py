"""Near-tie or defect: what a first divergence of greedy continuations says about the weights.

Greedy tokens are an argmax, and rounding alone moves an argmax where two logits nearly tie: the same weights computed
in fp32 instead of bf16 leave many continuations. So every first divergence is repeated in fp32, by the reference and
by the artifact, on the tokens that both had until then. With a the reference's token and b the other one, it is a

* **near-tie**, where rounding decided, when one of these holds:
  - ``resolution``: the reference's margin there is at most twice the step of the compute dtype at its best logit, so
    that one rounding of each of two logits closes it;
  - ``reference``: the reference in fp32 does not prefer a to b;
  - ``artifact``: the artifact in fp32 does not prefer b to a;
* **defect** otherwise: in arithmetic that is exact enough each model holds to its own token, so the changed weights
  made the difference. A 4-bit build has some. ``margin_fp32`` against ``noise``, what the weights changed in the logits
  there, tells a loss that was to be expected (a few times the noise) from one that was not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from calibrate.replay import Replay
from models.checkpoint import Checkpoint
from validate.greedy import Continuations, Divergence, divergences
from validate.score import final_hidden

Kind = Literal["near-tie", "defect"]
# One rounding of each of two logits.
STEPS = 2


@dataclass(frozen=True)
class Verdict:
    """What a divergence is, and by what.

    Attributes:
        because: the rule of the module's text that made it a near-tie; ``weights`` for a defect.
        resolution: the step of the compute dtype at the reference's best logit.
        margin_fp32: the reference's logit of its token minus that of the other token, in fp32.
        artifact_margin_fp32: the artifact's logit of its own token minus that of the reference's token, in fp32.
        noise: standard deviation over the vocabulary of the difference between the two models' fp32 logits there.
    """

    kind: Kind
    because: Literal["resolution", "reference", "artifact", "weights"]
    resolution: float
    margin_fp32: float
    artifact_margin_fp32: float
    noise: float


def resolution(logit: float, dtype: torch.dtype) -> float:
    """The distance between neighbouring numbers of a floating dtype at a logit's magnitude."""
    if not math.isfinite(logit):
        return math.nan
    info = torch.finfo(dtype)
    return float(info.eps * 2.0 ** math.floor(math.log2(max(abs(logit), info.smallest_normal))))


def judge(margin: float, step: float, margin_fp32: float, artifact_margin_fp32: float, noise: float) -> Verdict:
    """The verdict on one divergence; see the module's text.

    Args:
        margin: of the reference's logits in its compute dtype, the best minus the second.
        step: `resolution` at the best logit.
    """
    because: Literal["resolution", "reference", "artifact", "weights"] = "weights"
    if margin <= STEPS * step:
        because = "resolution"
    elif margin_fp32 <= 0:
        because = "reference"
    elif artifact_margin_fp32 <= 0:
        because = "artifact"
    kind: Kind = "defect" if because == "weights" else "near-tie"
    return Verdict(kind, because, step, margin_fp32, artifact_margin_fp32, noise)


def classify(
    found: Sequence[Divergence],
    reference: Checkpoint,
    artifact: Checkpoint,
    prompts: torch.Tensor,
    continuations: Continuations,
    dtype: torch.dtype,
) -> list[Verdict]:
    """Repeats each divergence in fp32, with one layer's weights in memory.

    Args:
        prompts: int64 [prompts, length].
        continuations: the reference's.
        dtype: what both models computed in.
    """
    if not found:
        return []
    chosen = [divergence.prompt for divergence in found]
    length = prompts.shape[1] + max(divergence.step for divergence in found)
    ids = torch.cat([prompts[chosen], continuations.tokens[chosen]], dim=1)[:, :length]
    positions = [prompts.shape[1] + divergence.step - 1 for divergence in found]
    ours, others = (_logits(checkpoint, ids, positions) for checkpoint in (reference, artifact))
    verdicts = []
    for divergence, a, b in zip(found, ours, others, strict=True):
        first, second = divergence.reference_token, divergence.token
        step, noise = resolution(float(a[first]), dtype), float((a - b).std())
        verdicts.append(judge(divergence.margin, step, float(a[first] - a[second]), float(b[second] - b[first]), noise))
    return verdicts


@torch.no_grad()
def _logits(checkpoint: Checkpoint, ids: torch.Tensor, positions: list[int]) -> torch.Tensor:
    """fp32 [rows, vocab]: the logits after one position of each row of ids [rows, length]."""
    hidden = final_hidden(checkpoint, ids, torch.float32)
    rows = torch.arange(len(ids))
    with Replay(checkpoint, torch.float32).end() as logits:
        # What the end does to a token depends on no other.
        return logits(ids[rows, positions][:, None], hidden[rows, positions][:, None])[:, 0].float()


def parted(
    reference: Checkpoint,
    artifact: Checkpoint,
    prompts: torch.Tensor,
    continuations: tuple[Continuations, Continuations],
    dtype: torch.dtype,
    tokenizer: Any,
) -> dict[str, Any]:
    """A report's ``greedy``: how many continuations are identical, of how many, and where and why the others part.

    Args:
        continuations: the reference's and the artifact's.
        tokenizer: gives the token strings; None leaves them out.
    """
    found = divergences(*continuations)
    verdicts = classify(found, reference, artifact, prompts, continuations[0], dtype)
    return {
        "identical": len(prompts) - len(found),
        "of": len(prompts),
        "tokens": continuations[0].tokens.shape[1],
        "divergences": [to_dict(*pair, tokenizer) for pair in zip(found, verdicts, strict=True)],
    }


def to_dict(divergence: Divergence, verdict: Verdict, tokenizer: Any) -> dict[str, Any]:
    """A divergence's entry in the report; ``tokenizer`` gives the token strings, None leaves them out."""
    entry = asdict(divergence) | asdict(verdict)
    if tokenizer is not None:
        entry["reference_text"] = token_text(tokenizer, divergence.reference_token)
        entry["text"] = token_text(tokenizer, divergence.token)
    return entry


def token_text(tokenizer: Any, token: int) -> str:
    """A token as text; one that is only a part of a character as its name in the vocabulary."""
    text = str(tokenizer.decode([token]))
    return str(tokenizer.convert_ids_to_tokens(token)) if not text or "\ufffd" in text else text


_REASONS = {
    "resolution": "the margin of {margin:.2g} is within {steps} steps of the compute dtype ({resolution:.2g} there)",
    "reference": "a margin of {margin:.2g} that the reference does not have in fp32",
    "artifact": "the margin is {margin:.2g}, and in fp32 the artifact keeps the reference's token",
    "weights": "in fp32 the reference prefers its token by {margin_fp32:.2g}, the artifact its own by"
    " {artifact_margin_fp32:.2g}; the weights moved the logits there by {noise:.2g}",
}


def describe(entry: Mapping[str, Any]) -> str:
    """One line for people about an entry of `to_dict`, after it went through JSON or not."""
    before, after = (entry.get(key, f"token {entry[token]}") for key, token in _TEXTS)
    numbers = {key: math.nan if entry[key] is None else entry[key] for key in _NUMBERS}
    reason = _REASONS[entry["because"]].format(steps=STEPS, **numbers)
    return f"prompt {entry['prompt']}, token {entry['step']}, {before!r} became {after!r}: {entry['kind']}: {reason}"


def summary(entries: Sequence[Mapping[str, Any]]) -> str:
    """One line for people about all of an artifact's divergences; empty where there are none."""
    if not entries:
        return ""
    defects = [entry for entry in entries if entry["kind"] == "defect"]
    text = f"{len(entries) - len(defects)} near-ties, {len(defects)} defects"
    if not defects:
        return text
    # What is not finite comes first: it is the worst.
    worst = max(defects, key=lambda entry: math.inf if entry["margin_fp32"] is None else entry["margin_fp32"])
    return f"{text}, the largest: {describe(worst)}"


_TEXTS = (("reference_text", "reference_token"), ("text", "token"))
_NUMBERS = ("margin", "resolution", "margin_fp32", "artifact_margin_fp32", "noise")
