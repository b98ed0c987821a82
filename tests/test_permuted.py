"""The permuted copy that the fidelity benchmark judges by computes the same function from other weights."""

from __future__ import annotations

from pathlib import Path

import torch

from models.checkpoint import Folder
from models.opened import open_model
from models.skeleton import load_model
from tests.helpers import tiny_checkpoint, tokens
from tests.permuted import permute_channels


@torch.no_grad()
def test_permuted_channels_give_the_same_logits(tmp_path: Path) -> None:
    ids = tokens(2, 40)
    source = open_model(Folder(tiny_checkpoint(tmp_path / "model", "llama")))
    copy = open_model(Folder(permute_channels(source, tmp_path / "copy")))
    expected, found = (load_model(m.checkpoint, torch.float32)(ids).logits for m in (source, copy))
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-3)
    assert copy.checkpoint.side_files().keys() == source.checkpoint.side_files().keys()
    for name in source.checkpoint.tensors:
        if "k_proj" not in name:
            assert not torch.equal(copy.checkpoint.read(name), source.checkpoint.read(name)), name
