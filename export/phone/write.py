"""Writes a phone artifact: ranges from the float graphs on real text, then quantised graphs, part by part."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import torch

from calibrate.grid import check_finite
from calibrate.ranges import Ranges
from calibrate.results import Results
from export.artifact import CARD, source_card
from export.ledger import Ledger, LinearRow, TensorRow, missing_rows
from export.phone.check import graph_problems, manifest_problems, pair_problems
from export.phone.files import read_external, save_part
from export.phone.graph import PartGraphs, WeightReader, export_parts
from export.phone.manifest import FILE, GRAPHS, MASK, Graph, Manifest, Part
from export.phone.observe import Observations, OpenPart, Progress, Step, observe_part, text_steps
from export.phone.options import STEPS, PhoneOptions
from export.phone.plan import PhonePlan
from export.phone.ports import manifest_of
from export.phone.products import span_new_entries
from export.phone.quantize import QUANTIZED, quantize_graph, tied_tensors
from export.phone.quantized import expected_counts, quantized_problems
from export.phone.structure import structure_of
from export.phone.table import TableGrid
from export.phone.weights import CodedWeights
from models.errors import BadInput
from models.files import atomic_folder, sha256, to_json
from models.opened import OpenedModel
from models.skeleton import is_derived

RANGES = "ranges.json"
# Texts of random tokens that stand in for a calibration text where there is none.
RANDOM_TEXTS = 2


@dataclass(frozen=True)
class _Job:
    """What every part shares."""

    options: PhoneOptions
    manifest: Manifest
    weights: CodedWeights
    read: WeightReader
    observations: Observations
    linears: frozenset[str]


def write(
    plan: PhonePlan,
    model: OpenedModel,
    results: Results,
    windows: torch.Tensor | None,
    folder: Path,
    ledger: Ledger,
    work: Path,
    open_part: OpenPart,
    threads: int = 1,
    progress: Progress = lambda what, done, total: None,
) -> None:
    """Writes an artifact; it appears under ``folder`` only when it is whole.

    Args:
        model: the source.
        results: of `calibrate.quantize.quantize` on the linears of `plan.rewritten(model)`, with the plan's recipe.
        windows: calibration token ids int64 [count, tokens]; None takes random ones.
        ledger: filled with a row for every source tensor and the hashes of the artifact's files.
        work: a folder for float graphs and for what was seen so far; the same one continues a killed run.

    Raises:
        BadInput: for weights, activations or texts that cannot be used, each named.
        RuntimeError: when a graph breaks a rule of this package: a bug.
    """
    view, options = plan.rewritten(model), plan.options
    structure = structure_of(view.checkpoint, options.context)
    manifest = manifest_of(structure, options, MASK)
    weights = CodedWeights(plan.linears, results, model.dimensions.layers)
    observations = Observations(work / "observed")
    job = _Job(options, manifest, weights, WeightReader(view.checkpoint), observations, frozenset(weights.modules))
    texts = [text_steps(window, manifest) for window in _windows(windows, options, model.vocabulary)]
    parts: list[Part] = []
    ranges: dict[str, dict[str, list[float]]] = {}
    problems = manifest_problems(manifest)
    with atomic_folder(folder) as partial:
        exported = export_parts(view.checkpoint, structure, options)
        for index, graphs in enumerate(exported):
            _observe(job, index, graphs, texts, work / "float", open_part, threads, progress)
            found = _tied(job, index, graphs)
            part, wrong = _part(job, graphs, manifest.parts[index], found, partial)
            parts.append(part)
            problems += wrong
            ranges[part.data] = found.to_dict()
        problems += _hidden_problems(parts)
        if problems:
            raise RuntimeError("\n".join(problems))
        written = replace(manifest, activations=options.activations, parts=tuple(parts))
        (partial / FILE).write_bytes(to_json(written.to_dict()))
        (partial / RANGES).write_bytes(to_json(ranges))
        sides = model.checkpoint.side_files()
        for file, path in sides.items():
            shutil.copyfile(path, partial / (source_card(sides) if file == CARD else file))
        ledger.tensors += _rows(model, job, plan)
        unaccounted = missing_rows(ledger, model.checkpoint.tensors)
        if unaccounted:
            raise RuntimeError(f"no ledger row for {unaccounted}")
        ledger.files = {path.name: sha256(path) for path in sorted(partial.iterdir())}
        ledger.write(partial)
    shutil.rmtree(work / "float", ignore_errors=True)


def _windows(windows: torch.Tensor | None, options: PhoneOptions, vocabulary: int) -> np.ndarray:
    if windows is not None:
        return np.asarray(windows)
    shape = RANDOM_TEXTS, options.prefill + STEPS
    return np.asarray(torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0)))


def _observe(
    job: _Job,
    index: int,
    graphs: PartGraphs,
    texts: Sequence[Sequence[Step]],
    folder: Path,
    open_part: OpenPart,
    threads: int,
    progress: Progress,
) -> None:
    if job.observations.done(index):
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / FILE).write_bytes(to_json(job.manifest.to_dict()))
    copies = {kind: _copy(graph) for kind, graph in graphs.by_kind.items()}
    save_part(folder, graphs.span, copies, job.read.of(graphs))
    observe_part(folder, index, texts, job.observations, open_part, threads, progress)
    shutil.rmtree(folder)


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def _tied(job: _Job, index: int, graphs: PartGraphs) -> Ranges:
    """A part's ranges, one for all tensors that share a grid, and the one that the part before hands over on."""
    ranges = job.observations.ranges(index)
    span_new_entries(graphs.prefill, ranges)
    names = {*ranges.by_name}
    ranges.tie([name for name in group if name in names] for group in tied_tensors(graphs.prefill))
    if not graphs.span.embedding:
        before = job.observations.ranges(index - 1).by_name["hidden_states_out"]
        # The same tensor, seen from both sides.
        ranges.add("hidden_states", before.low, before.high)
    return ranges


def _part(job: _Job, graphs: PartGraphs, part: Part, ranges: Ranges, folder: Path) -> tuple[Part, list[str]]:
    """Writes one part; returns its entry in the manifest, and every rule that its graphs break."""
    tables = {node.input[0] for node in graphs.prefill.graph.node if node.op_type == "Gather"} & graphs.weights.keys()
    coded = [name for name in graphs.weights if name in job.linears]
    scales = {name: job.weights.packed(name)[1] for name in coded}
    table = None
    if job.options.embedding != "float" and tables:
        (name,) = tables
        table = TableGrid.of(name, job.read(graphs.weights[name]), job.options.embedding)
    constants = {}
    for name, weight in graphs.weights.items():
        if name not in scales and name not in tables:
            constants[name] = job.read(weight).numpy()
    spans = ranges.widened(job.options.margin)
    quantized: dict[str, onnx.ModelProto] = {}
    entries: dict[str, Graph] = {}
    for kind in GRAPHS:
        quantized[kind], entries[kind] = quantize_graph(
            graphs.by_kind[kind], part.graph(kind), scales, constants, spans, job.options.activations, table
        )

    def read(name: str) -> np.ndarray:
        source = name.removesuffix(QUANTIZED)
        if source in scales:
            return job.weights.packed(source)[0]
        value = job.read(graphs.weights[source])
        if table is not None and source == table.name:
            return table.codes(value)
        check_finite(name, value)
        return value.numpy()

    save_part(folder, graphs.span, quantized, read)
    written = replace(part, prefill=entries["prefill"], decode=entries["decode"])
    problems = pair_problems(quantized["prefill"], quantized["decode"], graphs.span.name)
    for kind in GRAPHS:
        problems += graph_problems(quantized[kind], entries[kind], job.options.opset, part.norms)
    kind_of_table = job.options.embedding if tables else None
    counts = expected_counts(graphs.prefill, len(coded), kind_of_table, job.options.activations)
    problems += quantized_problems(quantized, written, job.options.activations, counts)
    return written, problems


def _hidden_problems(parts: Sequence[Part]) -> list[str]:
    """Where a part does not take the very codes that the part before it gives."""
    problems = []
    for kind in GRAPHS:
        for before, after in zip(parts, parts[1:], strict=False):
            given, taken = before.graph(kind).outputs[0], after.graph(kind).inputs[0]
            # A float table's rows go over as they are.
            if given.scale is not None and (given.scale, given.zero_point, given.dtype) != (
                taken.scale,
                taken.zero_point,
                taken.dtype,
            ):
                problems.append(f"{after.graph(kind).file}: hidden states are on another grid than {before.data} gives")
    return problems


def _rows(model: OpenedModel, job: _Job, plan: PhonePlan) -> list[TensorRow]:
    """The ledger's row of every source tensor, and of a tied head."""
    rows = []
    how, method = plan.rewrites, plan.spec.method
    changed = "rotated, norms folded" if "rotate" in how else "norms folded" if how else ""
    table = f"{model.family.embedding}.weight"
    for name, info in model.checkpoint.tensors.items():
        dtype = str(info.dtype).removeprefix("torch.")
        if name in job.linears:
            rows.append(
                TensorRow(
                    name, info.shape, dtype, "quantized", (name + QUANTIZED,), changed, _linears(job, name, method)
                )
            )
        elif is_derived(name):
            reason = "old checkpoints store it, models compute it from the configuration"
            rows.append(TensorRow(name, info.shape, dtype, "dropped", (), reason))
        elif name == table:
            coded = job.options.embedding != "float"
            kind = job.options.embedding
            reason = f"the table is {kind} with one scale" if coded else "the table stays in float32"
            stored = name + QUANTIZED if coded else name
            rows.append(
                TensorRow(name, info.shape, dtype, "kept", (stored,), f"{reason}; {changed}" if changed else reason)
            )
        else:
            reason = f"quantised to {job.options.activations} per tensor, as activations are"
            rows.append(
                TensorRow(
                    name, info.shape, dtype, "kept", (name + QUANTIZED,), f"{reason}; {changed}" if changed else reason
                )
            )
    head = f"{model.family.head}.weight"
    if head not in model.checkpoint.tensors:
        linear = model.linears[-1]
        reason = "untied: the embedding table stays under its own name"
        shape = (linear.rows, linear.columns)
        rows.append(TensorRow(head, shape, "", "quantized", (head + QUANTIZED,), reason, _linears(job, head, method)))
    return rows


def _linears(job: _Job, name: str, method: tuple[str, ...]) -> tuple[LinearRow, ...]:
    found, start = [], 0
    for linear in job.weights.modules[name]:
        layer = job.weights.layer(linear.layer)
        fallback = layer.fallbacks.get(linear.name, "")
        used = ("rtn",) if fallback else method
        place = (start, start + linear.rows)
        error = layer.errors[linear.name]
        found.append(LinearRow(linear.name, linear.module, place, used, linear.columns, "none", error, fallback))
        start += linear.rows
    return tuple(found)


def stored_constant(folder: Path, model: onnx.ModelProto, name: str) -> np.ndarray:
    """An initialiser's numbers, wherever they are. Raises BadInput when there is none of that name."""
    tensor = next((t for t in model.graph.initializer if t.name == name), None)
    if tensor is None:
        raise BadInput(f"{folder}: {name}: in none of the graphs")
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return read_external(folder, tensor)
    return np.asarray(onnx.numpy_helper.to_array(tensor))
