"""Phone artifacts of tiny models, each written once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from calibrate.quantize import quantize
from calibrate.results import Results
from export.ledger import Ledger
from export.phone.artifact import PhoneArtifact
from export.phone.files import load_graph
from export.phone.manifest import GRAPHS
from export.phone.options import PhoneOptions
from export.phone.plan import PhoneSpec, make_phone_plan
from export.phone.write import write
from models.checkpoint import Folder
from models.opened import OpenedModel, open_model
from models.skeleton import load_model
from tests.helpers import tiny_checkpoint, tokens
from tests.phone import HYBRID
from validate.engines.workers.phone_host import PartDriver

OPTIONS = PhoneOptions(context=64, prefill=16, embedding="float")
METHOD = ("rotate", "search")
CASES = {
    "llama, tied": ("llama", {"num_hidden_layers": 2}),
    "qwen2, biases": ("qwen2", {"num_hidden_layers": 1}),
    "phi3, fused": ("phi3", {"num_hidden_layers": 1}),
    "spark2_5, hybrid": ("spark2_5", HYBRID),
}
WINDOWS = tokens(4, 48, seed=5)


@dataclass(frozen=True)
class Written:
    """An artifact and the model that it was made from."""

    model: OpenedModel
    artifact: PhoneArtifact


def written(
    model: OpenedModel,
    folder: Path,
    options: PhoneOptions = OPTIONS,
    method: tuple[str, ...] = METHOD,
    windows: torch.Tensor | None = WINDOWS,
) -> PhoneArtifact:
    plan = make_phone_plan(PhoneSpec(name="phone", method=method, options=options), model)
    view = plan.rewritten(model)
    results = Results(folder / "results" / "-".join(method))
    quantize(view.checkpoint, view.linears, plan.recipe, windows, results)
    ledger = Ledger(
        source={"name": "source", "files": model.checkpoint.hashes()},
        target={"name": "phone"},
        notes=(),
        tensors=[],
        skipped_files={},
        source_config=model.checkpoint.config,
        dtype="bfloat16",
    )
    out = folder / "phone"
    write(plan, model, results, windows, out, ledger, folder / "work", PartDriver)
    return PhoneArtifact(out)


@torch.no_grad()
def reference(model: OpenedModel, ids: np.ndarray) -> np.ndarray:
    logits: np.ndarray = load_model(model.checkpoint, torch.float32)(torch.from_numpy(ids)[None]).logits[0].numpy()
    return logits


def decibels(expected: np.ndarray, found: np.ndarray) -> float:
    return float(10 * np.log10(np.square(expected).sum() / np.square(expected - found).sum()))


def copied(artifact: PhoneArtifact, folder: Path) -> PhoneArtifact:
    shutil.copytree(artifact.folder, folder)
    return PhoneArtifact(folder)


def graphs(artifact: PhoneArtifact) -> dict[str, onnx.ModelProto]:
    (part,) = artifact.manifest.parts
    return {kind: load_graph(artifact.folder, part.graph(kind).file) for kind in GRAPHS}


def initializer(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


Make = Callable[[str], Written]


def builder(factory: pytest.TempPathFactory) -> Make:
    """Writes each case once."""
    made: dict[str, Written] = {}

    def get(case: str) -> Written:
        if case not in made:
            base = factory.mktemp("phone")
            model_type, config = CASES[case]
            model = open_model(Folder(tiny_checkpoint(base / "source", model_type, **config)))
            made[case] = Written(model, written(model, base))
        return made[case]

    return get
