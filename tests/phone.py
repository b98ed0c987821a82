"""Float phone graphs of tiny models, and what torch says of the same texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from export.ledger import FILE, Ledger
from export.phone.artifact import PhoneArtifact
from export.phone.float_graphs import write_float
from export.phone.manifest import Manifest
from export.phone.options import PhoneOptions
from models.checkpoint import Checkpoint, Folder
from models.files import sha256
from models.skeleton import load_model
from tests.helpers import ROOT, tiny_checkpoint, tokens

# The window of tiny models is 16: rings wrap around several times in this context.
OPTIONS = PhoneOptions(context=64, prefill=24, embedding="float")
HYBRID = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("llama", {"num_hidden_layers": 1}),
    "qwen2, biases": ("qwen2", {"num_hidden_layers": 1}),
    "qwen3, QK norms": ("qwen3", {"num_hidden_layers": 1}),
    "mistral, sliding": ("mistral", {"num_hidden_layers": 1}),
    "phi3, fused": ("phi3", {"num_hidden_layers": 1}),
    "spark2_5, hybrid": ("spark2_5", HYBRID),
    "spark-tiny": ("", {}),
}


@dataclass(frozen=True)
class FloatGraphs:
    """A model and its float graphs."""

    checkpoint: Checkpoint
    folder: Path
    manifest: Manifest

    @cached_property
    def model(self) -> PreTrainedModel:
        return load_model(self.checkpoint, torch.float32, "eager")

    @torch.no_grad()
    def reference(self, ids: np.ndarray) -> np.ndarray:
        """torch's logits fp32 [n, vocabulary] for int [n], in one pass."""
        logits: np.ndarray = self.model(torch.from_numpy(ids)[None]).logits[0].numpy()
        return logits

    def text(self, length: int, seed: int = 0) -> np.ndarray:
        """Random ids int64 [length]."""
        return np.asarray(tokens(length, seed=seed))


def as_artifact(made: FloatGraphs) -> PhoneArtifact:
    """The float graphs with a ledger, as engines take them."""
    ledger = Ledger(
        source={"name": "source", "files": made.checkpoint.hashes()},
        target={"name": "phone"},
        notes=(),
        tensors=[],
        skipped_files={},
        source_config=made.checkpoint.config,
        dtype="float32",
    )
    ledger.files = {path.name: sha256(path) for path in sorted(made.folder.iterdir()) if path.name != FILE}
    ledger.write(made.folder)
    return PhoneArtifact(made.folder)


Make = Callable[[str], FloatGraphs]


def source(case: str, folder: Path) -> Checkpoint:
    """A case's model."""
    model_type, config = CASES[case]
    if not model_type:
        return Folder(ROOT / "examples" / case)
    return Folder(tiny_checkpoint(folder, model_type, **config))


def maker(factory: pytest.TempPathFactory) -> Make:
    """Exports each case once."""
    made: dict[str, FloatGraphs] = {}

    def make(case: str) -> FloatGraphs:
        if case not in made:
            base = factory.mktemp("phone")
            checkpoint = source(case, base / "source")
            (base / "graphs").mkdir()
            made[case] = FloatGraphs(checkpoint, base / "graphs", write_float(checkpoint, OPTIONS, base / "graphs"))
        return made[case]

    return make
