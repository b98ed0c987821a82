"""What ``convert plan`` and ``convert inspect`` show."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from convert.estimate import Estimate, size
from convert.prepare import Prepared
from export.artifact import is_artifact
from export.opened import AnyArtifact, open_artifact
from export.phone.artifact import PhoneArtifact
from models.checkpoint import TensorInfo
from models.family import family_of
from models.source import open_source


def plan_to_dict(prepared: Prepared, needs: Estimate) -> dict[str, Any]:
    """The plan as JSON values."""
    return {
        "source": prepared.model.checkpoint.name,
        "family": prepared.model.family.model_types[0],
        "memory_bytes": needs.memory_bytes,
        "disk_bytes": needs.disk_bytes,
        "targets": [
            {
                "name": target.plan.spec.name,
                "format": target.plan.spec.format,
                "method": list(target.plan.spec.method),
                "quality": target.plan.spec.quality,
                "group_size": target.plan.group_size,
                "bits_per_weight": target.plan.bits_per_weight,
                "quantized_bytes": target.quantized_bytes,
                "kept_bytes": target.kept_bytes,
                "quantized": {
                    linear.name: [linear.rows, linear.columns, target.plan.grid(linear.columns).group_size]
                    for linear in target.plan.linears
                },
                "modules": [module.name for module in target.plan.quantized],
                "kept": dict(target.plan.kept),
                "notes": [*target.plan.notes, *_reason(prepared, target.plan.spec.name)],
            }
            for target in needs.targets
        ],
    }


def print_plan(prepared: Prepared, needs: Estimate, console: Console) -> None:
    """A table of targets, then what each quantises and keeps, by the linear's place in a layer."""
    plan = plan_to_dict(prepared, needs)
    table = Table(title=f"{plan['source']} ({plan['family']}, {prepared.model.dimensions.layers} layers)")
    for column in ("target", "format", "method", "group", "bits/weight", "quantised", "kept", "file"):
        table.add_column(column, justify="left" if column in ("target", "format", "method") else "right")
    for target in plan["targets"]:
        table.add_row(
            target["name"],
            target["format"],
            "+".join(target["method"]) + (f" ({target['quality']})" if target["quality"] else ""),
            str(target["group_size"]),
            f"{target['bits_per_weight']:.4g}",
            size(target["quantized_bytes"]),
            size(target["kept_bytes"]),
            size(target["quantized_bytes"] + target["kept_bytes"]),
        )
    console.print(table)
    layers = prepared.model.family.layers
    for target in plan["targets"]:
        quantized = Counter((_inside(name, layers), tuple(shape[:2])) for name, shape in target["quantized"].items())
        kept = Counter((_inside(name, layers), reason) for name, reason in target["kept"].items())
        for (name, (rows, columns)), count in quantized.items():
            console.print(f"{target['name']}: quantise {count} x {name} [{rows}, {columns}]", highlight=False)
        for (name, reason), count in kept.items():
            console.print(f"{target['name']}: keep {count} x {name}: {reason}", highlight=False)
        for note in target["notes"]:
            console.print(f"{target['name']}: note: {note}", highlight=False)
    console.print(
        f"needs about {size(needs.memory_bytes)} of memory and {size(needs.disk_bytes)} of disk", highlight=False
    )


def inspect_path(path: str) -> dict[str, Any]:
    """What a source or an artifact holds, as JSON values."""
    folder = Path(path)
    if folder.is_dir() and is_artifact(folder):
        artifact = open_artifact(folder)
        artifact.check()
        ledger = artifact.ledger
        return {
            "kind": "artifact",
            "name": path,
            **_scheme(artifact),
            "bits_per_weight": artifact.bits_per_weight,
            "source": ledger.source["name"],
            "target": ledger.target,
            "outcomes": dict(Counter(row.outcome for row in ledger.tensors)),
            "kept": {row.tensor: row.reason for row in ledger.tensors if row.outcome == "kept"},
            "notes": list(ledger.notes),
            "worst_linears": _worst(artifact),
            "validation": (ledger.validation or {}).get("report"),
            **_stored(artifact),
        }
    with tempfile.TemporaryDirectory(prefix="convert-") as scratch:
        checkpoint = open_source(path, base=Path.cwd(), side_folder=Path(scratch))
        family = family_of(checkpoint.config, checkpoint.name)
        return {
            "kind": "source",
            "name": path,
            "model_type": checkpoint.config["model_type"],
            "linears_of_a_layer": list(family.linears),
            "fused": {fusion.fused: list(fusion.parts) for fusion in family.fusions},
            "tied_head": f"{family.head}.weight" not in checkpoint.tensors,
            "side_files": sorted(checkpoint.side_files()),
            "skipped_files": checkpoint.skipped_files(),
            **_tensors(checkpoint.tensors),
        }


def print_inspection(found: dict[str, Any], console: Console) -> None:
    """Everything but the tensor list, a line a key, then the tensors."""
    for key, value in found.items():
        if key in ("tensors", "validation", "kept"):
            continue
        console.print(f"{key}: {size(value) if key == 'bytes' else value}", highlight=False, soft_wrap=True)
    if found.get("validation"):
        report = found["validation"]
        console.print(
            f"validation: perplexity ratio {report['perplexity_ratio']:.4f} ± {report['perplexity_ratio_se']:.4f},"
            f" KL {report['kl']:.4f}",
            highlight=False,
        )
    table = Table("tensor", "dtype", "shape")
    for name, (dtype, shape) in found["tensors"].items():
        table.add_row(name, dtype, str(shape))
    console.print(table)


def _tensors(infos: Mapping[str, TensorInfo]) -> dict[str, Any]:
    return {
        "bytes": sum(info.nbytes for info in infos.values()),
        "parameters": sum(info.elements for info in infos.values()),
        "tensors": {k: (str(v.dtype).removeprefix("torch."), list(v.shape)) for k, v in infos.items()},
    }


def _worst(artifact: AnyArtifact) -> dict[str, float]:
    errors = {linear.linear: linear.error for row in artifact.ledger.tensors for linear in row.linears}
    return dict(sorted(errors.items(), key=lambda item: -item[1])[:5])


def _scheme(artifact: AnyArtifact) -> dict[str, Any]:
    """How its tensors are to be read."""
    if not isinstance(artifact, PhoneArtifact):
        return {"quantization_config": artifact.config}
    manifest = artifact.manifest
    return {
        "context": manifest.context,
        "prefill": manifest.prefill,
        "mask_value": manifest.mask_value,
        "caches": {type: f"{cache.kind} of {cache.slots} slots" for type, cache in manifest.caches.items()},
        "parts": {part.data: f"layers {part.layers[0]} to {part.layers[1]}" for part in manifest.parts},
        "operators": {path.name: dict(counts) for path, counts in artifact.operators()},
    }


def _stored(artifact: AnyArtifact) -> dict[str, Any]:
    return _tensors(artifact.stored() if isinstance(artifact, PhoneArtifact) else artifact.files.tensors)


def _inside(name: str, layers: str) -> str:
    """A linear's place in a layer: the name without the layer's number."""
    if not name.startswith(layers + "."):
        return name
    return name.removeprefix(layers + ".").partition(".")[2]


def _reason(prepared: Prepared, name: str) -> list[str]:
    return [prepared.reasons[name]] if name in prepared.reasons else []
