"""The float graphs of a model on disk: what calibration runs, and what quantised graphs are compared with."""

from __future__ import annotations

from pathlib import Path

from export.phone.check import graph_problems, manifest_problems, pair_problems
from export.phone.files import save_part
from export.phone.graph import WeightReader, export_parts
from export.phone.manifest import FILE, GRAPHS, MASK, Manifest
from export.phone.options import PhoneOptions
from export.phone.ports import manifest_of
from export.phone.structure import structure_of
from models.checkpoint import Checkpoint
from models.files import to_json


def write_float(checkpoint: Checkpoint, options: PhoneOptions, folder: Path) -> Manifest:
    """Writes graphs, weights and manifest into a folder that is there; part by part.

    Raises:
        BadInput: when there is no phone export for the model.
        RuntimeError: when a graph breaks a rule of `export.phone.check`: a bug.
    """
    structure = structure_of(checkpoint, options.context)
    manifest = manifest_of(structure, options, MASK)
    problems = manifest_problems(manifest)
    read = WeightReader(checkpoint)
    for graphs, part in zip(export_parts(checkpoint, structure, options), manifest.parts, strict=True):
        save_part(folder, graphs.span, graphs.by_kind, read.of(graphs))
        for kind in GRAPHS:
            problems += graph_problems(graphs.by_kind[kind], part.graph(kind), options.opset, part.norms)
        problems += pair_problems(graphs.prefill, graphs.decode, graphs.span.name)
    if problems:
        raise RuntimeError("\n".join(problems))
    (folder / FILE).write_bytes(to_json(manifest.to_dict()))
    return manifest
