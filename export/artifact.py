"""Artifacts: a checkpoint folder in one layout with its ledger, written in a stream, checked, and read back as bf16."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch

from calibrate.grid import Quantized, check_finite, concatenate
from calibrate.results import QuantizedLayer, Results
from calibrate.rewrite import Rewritten
from export.layout import Layout
from export.layouts import layout_of
from export.ledger import FILE as LEDGER
from export.ledger import Ledger, LinearRow, TensorRow, missing_rows
from export.plan import Module, TargetPlan
from models.checkpoint import Checkpoint, Folder, TensorInfo, Writer
from models.errors import BadInput
from models.files import atomic_folder, sha256, to_json
from models.skeleton import is_derived

# Written when the artifact is published, so that no file whose hash the ledger holds changes then.
CARD = "README.md"


def write(
    plan: TargetPlan,
    checkpoint: Checkpoint,
    results: Results,
    layers: int,
    folder: Path,
    ledger: Ledger,
    shard_bytes: int,
) -> None:
    """Writes an artifact; it appears under ``folder`` only when it is whole.

    Args:
        checkpoint: what was quantised: the source, or a view of it in other weights.
        results: the quantised layers, ``layers`` of them and then the head.
        ledger: filled with a row for every source tensor and the hashes of the artifact's files.

    Raises:
        BadInput: when the layout cannot hold a linear, or a kept tensor is not finite.
        RuntimeError: when a source tensor would get no row: a bug, not bad input.
    """
    layout = layout_of(plan.spec.format)
    with atomic_folder(folder) as partial:
        emit = _Emitter(plan, checkpoint, results, layers, layout, Writer(partial, shard_bytes))
        for name in _in_order(checkpoint, plan):
            ledger.tensors.append(emit.tensor(name))
        if plan.tied:
            ledger.tensors += emit.tied_head()
        ledger.links = [row for index in range(layers + 1) for row in _links(results, index)]
        ledger.notes += _fallback_notes(ledger) + _link_notes(ledger)
        unaccounted = missing_rows(ledger, checkpoint.tensors)
        if unaccounted:
            raise RuntimeError(f"no ledger row for {unaccounted}")
        emit.writer.finish()
        config = _config(plan, checkpoint, layout)
        (partial / "config.json").write_bytes(to_json(config))
        for file, content in layout.extra_files(config["quantization_config"]).items():
            (partial / file).write_bytes(to_json(content))
        sides = checkpoint.side_files()
        for file, path in sides.items():
            shutil.copyfile(path, partial / (source_card(sides) if file == CARD else file))
        ledger.files = {path.name: sha256(path) for path in sorted(partial.iterdir())}
        ledger.write(partial)


def source_card(files: Container[str]) -> str:
    """The name that the source's model card has among an artifact's files: README.md is the artifact's own card's."""
    name = "README.source.md"
    while name in files:
        # The source was made in the same way.
        name = name.replace(".md", ".source.md")
    return name


def _in_order(checkpoint: Checkpoint, plan: TargetPlan) -> list[str]:
    """Tensors in the order of computation where the plan knows it, so that each layer's results are read once."""
    position = {f"{module.source}.": index for index, module in enumerate(plan.quantized)}
    names = sorted(checkpoint.tensors, key=_natural)
    rank = {name: position.get(name.rpartition(".")[0] + ".", -1) for name in names}
    return sorted(names, key=lambda name: rank[name])


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


class _Emitter:
    """Turns source tensors into stored tensors and ledger rows."""

    def __init__(
        self,
        plan: TargetPlan,
        checkpoint: Checkpoint,
        results: Results,
        layers: int,
        layout: Layout,
        writer: Writer,
    ) -> None:
        self.plan, self.checkpoint, self.results, self.layers = plan, checkpoint, results, layers
        self.layout, self.writer = layout, writer
        self.modules: dict[str, list[Module]] = {}
        for module in plan.quantized:
            self.modules.setdefault(module.source, []).append(module)
        self.kept = dict(plan.kept)
        self.skipped: Counter[str] = Counter()
        for linear in plan.skipped:
            self.skipped[linear.module] += linear.weights
        # Of unquantised tensors that calibration changed: the layer that holds the new value, and what changed it.
        self.changed = {
            name: (index, reason) for index in range(layers + 1) for name, reason in results.changes(index).items()
        }
        self._loaded: tuple[int, QuantizedLayer] | None = None

    def tensor(self, name: str) -> TensorRow:
        info = self.checkpoint.tensors[name]
        module, _, leaf = name.rpartition(".")
        modules = self.modules.get(module, [])
        dtype = str(info.dtype).removeprefix("torch.")
        if modules and leaf == "weight":
            rows = tuple(row for m in modules for row in self._quantized(m))
            if sum(m.rows for m in modules) != info.shape[0]:
                raise RuntimeError(f"{name}: only some of its output channels are planned")
            stored = tuple(m.name for m in modules)
            return TensorRow(name, info.shape, dtype, "quantized", stored, "; ".join(self._rewrites(name)), rows)
        if modules and modules[0].name != module:
            return self._split_bias(name, info, dtype, modules)
        if is_derived(name):
            reason = "old checkpoints store it, models compute it from the configuration"
            return TensorRow(name, info.shape, dtype, "dropped", (), reason)
        return self._keep(name, info, dtype, module)

    def _quantized(self, module: Module) -> list[LinearRow]:
        layer = self._layer(module.linears[0].layer)
        parts = [layer.linears[linear.name] for linear in module.linears]
        quantized = concatenate(parts)
        for suffix, tensor in self.layout.pack(quantized, self.plan.options).items():
            self.writer.add(f"{module.name}.{suffix}", tensor)
        rows, start = [], 0
        for linear in module.linears:
            grid = self.plan.grid(linear.columns)
            where = (start, start + linear.rows)
            error = layer.errors[linear.name]
            fallback = layer.fallbacks.get(linear.name, "")
            method = ("rtn",) if fallback else self.plan.spec.method
            row = LinearRow(linear.name, module.name, where, method, grid.group_size, grid.zero, error, fallback)
            rows.append(row)
            start += linear.rows
        return rows

    def _split_bias(self, name: str, info: TensorInfo, dtype: str, modules: list[Module]) -> TensorRow:
        value = self._read(name)
        leaf = name.rpartition(".")[2]
        stored = []
        for module in modules:
            for linear in module.linears:
                stored.append(f"{module.name}.{leaf}")
                self.writer.add(stored[-1], value[linear.start : linear.stop].clone())
        changes = [self.changed[name][1]] if name in self.changed else []
        return TensorRow(name, info.shape, dtype, "split", tuple(stored), "; ".join([*self._rewrites(name), *changes]))

    def _keep(self, name: str, info: TensorInfo, dtype: str, module: str) -> TensorRow:
        value = self._read(name)
        reason = "; ".join([self.kept.get(module, "not a linear that is quantised"), *self._rewrites(name)])
        if name in self.changed:
            reason += f"; {self.changed[name][1]}"
        if value.dtype != info.dtype:
            reason += f"; cast to {str(self.plan.dtype).removeprefix('torch.')}"
        self.writer.add(name, value)
        skipped = self.skipped[module] if name == f"{module}.weight" else 0
        return TensorRow(name, info.shape, dtype, "kept", (name,), reason, skipped=skipped)

    def _rewrites(self, name: str) -> tuple[str, ...]:
        return self.checkpoint.rewrites(name) if isinstance(self.checkpoint, Rewritten) else ()

    def _read(self, name: str) -> torch.Tensor:
        """A tensor as it is kept; the cast to the artifact's dtype must not make an infinity either."""
        if name in self.changed:
            value = self.results.read_changed(self.changed[name][0], name)
        else:
            value = self.checkpoint.read(name)
        if value.is_floating_point():
            value = value.to(self.plan.dtype)
            check_finite(f"{self.checkpoint.name}: {name} in {self.plan.dtype}".replace("torch.", ""), value)
        return value

    def tied_head(self) -> list[TensorRow]:
        """A tied head has no tensor of its own in the source; its row says what became of it all the same."""
        head = next((m for m in self.plan.quantized if m.linears[0].layer is None), None)
        if head is None:
            name, skipped = self.plan.head, self.skipped[self.plan.head]
            return [TensorRow(f"{name}.weight", (), "", "tied", (), self.kept[name], skipped=skipped)]
        linear = head.linears[0]
        reason = "untied: the embedding table stays in its dtype under its own name"
        return [
            TensorRow(
                f"{head.source}.weight",
                (linear.rows, linear.columns),
                "",
                "quantized",
                (head.name,),
                reason,
                tuple(self._quantized(head)),
            )
        ]

    def _layer(self, index: int | None) -> QuantizedLayer:
        index = self.layers if index is None else index
        if self._loaded is None or self._loaded[0] != index:
            self._loaded = (index, self.results.load(index))
        return self._loaded[1]


def _fallback_notes(ledger: Ledger) -> tuple[str, ...]:
    linears = [linear for row in ledger.tensors for linear in row.linears]
    fallen = [linear.linear for linear in linears if linear.reason]
    if not fallen:
        return ()
    named = ", ".join(fallen[:3]) + (" ..." if len(fallen) > 3 else "")
    return (f"{len(fallen)} of {len(linears)} linears rounded to nearest, which came to a smaller error: {named}",)


def _links(results: Results, index: int) -> list[dict[str, Any]]:
    return [{"writer": writer, **words} for writer, words in results.links(index).items()]


def _link_notes(ledger: Ledger) -> tuple[str, ...]:
    if not ledger.links:
        return ()
    taken = sum(link["accepted"] for link in ledger.links)
    return (f"awq: channels of {taken} of {len(ledger.links)} links rescaled, where the measured error fell",)


def _config(plan: TargetPlan, checkpoint: Checkpoint, layout: Layout) -> dict[str, Any]:
    config = {k: v for k, v in checkpoint.config.items() if k not in ("torch_dtype", "quantization_config")}
    config["dtype"] = str(plan.dtype).removeprefix("torch.")
    if plan.options.lm_head or not plan.tied:
        # The artifact stores a head of its own: an engine that ties would drop it.
        config["tie_word_embeddings"] = False
    config["quantization_config"] = layout.quantization_config(plan.options)
    return config


class Artifact:
    """An artifact opened from its bytes.

    Raises:
        BadInput: when the folder is not a whole artifact: everything that is wrong, each tensor named.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = Ledger.read(folder)
        self.files = Folder(folder)
        self.config = self.files.config.get("quantization_config") or {}
        try:
            self.layout = layout_of(str(self.config.get("quant_method")))
        except BadInput as error:
            where = f"{folder / 'config.json'}: quantization_config.quant_method"
            raise BadInput(f"{where}: {problem}" for problem in error.problems) from error
        self.dtype: torch.dtype = getattr(torch, self.ledger.dtype)

    @property
    def format(self) -> str:
        """The layout's name."""
        return self.layout.FORMAT

    @property
    def model_config(self) -> dict[str, Any]:
        """The model's configuration."""
        return self.files.config

    @property
    def weight_files(self) -> list[Path]:
        return self.files.weight_files

    @property
    def modules(self) -> list[str]:
        """Full names of the stored quantised modules."""
        return list(dict.fromkeys(linear.module for row in self.ledger.tensors for linear in row.linears))

    def tensors(self, module: str) -> dict[str, torch.Tensor]:
        """The stored tensors of a quantised module, by suffix."""
        names = {suffix: f"{module}.{suffix}" for suffix in self.layout.SUFFIXES}
        return {suffix: self.files.read(name) for suffix, name in names.items() if name in self.files.tensors}

    def quantized(self, module: str) -> Quantized:
        """A module's codes and scales, from the bytes. Raises BadInput when they break the layout's rules."""
        tensors = self.tensors(module)
        problems = self.layout.tensor_problems(module, tensors, self.config)
        if problems:
            raise BadInput(f"{self.folder}: {problem}" for problem in problems)
        return self.layout.unpack(tensors, self.config)

    def check(self) -> None:
        """Raises BadInput listing every file, tensor and value that is not as the ledger and the layout say."""
        problems = self.ledger.file_problems(self.folder)
        stored = {f"{module}.{suffix}" for module in self.modules for suffix in self.layout.SUFFIXES}
        for row in self.ledger.tensors:
            stored |= set(row.stored_as)
            if row.outcome in ("kept", "split"):
                problems += [f"{name}: missing" for name in row.stored_as if name not in self.files.tensors]
        problems += [f"{name}: no row in the ledger" for name in self.files.tensors if name not in stored]
        for module in self.modules:
            problems += self.layout.tensor_problems(module, self.tensors(module), self.config)
        if problems:
            # What is wrong with the configuration is wrong with every module.
            raise BadInput(f"{self.folder}: {problem}" for problem in dict.fromkeys(problems))

    @property
    def bits_per_weight(self) -> float:
        """Bits of codes, scales and zeros, and of the linears that were skipped, on the mean over all their weights."""
        bits, weights = 0.0, 0
        for row in self.ledger.tensors:
            bits += row.skipped * torch.finfo(self.dtype).bits
            weights += row.skipped
            for linear in row.linears:
                count = (linear.rows[1] - linear.rows[0]) * row.shape[1]
                scale_bits = torch.finfo(self.dtype).bits
                zero_bits = {"none": 0, "float": scale_bits, "integer": 4}[linear.zero]
                bits += count * (4 + (scale_bits + zero_bits) / linear.group_size)
                weights += count
        return bits / max(1, weights)


class Expansion(Checkpoint):
    """An artifact seen as the source's checkpoint: quantised linears are dequantised when they are read."""

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self.name = str(artifact.folder)
        self._rows = {row.tensor: row for row in artifact.ledger.tensors if row.outcome not in ("tied", "dropped")}
        kept = ("quantization_config",)
        self.config = {k: v for k, v in artifact.files.config.items() if k not in kept}
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(artifact.dtype if _is_float(row) else getattr(torch, row.dtype), row.shape)
            for name, row in self._rows.items()
        }

    def read(self, name: str) -> torch.Tensor:
        row = self._rows[name]
        if row.outcome == "kept":
            return self.artifact.files.read(row.stored_as[0])
        if row.outcome == "split":
            return torch.cat([self.artifact.files.read(part) for part in row.stored_as])
        modules = [self.artifact.quantized(module) for module in row.stored_as]
        return torch.cat([module.dequantize(self.artifact.dtype) for module in modules])

    def side_files(self) -> dict[str, Path]:
        return self.artifact.files.side_files()

    def skipped_files(self) -> dict[str, str]:
        return self.artifact.files.skipped_files()

    def hashes(self) -> dict[str, str]:
        return dict(self.artifact.ledger.files)


def _is_float(row: TensorRow) -> bool:
    return row.dtype == "" or getattr(torch, row.dtype).is_floating_point


def is_artifact(folder: Path) -> bool:
    """Whether a folder holds an artifact of this project, whole or damaged."""
    return (folder / LEDGER).is_file()
