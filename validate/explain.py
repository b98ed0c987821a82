"""Which layer hurts: an artifact's layers and linears by the KL divergence that they cause, and what buys it back.

Layers and linears that cause most are *restored*: measured with the source's weights in their place. Every linear's
part is *attributed* by one backward pass (see `validate.sensitivity`), whose parts sum to the whole; how well
the two agree is in the result.

Where norms were folded or the residual stream was rotated, the source is taken in those weights, which are the same
function. Of a phone artifact these are the weights' parts; what rounding of activations adds stands beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from calibrate.composition import rewrites_of
from calibrate.grid import Grid
from calibrate.replay import Replay
from calibrate.rewrites import rewritten
from export.artifact import Expansion
from export.ledger import LinearRow
from export.opened import AnyArtifact
from export.phone.artifact import PhoneArtifact
from export.phone.expand import PhoneExpansion
from export.phone.weights import int8_grid
from export.phone.weights import rewritten as phone_rewritten
from models.checkpoint import Checkpoint
from models.errors import BadInput
from models.family import Linear
from models.opened import OpenedModel
from validate.advice import Skip, choose, extra_bits, patterns, skips, to_yaml
from validate.alternatives import alternatives, observed_hidden, untried
from validate.restore import Restoration, restored_kl
from validate.sensitivity import attribute

Progress = Callable[[str, int, int], None]
# A change of a weight, relative to it, that no rounding to 4 bits makes: methods that rewrite weights do.
REWRITTEN_WEIGHT, REWRITTEN_NORM = 0.35, 0.05


@dataclass(frozen=True)
class Checked:
    """How many layers, and how many linears, are restored, those with the largest parts first.

    Layers whose weights were rewritten have no parts, so all of them are restored.
    """

    layers: int = 8
    linears: int = 8


@dataclass(frozen=True)
class Part:
    """A layer, a linear or the head.

    Attributes:
        name: full name of the linear or the head, or that of the layer.
        attributed: its part of the divergence, nats per token; None where its weights were rewritten.
        restored: what the divergence falls by when it gets the source's weights back; None where it was not measured.
        error: relative output error from the ledger, of a linear.
        extra_bits: what it costs more in the model's dtype, in bits.
    """

    name: str
    attributed: float | None
    restored: float | None
    error: float | None
    extra_bits: float


@dataclass(frozen=True)
class Subject:
    """What is explained.

    Attributes:
        model: the source, in the weights that the artifact holds but for rounding.
        rewritten: layers whose weights were rewritten; None is the head.
        rows, grids: of the ledger, by linear.
    """

    model: OpenedModel
    artifact: AnyArtifact
    expansion: Checkpoint
    rewritten: frozenset[int | None]
    rows: Mapping[str, LinearRow]
    grids: Mapping[str, Grid]

    @property
    def linears(self) -> list[Linear]:
        """Quantised linears whose weights are the source's apart from rounding."""
        return [x for x in self.model.linears if x.name in self.rows and x.layer not in self.rewritten]

    @property
    def weights(self) -> int:
        return sum(linear.weights for linear in self.model.linears if linear.name in self.rows)


def explain(
    model: OpenedModel,
    artifact: AnyArtifact,
    windows: torch.Tensor,
    checked: Checked,
    budget: float,
    progress: Progress,
) -> dict[str, Any]:
    """Ranks an artifact's parts, as JSON values (see README: which layer hurts).

    Args:
        model: the source.
        windows: int64 [windows, tokens], of text that calibration did not see.
        checked: what is restored.
        budget: bits per weight that linears which are left unquantised may cost, on the mean over the quantised ones;
            a phone's stay quantised.

    Raises:
        BadInput: when the artifact's layers cannot be restored one at a time.
    """
    subject = _subject(model, artifact)
    model, expansion = subject.model, subject.expansion
    dtype, family, phone = artifact.dtype, model.family, isinstance(artifact, PhoneArtifact)
    hidden, moments = observed_hidden(model, windows, dtype, lambda d, t: progress("reference", d, t))
    parts = attribute(model, expansion, hidden, windows, dtype, lambda d, t: progress("attribute", d, t))
    ranked = sorted(subject.linears, key=lambda linear: -parts[linear.name])
    candidates = [] if phone else skips(family, ranked, parts, subject.grids, dtype)
    chosen = choose(candidates, budget, subject.weights)
    inside = [linear.name for linear in ranked if linear.layer is not None][: checked.linears]
    layers = _worst_layers(subject, parts, checked.layers)
    skipped = frozenset(name for skip in chosen for name in skip.linears)
    wanted = [
        *(Restoration(layers=frozenset([layer])) for layer in layers),
        Restoration(head=True),
        *(Restoration(frozenset([name])) for name in inside),
        Restoration(skipped - {family.head}, head=family.head in skipped),
        Restoration(),
    ]
    *others, kl = restored_kl(model, expansion, hidden, windows, wanted, dtype, lambda d, t: progress("restore", d, t))
    falls = [kl - other for other in others]
    by_layer = dict(zip(layers, falls, strict=False))
    restored = dict(zip([family.head, *inside], falls[len(layers) : -1], strict=True))
    layout = None if isinstance(artifact, PhoneArtifact) else artifact.layout
    read = Replay(model.checkpoint, dtype).read
    others_estimated = alternatives(subject.linears, subject.rows, parts, moments, subject.grids, layout, read)
    return {
        "artifact": artifact.ledger.target["name"],
        "source": model.checkpoint.name,
        "windows": windows.shape[0],
        "tokens": windows.shape[0] * (windows.shape[1] - 1),
        "kl": kl,
        "layers": [asdict(_layer(subject, layer, parts, by_layer)) for layer in range(model.dimensions.layers)],
        "linears": [asdict(_linear(subject, linear, parts, restored)) for linear in ranked],
        "rewritten": [_layer_name(subject, layer) for layer in sorted(subject.rewritten, key=str)],
        "check": _check(subject, parts, restored, by_layer),
        "untried": untried(subject.rows),
        "activations": _activations(artifact),
        "advice": _advice(subject, chosen, falls[-1] if chosen else 0.0, others_estimated),
    }


def _activations(artifact: AnyArtifact) -> dict[str, Any] | None:
    """What rounding of activations adds to the divergence, as far as the last validation ran a phone's graphs; None for
    formats whose engines the parts are of, or almost."""
    if not isinstance(artifact, PhoneArtifact):
        return None
    report = (artifact.ledger.validation or {}).get("report") or {}
    engine = report.get("engine", {})
    return {
        "weights_kl": report.get("kl"),
        "graphs_kl": engine.get("kl"),
        "engine": engine.get("name"),
        "tokens": engine.get("tokens"),
    }


def _subject(model: OpenedModel, artifact: AnyArtifact) -> Subject:
    expansion: Checkpoint
    if isinstance(artifact, PhoneArtifact):
        method = tuple(artifact.ledger.target["method"])
        model, expansion = phone_rewritten(model, method), PhoneExpansion(artifact)
    else:
        method = artifact.ledger.target["method"]
        model, expansion = rewritten(model, method, artifact.dtype, values=True), Expansion(artifact)
    rows = {row.linear: row for tensor in artifact.ledger.tensors for row in tensor.linears}
    name = f"{model.family.embedding}.weight"
    if _change(model, expansion, name) > REWRITTEN_NORM:
        raise BadInput(
            f"{expansion.name}: {name} is not the source's, in the weights that its methods give: the hidden states"
            " were turned, so that no layer can be restored alone"
        )
    return Subject(model, artifact, expansion, _rewritten(model, expansion), rows, _grids(artifact, rows))


def _grids(artifact: AnyArtifact, rows: Mapping[str, LinearRow]) -> dict[str, Grid]:
    if isinstance(artifact, PhoneArtifact):
        return {name: int8_grid(row.group_size) for name, row in rows.items()}
    return {
        name: Grid(row.group_size, row.zero, artifact.dtype)  # type: ignore[arg-type]
        for name, row in rows.items()
    }


def _rewritten(model: OpenedModel, expansion: Checkpoint) -> frozenset[int | None]:
    """Layers whose weights were rewritten (channels rescaled, norms folded): as a whole they are still the source's,
    their linears one by one are not."""
    found: set[int | None] = set()
    linears = {f"{linear.module}.weight": linear.layer for linear in model.linears}
    prefix = f"{model.family.layers}."
    for name, info in model.checkpoint.tensors.items():
        if name not in expansion.tensors or not info.dtype.is_floating_point:
            continue
        inside = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
        bound = REWRITTEN_WEIGHT if name in linears else REWRITTEN_NORM
        if _change(model, expansion, name) > bound:
            found.add(linears.get(name, int(inside) if inside else None))
    return frozenset(found)


def _change(model: OpenedModel, expansion: Checkpoint, name: str) -> float:
    """Relative Frobenius norm of a tensor's change."""
    before, after = model.checkpoint.read(name).float(), expansion.read(name).float()
    return float(torch.linalg.vector_norm(after - before) / torch.linalg.vector_norm(before).clamp_min(1e-30))


def _layer_name(subject: Subject, layer: int | None) -> str:
    family = subject.model.family
    return family.head if layer is None else f"{family.layers}.{layer}"


def _linear(subject: Subject, linear: Linear, parts: Mapping[str, float], restored: Mapping[str, float]) -> Part:
    row = subject.rows[linear.name]
    extra = extra_bits(linear, subject.grids[linear.name], subject.artifact.dtype)
    return Part(linear.name, parts[linear.name], restored.get(linear.name), row.error, extra)


def _worst_layers(subject: Subject, parts: Mapping[str, float], count: int) -> list[int]:
    """Layers to restore, in order."""
    of_layers = {layer: _attributed(subject, layer, parts) for layer in range(subject.model.dimensions.layers)}
    known = {layer: part for layer, part in of_layers.items() if part is not None}
    worst = sorted(known, key=lambda layer: -known[layer])[:count]
    return sorted([*(of_layers.keys() - known.keys()), *worst])


def _attributed(subject: Subject, layer: int, parts: Mapping[str, float]) -> float | None:
    linears = [x for x in subject.model.linears if x.layer == layer and x.name in subject.rows]
    return None if layer in subject.rewritten else sum(parts[linear.name] for linear in linears)


def _layer(subject: Subject, layer: int, parts: Mapping[str, float], restored: Mapping[int, float]) -> Part:
    linears = [x for x in subject.model.linears if x.layer == layer and x.name in subject.rows]
    extra = sum(extra_bits(linear, subject.grids[linear.name], subject.artifact.dtype) for linear in linears)
    return Part(_layer_name(subject, layer), _attributed(subject, layer, parts), restored.get(layer), None, extra)


def _check(
    subject: Subject, parts: Mapping[str, float], restored: Mapping[str, float], by_layer: Mapping[int, float]
) -> dict[str, Any]:
    """How well attribution and restoration agree, over the layers and linears that have both."""
    layers = {x.name: x.layer for x in subject.model.linears}
    pairs = [(parts[name], fall) for name, fall in restored.items() if layers[name] not in subject.rewritten]
    for layer, fall in by_layer.items():
        attributed = _attributed(subject, layer, parts)
        if attributed is not None:
            pairs.append((attributed, fall))
    values = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2)
    correlation = float(torch.corrcoef(values.t())[0, 1]) if len(pairs) > 1 else float("nan")
    return {
        "attributed": sum(parts.values()),
        "largest_difference": max((abs(a - b) for a, b in pairs), default=None),
        "correlation": correlation if correlation == correlation else None,
    }


def _advice(subject: Subject, chosen: Sequence[Skip], fall: float, others: Sequence[Any]) -> list[dict[str, Any]]:
    """Changes of the target, the one that buys most per bit first; what costs nothing comes before everything else."""
    target, family = subject.artifact.ledger.target, subject.model.family
    found = []
    if chosen:
        head = {"lm_head": "keep"} if any(family.head in skip.linears for skip in chosen) else {}
        skip = patterns(chosen, family)
        found.append(({**({"skip": skip} if skip else {}), **head}, fall, sum(c.extra_bits for c in chosen), True))
    before = rewrites_of(target["method"])
    found += [(_after(before, other.change), other.kl, other.extra_bits, False) for other in others if other.kl > 0]
    entries = [
        {
            "change": change,
            "kl": kl,
            "extra_bits_per_weight": bits / subject.weights,
            "measured": measured,
            "yaml": to_yaml(target, **change),
        }
        for change, kl, bits, measured in found
    ]
    return sorted(entries, key=_rank)


def _after(before: Sequence[str], change: Mapping[str, Any]) -> dict[str, Any]:
    """A change whose method, where it has one, comes after the rewrites of the target."""
    return {key: [*before, *value] if key == "method" else value for key, value in change.items()}


def _rank(entry: Mapping[str, Any]) -> tuple[bool, float]:
    bits = entry["extra_bits_per_weight"]
    return bits > 0, -(entry["kl"] / bits if bits > 0 else entry["kl"])
