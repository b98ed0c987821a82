"""Measures an artifact from its bytes: the expanded weights, the engine's arithmetic, and greedy continuations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from calibrate.results import save_tensors
from calibrate.text import Windows, digest_of
from export.artifact import Expansion
from export.opened import AnyArtifact, expansion_of
from export.phone.artifact import PhoneArtifact
from models.checkpoint import Checkpoint
from models.errors import BadInput
from validate.divergence import parted
from validate.engines.check import EngineSpec, check_engine
from validate.engines.onnxruntime import NAME as HOST
from validate.engines.onnxruntime import measure_host
from validate.greedy import Continuations, continue_greedily, pieces
from validate.kernels import TinygemmLinear, W4A8Linear
from validate.long_context import LongText, compare_long, long_logprobs
from validate.score import Comparison, Stream, Swap, compare, final_hidden, final_hiddens, standard_error
from validate.score import Progress as Part
from validate.swap import UnsuitedKernelError, kernel_swap

Progress = Callable[[str, int, int], None]
ENGINES: Mapping[str, tuple[str, type[nn.Module]]] = {
    "gptq": ("vLLM W4A8 kernel (bit-exact emulation)", W4A8Linear),
    "awq": ("torch int4 operator (as GPTQModel packs AWQ)", TinygemmLinear),
    "tinygemm": ("torch int4 operator", TinygemmLinear),
}


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        windows: evaluation tokens.
        prompts: int64 [prompts, length], continued by ``greedy_tokens`` tokens.
        engine_windows: how many of the windows, evenly spread, the engine's arithmetic is scored on; 0 for none.
        gates: bounds by gate; None is no bound.
        dtype: compute dtype of reference and expansion.
        engines: that run the artifact as well, on the same windows, or on all of them when ``engine_windows`` is 0.
        long: text beyond the model's sliding window; None where it is not wanted, or where there is no such window.
        tokenizer: shows continuations and the tokens at which they part as text; None leaves them as numbers.
    """

    windows: Windows
    prompts: torch.Tensor
    greedy_tokens: int
    engine_windows: int
    gates: Mapping[str, float | None]
    dtype: torch.dtype
    engines: tuple[EngineSpec, ...] = ()
    long: LongText | None = None
    tokenizer: Any = field(default=None, compare=False, repr=False)

    @property
    def chosen(self) -> list[int]:
        """Indices of the windows that engines are scored on."""
        total = len(self.windows.ids)
        count = self.engine_windows or total
        return [i * total // count for i in range(count)]

    def key(self) -> dict[str, Any]:
        """What decides a reference's numbers, besides the weights."""
        return {
            "windows": self.windows.digest(),
            "prompts": self.prompts.tolist(),
            "greedy_tokens": self.greedy_tokens,
            "dtype": str(self.dtype),
            **({} if self.long is None else {"long": digest_of(self.long.both)}),
        }


@dataclass(frozen=True)
class Reference:
    """The reference's final hidden states [windows, tokens, hidden], greedy continuations, and log-likelihoods of the
    long text as `long_logprobs` gives them, where there is one."""

    hidden: torch.Tensor
    continuations: Continuations
    long: torch.Tensor | None = None


@dataclass(frozen=True)
class Measurement:
    """What an artifact lost: decided by its bytes, the reference and the settings, so that it may be kept for later.

    Attributes:
        greedy: continuations identical of how many, and each first divergence with what it is (`divergence.to_dict`).
        engine: the engine's name with its figures, or with the reason why it was ``skipped``.
        engines: of each engine that was to run the artifact, as `check_engine` gives it.
        long: see `compare_long`; None where there is no long text.
        texts: the prompts, and the reference's and the artifact's continuations as lists of their tokens' strings.
    """

    scores: Comparison
    greedy: dict[str, Any]
    engine: dict[str, Any]
    engines: list[dict[str, Any]] = field(default_factory=list)
    texts: dict[str, Any] = field(default_factory=dict)
    long: dict[str, Any] | None = None

    @property
    def whole(self) -> bool:
        """Whether every engine ran; one that did not may be mended without a change of the artifact."""
        return not any("failed" in engine for engine in self.engines)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Measurement:
        """The inverse of ``to_dict``, through JSON."""
        scores = {**data["scores"], "nll": tuple(data["scores"]["nll"])}
        return Measurement(**{**data, "scores": Comparison(**scores)})


def _parts(progress: Progress, of: str = "") -> Callable[[str], Part]:
    """Names the long steps of one thing."""
    return lambda what: lambda done, total: progress(f"{of}{what}", done, total)


def measure_reference(checkpoint: Checkpoint, settings: Settings, cache: Path, progress: Progress) -> Reference:
    """Scores the reference once; ``cache`` is a folder for this checkpoint and these settings only.

    Raises:
        BadInput: when the reference itself overflows in its compute dtype, so that nothing can be compared with it.
    """
    file = cache / "reference.safetensors"
    part = _parts(progress)
    if not file.is_file():
        hidden = final_hidden(checkpoint, settings.windows.ids, settings.dtype, progress=part("reference: weights"))
        if not bool(torch.isfinite(hidden).all()):
            dtype = str(settings.dtype).removeprefix("torch.")
            raise BadInput(
                f"{checkpoint.name}: the reference's hidden states are not finite in {dtype}: set another `model.dtype`"
            )
        continuations = continue_greedily(
            checkpoint, settings.prompts, settings.greedy_tokens, settings.dtype, part("reference: greedy")
        )
        tensors = {"hidden": hidden, "tokens": continuations.tokens, "margins": continuations.margins}
        if settings.long is not None:
            tensors["long"] = long_logprobs(checkpoint, settings.long, settings.dtype, part("reference: long context"))
        save_tensors(file, {k: v.contiguous() for k, v in tensors.items()})
    with safe_open(file, "pt") as stored:
        continuations = Continuations(stored.get_tensor("tokens"), stored.get_tensor("margins"))
        long = None if settings.long is None else stored.get_tensor("long")
        return Reference(stored.get_tensor("hidden"), continuations, long)


def measure(
    artifact: AnyArtifact,
    checkpoint: Checkpoint,
    reference: Reference,
    settings: Settings,
    progress: Progress,
) -> Measurement:
    """Measures what an artifact's bytes lost against the reference checkpoint; `Artifact.check` comes first."""
    name = artifact.ledger.target["name"]
    expansion = expansion_of(artifact)
    ids = settings.windows.ids
    part = _parts(progress, f"{name}: ")
    kernel = Kernel.of(artifact, settings)
    hidden = kernel.run(expansion, settings, part("weights"))
    scores = compare(checkpoint, reference.hidden, expansion, hidden, ids, settings.dtype, progress=part("logits"))
    continuations = continue_greedily(
        expansion, settings.prompts, settings.greedy_tokens, settings.dtype, part("greedy")
    )
    both = reference.continuations, continuations
    greedy = parted(checkpoint, expansion, settings.prompts, both, settings.dtype, settings.tokenizer)
    if isinstance(artifact, PhoneArtifact):
        engine = _host(artifact, checkpoint, reference, settings, scores, part)
    else:
        engine = kernel.compare(expansion, checkpoint, reference, settings, scores, part("engine's logits"))
    engines = []
    for spec in settings.engines:
        if artifact.format not in spec.formats:
            continue
        progress(f"{name}: {spec.name}", 0, 1)
        engines.append(
            check_engine(
                spec,
                artifact,
                checkpoint,
                ids[settings.chosen],
                hidden[settings.chosen],
                settings.prompts,
                continuations.tokens,
                settings.dtype,
            )
        )
        progress(f"{name}: {spec.name}", 1, 1)
    texts = {
        "prompts": ["".join(pieces(settings.tokenizer, row)) for row in settings.prompts.tolist()],
        "reference": [pieces(settings.tokenizer, row) for row in reference.continuations.tokens.tolist()],
        "artifact": [pieces(settings.tokenizer, row) for row in continuations.tokens.tolist()],
    }
    return Measurement(scores, greedy, engine, engines, texts, _long(expansion, reference, settings, part))


def _long(
    expansion: Checkpoint, reference: Reference, settings: Settings, part: Callable[[str], Part]
) -> dict[str, Any] | None:
    if settings.long is None or reference.long is None:
        return None
    found = long_logprobs(expansion, settings.long, settings.dtype, part("long context"))
    return compare_long(settings.long, reference.long, found)


class Kernel:
    """The engine's arithmetic on the chosen windows, computed beside the expanded weights.

    Args:
        name: the engine's.
        swap: its kernel's modules; None where it is not to be scored.
        skipped: why it is not.
    """

    def __init__(self, name: str, swap: Swap | None, skipped: str = "") -> None:
        self.name, self.swap, self.skipped = name, swap, skipped
        self.hidden: torch.Tensor | None = None

    @staticmethod
    def of(artifact: AnyArtifact, settings: Settings) -> Kernel:
        """An artifact's; a phone's graphs are run as a whole."""
        if isinstance(artifact, PhoneArtifact):
            return Kernel(HOST, None)
        name, kernel = ENGINES[str(artifact.config["quant_method"])]
        if not settings.engine_windows:
            return Kernel(name, None, "validation: engine: false")
        return Kernel(name, kernel_swap(artifact, Expansion(artifact), kernel, settings.dtype))

    def run(self, expansion: Checkpoint, settings: Settings, progress: Part) -> torch.Tensor:
        """The final hidden states of the expanded weights; keeps those of the engine, unless it cannot compute them."""
        streams = [Stream(settings.windows.ids)]
        if self.swap is not None:
            try:
                engine = Stream(settings.windows.ids[settings.chosen], self.swap)
                hidden, self.hidden = final_hiddens(expansion, [*streams, engine], settings.dtype, progress)
                return hidden
            except UnsuitedKernelError as error:
                self.skipped = str(error)
        return final_hiddens(expansion, streams, settings.dtype, progress)[0]

    def compare(
        self,
        expansion: Checkpoint,
        checkpoint: Checkpoint,
        reference: Reference,
        settings: Settings,
        scores: Comparison,
        progress: Part,
    ) -> dict[str, Any]:
        """The engine's entry in the report."""
        if self.hidden is None or self.swap is None:
            return {"name": self.name, "skipped": self.skipped}
        chosen = settings.chosen
        of_reference, ids = reference.hidden[chosen], settings.windows.ids[chosen]
        try:
            # The head is swapped here, so it may be refused here.
            engine = compare(checkpoint, of_reference, expansion, self.hidden, ids, settings.dtype, self.swap, progress)
        except UnsuitedKernelError as error:
            return {"name": self.name, "skipped": str(error)}
        return {
            "name": self.name,
            "perplexity": engine.perplexity,
            "perplexity_ratio": engine.perplexity_ratio,
            "perplexity_ratio_se": engine.perplexity_ratio_se,
            "kl": engine.kl,
            "tokens": engine.tokens,
            **_gap(engine.nll, scores, chosen),
            **_on_all(engine, scores, chosen),
        }


def _host(
    artifact: PhoneArtifact,
    checkpoint: Checkpoint,
    reference: Reference,
    settings: Settings,
    scores: Comparison,
    part: Callable[[str], Part],
) -> dict[str, Any]:
    """Runs the graphs on the engine's windows and on the prompts; where the context is too short, says so."""
    if not settings.engine_windows:
        return {"name": HOST, "skipped": "validation: engine: false"}
    ids = settings.windows.ids[settings.chosen]
    longest = max(ids.shape[1], settings.prompts.shape[1] + settings.greedy_tokens)
    if longest > artifact.manifest.context:
        return {"name": HOST, "skipped": f"texts of {longest} tokens; the context is {artifact.manifest.context}"}
    greedy = reference.continuations.tokens
    found, nll = measure_host(artifact, checkpoint, ids, settings.prompts, greedy, part("engine"))
    return {**found, **_gap(nll, scores, settings.chosen)}


def _gap(nll: Sequence[float], scores: Comparison, chosen: Sequence[int]) -> dict[str, float]:
    """Relative difference of an engine's perplexity from that of the expanded weights, on the chosen windows, and its
    paired standard error."""
    lost = _lost(nll, scores, chosen)
    mean = lost.mean()
    return {"gap": float(torch.expm1(mean).abs()), "gap_se": float(mean.exp()) * standard_error(lost)}


def _on_all(engine: Comparison, scores: Comparison, chosen: Sequence[int]) -> dict[str, float]:
    """The engine's perplexity ratio on all windows: the expanded weights' there, times what the engine adds on the
    chosen ones. Its error is the two errors' together, and the engine's own where all windows are chosen."""
    lost = _lost(engine.nll, scores, chosen)
    added = float(lost.mean().exp())
    ratio = scores.perplexity_ratio * added
    se = math.hypot(scores.perplexity_ratio_se * added, ratio * standard_error(lost))
    every = len(chosen) == scores.windows
    return {"ratio_on_all": ratio, "ratio_on_all_se": engine.perplexity_ratio_se if every else se}


def _lost(nll: Sequence[float], scores: Comparison, chosen: Sequence[int]) -> torch.Tensor:
    """What each chosen window's loss is above that of the expanded weights, fp64 [chosen]."""
    return torch.tensor(nll, dtype=torch.float64) - torch.tensor([scores.nll[i] for i in chosen], dtype=torch.float64)
