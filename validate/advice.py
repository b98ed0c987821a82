"""What to write into the yaml: which change of a target buys back most of the divergence for each bit."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from ruamel.yaml import YAML

from calibrate.grid import Grid
from export.phone.options import PhoneOptions
from models.family import Family, Linear


@dataclass(frozen=True)
class Skip:
    """Linears that may be left as they are, together: engines load some of them as one.

    Attributes:
        linears: full split names.
        kl: the divergence attributed to them, in nats per token.
        extra_bits: what they cost, over the artifact's grid.
    """

    linears: tuple[str, ...]
    kl: float
    extra_bits: float

    @property
    def worth(self) -> float:
        """Nats per bit."""
        return self.kl / self.extra_bits


def extra_bits(linear: Linear, grid: Grid, dtype: torch.dtype) -> float:
    """Bits that a quantised linear would cost more in a dtype of the model."""
    return linear.weights * (torch.finfo(dtype).bits - grid.bits_per_weight)


def skips(
    family: Family,
    linears: Sequence[Linear],
    parts: Mapping[str, float],
    grids: Mapping[str, Grid],
    dtype: torch.dtype,
) -> list[Skip]:
    """Every smallest set of linears that can be left unquantised, best first.

    Args:
        linears: quantised ones.
        parts: the divergence attributed to each, by full name.
        grids: of each.
    """
    shard_of = {name: shard for shard in family.shards for name in shard}
    groups: dict[tuple[Any, ...], list[Linear]] = {}
    for linear in linears:
        inside = linear.name.removeprefix(f"{family.layers}.{linear.layer}.")
        groups.setdefault((linear.layer, shard_of.get(inside, inside)), []).append(linear)
    found = [
        Skip(
            tuple(linear.name for linear in group),
            sum(parts[linear.name] for linear in group),
            sum(extra_bits(linear, grids[linear.name], dtype) for linear in group),
        )
        for group in groups.values()
    ]
    return sorted((skip for skip in found if skip.kl > 0 and skip.extra_bits > 0), key=lambda skip: -skip.worth)


def choose(candidates: Iterable[Skip], budget: float, weights: int) -> list[Skip]:
    """The best candidates, in order, that fit into a budget of bits per weight; the first one in any case."""
    chosen: list[Skip] = []
    left = budget * weights
    for candidate in candidates:
        if not chosen or candidate.extra_bits <= left:
            chosen.append(candidate)
            left -= candidate.extra_bits
    return chosen


def patterns(chosen: Sequence[Skip], family: Family) -> list[str]:
    """What ``skip`` says: full names, or a layer's with a star where all of a layer is chosen; without the head."""
    names = {name for skip in chosen for name in skip.linears} - {family.head}
    found = []
    for layer in sorted({int(name.removeprefix(f"{family.layers}.").partition(".")[0]) for name in names}):
        prefix = f"{family.layers}.{layer}."
        every = [f"{prefix}{linear}" for linear in family.linears]
        inside = [name for name in every if name in names]
        found += [f"{prefix}*"] if inside == every else inside
    return found


def to_yaml(target: Mapping[str, Any], skip: Sequence[str] = (), **changes: Any) -> str:
    """A target of a pipeline.yaml: a ledger's, with changes.

    Args:
        skip: patterns; those that the target has already stay.
    """
    entry = _phone_entry(target) if target["format"] == "phone" else _entry(target)
    entry |= changes
    every = [*target.get("skip", ()), *skip]
    if every:
        entry["skip"] = every
    writer = YAML()
    writer.indent(mapping=2, sequence=4, offset=2)
    stream = io.StringIO()
    writer.dump({"targets": [entry]}, stream)
    return stream.getvalue()


def _entry(target: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": target["name"],
        "format": target["format"],
        "group_size": target["group_size"],
        "method": list(target["method"]),
        "lm_head": "quantize" if target["quantize_head"] else "keep",
        **({"zero": target["zero"]} if target["format"] == "tinygemm" and target["zero"] != "none" else {}),
        **({"symmetric": True} if target["format"] == "tinygemm" and target["zero"] == "none" else {}),
    }


def _phone_entry(target: Mapping[str, Any]) -> dict[str, Any]:
    """With the options that are not as they are unless the file says more."""
    usual = asdict(PhoneOptions())
    chosen = {key: value for key, value in target["options"].items() if value != usual[key] and key != "parts"}
    chosen = {key: list(value) if key == "i_know" else value for key, value in chosen.items()}
    parts = target["options"]["parts"]
    split = {"split": {"parts": parts}} if parts != usual["parts"] else {}
    return {"name": target["name"], "format": target["format"], "method": list(target["method"]), **chosen, **split}
