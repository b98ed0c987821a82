"""What other converters lose and cost on the model, windows and text of `tests/benchmarks/fidelity.py`.

Each peer quantises in a process of its own, in an interpreter that has it (`peer_quantisers.py`), and its checkpoint's
bytes are read and scored as an artifact's are. llama.cpp's types come from its own quantisers.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from calibrate.results import save_tensors
from convert.config import load
from convert.prepare import Prepared, prepare
from export import gptq
from export.layout import raise_problems
from models.checkpoint import Checkpoint, Folder, View
from models.errors import EnvironmentProblem
from tests.permuted import write_copy
from validate.measure import Reference, Settings, measure_reference
from validate.positioning import PEER, lost, position

WORKER = Path(__file__).with_name("peer_quantisers.py")
LLAMA_CPP = ("Q4_0", "Q4_K_M")
BITS = 4


class PeerView(View):
    """A peer's checkpoint, seen as the one that it was made from.

    Raises:
        BadInput: when a packed linear is none of a symmetric grid with groups in place.
    """

    def __init__(self, source: Checkpoint, folder: Path) -> None:
        super().__init__(source)
        self.made, self.name = Folder(folder), folder.name
        self.packing = self.made.config.get("quantization_config", {})
        # Some of what decides how the words are read may be left out, where it has its usual value.
        self.packing = {"checkpoint_format": "gptq", **self.packing}
        raise_problems(
            problem
            for name in self.made.tensors
            if name.endswith(".qweight")
            for problem in gptq.tensor_problems(name, self._packed(name.removesuffix(".qweight")), self.packing)
        )

    def _packed(self, module: str) -> dict[str, torch.Tensor]:
        return {suffix: self.made.read(f"{module}.{suffix}") for suffix in gptq.SUFFIXES}

    def read(self, name: str) -> torch.Tensor:
        module = name.removesuffix(".weight")
        if f"{module}.qweight" in self.made.tensors:
            return gptq.unpack(self._packed(module), self.packing).dequantize(torch.float32)
        return self.made.read(name)


@dataclass(frozen=True)
class Peers:
    """The peers of a benchmark's folder.

    Attributes:
        work: for what they make and the rows.
        pipeline: a pipeline.yaml with the model, the calibration and the validation.
        python: the interpreter that has them.
        group_size: of their grids.
    """

    work: Path
    pipeline: Path
    python: Path
    group_size: int

    def rows(self, kinds: tuple[str, ...], run: Callable[[list[str], Path], Any]) -> Iterator[dict[str, Any]]:
        """A row for each peer that is installed and each type of llama.cpp; kept in ``work``. One that fails is named
        on the standard error.

        Args:
            kinds: of grids that are asked for.
            run: runs a command in a folder, and returns its cost with ``cpu`` and ``memory``; SystemExit
                where it fails.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        prepared = prepare(load(self.pipeline))
        texts = prepared.texts()
        assert texts.calibration is not None and texts.settings is not None
        scored = _Scored(prepared, texts.settings, self.work)
        save_tensors(self.work / "windows.safetensors", {"ids": texts.calibration.ids.contiguous()})
        found = json.loads(subprocess.check_output([self.python, WORKER, "list"]).splitlines()[-1])
        for name, peer in found.items():
            if peer["kind"] in kinds:
                try:
                    yield self._row(name, peer, scored, run)
                except SystemExit as error:
                    print(f"{name}: not measured: {error}", file=sys.stderr)
        for mix in LLAMA_CPP:
            try:
                yield scored.llama_cpp(mix)
            except EnvironmentProblem as error:
                print(f"{PEER}{mix}: not measured: {'; '.join(error.problems)}", file=sys.stderr)

    def _row(
        self, name: str, peer: dict[str, Any], scored: _Scored, run: Callable[[list[str], Path], Any]
    ) -> dict[str, Any]:
        def measure() -> dict[str, Any]:
            source, made = self.work / "source", self.work / name
            if not (source / "config.json").is_file():
                shutil.rmtree(source, ignore_errors=True)
                write_copy(scored.prepared.model, source)
            shutil.rmtree(made, ignore_errors=True)
            # Their own number of threads: GPTQModel's pool refuses a single one.
            command = ["env", "-u", "OMP_NUM_THREADS", str(self.python), str(WORKER), "quantise", name, str(source)]
            command += [str(self.work / "windows.safetensors"), str(self.group_size), str(made)]
            cost = run(command, self.work)
            figures = scored.lost(name, PeerView(scored.prepared.model.checkpoint, made))
            shutil.rmtree(made)
            bits = BITS + peer["group_bits"] / self.group_size
            row = {"kind": peer["kind"], "methods": f"{name} {peer['version']}", "bits_per_weight": bits}
            return {**row, **figures, "cpu": cost.cpu, "memory": cost.memory}

        return _kept(self.work / f"{name}.json", measure)


def _kept(file: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A row that is measured once."""
    if not file.is_file():
        file.write_text(json.dumps(measure()))
    row = json.loads(file.read_text())
    assert isinstance(row, dict)
    return row


class _Scored:
    """The reference, measured once, and what is compared with it."""

    def __init__(self, prepared: Prepared, settings: Settings, work: Path) -> None:
        self.prepared, self.settings, self.work = prepared, settings, work
        cache = work / f"reference-{settings.windows.digest()[:16]}"
        cache.mkdir(exist_ok=True)
        self.reference: Reference = measure_reference(prepared.model.checkpoint, settings, cache, _quiet)

    def lost(self, name: str, view: Checkpoint) -> dict[str, Any]:
        return lost(name, view, self.prepared.model.checkpoint, self.reference, self.settings, _quiet)

    def llama_cpp(self, mix: str) -> dict[str, Any]:
        """A type of llama.cpp's; its cost is not that of a conversion, and is not given."""

        def measure() -> dict[str, Any]:
            row = position(PEER + mix, self.prepared.model, self.reference, self.settings, self.work, _quiet)
            return {"kind": "llama.cpp", "methods": mix, **row}

        return _kept(self.work / f"{mix}.json", measure)


def _quiet(what: str, done: int, total: int) -> None:
    pass
