"""Quantised tiny models, each made once: the sources, plans and artifacts that the tests of several folders share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from calibrate.quantize import quantize
from calibrate.results import Results
from export.artifact import Artifact, write
from export.ledger import Ledger
from export.plan import TargetPlan, TargetSpec, make_plan
from models.checkpoint import Folder
from models.opened import OpenedModel, open_model
from tests.helpers import tiny_checkpoint

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("llama", {}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "qwen2-biases": ("qwen2", {}),
    "phi3": ("phi3", {}),
    "spark2_5": ("spark2_5", {"num_hidden_layers": 2}),
}
FUSED = ("phi3", "spark2_5")
FORMATS = {"gptq": "none", "awq": "integer", "tinygemm": "float"}


def layouts() -> list[tuple[str, str, bool | None, bool]]:
    """Every (case, format, fused, quantised head) that can be written."""
    return [
        (case, format, fused, head)
        for case in CASES
        for format in FORMATS
        for fused in ((False, True) if case in FUSED else (None,))
        for head in (True, False)
    ]


def spec(format: str = "gptq", **changes: Any) -> TargetSpec:
    """A target in small groups, quantised from the weights alone."""
    values: dict[str, Any] = {
        "name": format,
        "format": format,
        "group_size": 32,
        "zero": FORMATS[format],
        "method": ("rtn",),
        "quantize_head": True,
        "isa": "avx2" if format == "tinygemm" else "",
    }
    return TargetSpec(**{**values, **changes})


@dataclass(frozen=True)
class Built:
    """An artifact with everything that it was made from."""

    model: OpenedModel
    plan: TargetPlan
    results: Results
    artifact: Artifact


class Workshop:
    """A folder of sources, results and artifacts; nothing is made twice."""

    def __init__(self, folder: Path, cases: Mapping[str, tuple[str, dict[str, Any]]] = CASES) -> None:
        self.folder = folder
        self.cases = cases
        self._models: dict[str, OpenedModel] = {}
        self._built: dict[str, Built] = {}

    def model(self, case: str) -> OpenedModel:
        """A case's source, opened."""
        if case not in self._models:
            model_type, config = self.cases[case]
            path = tiny_checkpoint(self.folder / case, model_type, **config)
            (path / "LICENSE").write_text("a licence\n")
            self._models[case] = open_model(Folder(path))
        return self._models[case]

    def plan(self, case: str, target: TargetSpec) -> TargetPlan:
        """A target's plan for a case."""
        model = self.model(case)
        return make_plan(target, model.checkpoint, model.family, model.linears, torch.bfloat16)

    def results(self, case: str, plan: TargetPlan) -> Results:
        """The quantised layers, shared by all targets with the same recipe."""
        model = self.model(case)
        results = Results(self.folder / "results" / case / _name(repr(plan.recipe)))
        quantize(model.checkpoint, model.linears, plan.recipe, None, results)
        return results

    def built(self, case: str, target: TargetSpec, shard_bytes: int = 2**30) -> Built:
        """A written artifact; it is shared, so tests that change its files copy it first (see `copied`)."""
        key = _name(f"{case} {target} {shard_bytes}")
        if key not in self._built:
            plan = self.plan(case, target)
            results = self.results(case, plan)
            folder = self.folder / "artifacts" / key / target.name
            self.write(case, plan, results, folder, shard_bytes)
            self._built[key] = Built(self.model(case), plan, results, Artifact(folder))
        return self._built[key]

    def write(self, case: str, plan: TargetPlan, results: Results, folder: Path, shard_bytes: int = 2**30) -> None:
        """Writes an artifact into ``folder``."""
        model = self.model(case)
        ledger = Ledger(
            source={"name": case, "files": model.checkpoint.hashes()},
            target=asdict(plan.spec),
            notes=plan.notes,
            tensors=[],
            skipped_files=model.checkpoint.skipped_files(),
            source_config=model.checkpoint.config,
            dtype="bfloat16",
        )
        write(plan, model.checkpoint, results, model.dimensions.layers, folder, ledger, shard_bytes)


def _name(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:16]
