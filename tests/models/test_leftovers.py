"""What published checkpoints carry besides the model: buffers of older transformers, Mistral's second copy."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from models.checkpoint import Folder
from models.opened import open_model
from tests.helpers import tiny_checkpoint


def test_stored_rotary_buffers_are_accepted_because_models_compute_them(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "llama")
    file = folder / "model.safetensors"
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({**load_file(file), name: torch.ones(16)}, file, metadata={"format": "pt"})
    assert name in open_model(Folder(folder)).checkpoint.tensors


def test_mistrals_consolidated_weights_are_left_out_and_listed(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "mistral")
    save_file({"tok_embeddings.weight": torch.ones(2, 2)}, folder / "consolidated.safetensors")
    checkpoint = Folder(folder)
    assert "tok_embeddings.weight" not in checkpoint.tensors
    assert checkpoint.skipped_files() == {"consolidated.safetensors": "weights in another format"}
