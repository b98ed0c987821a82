"""The other converters that `tests/benchmarks/fidelity.py --peers` compares with: what they write is what is read."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoint import Folder
from models.errors import BadInput
from tests.benchmarks.fidelity import line, run
from tests.benchmarks.fidelity_peers import WORKER, Peers, PeerView
from tests.helpers import tiny_checkpoint, tokens
from tests.runs import project

GROUP = 32


def quantised(python: Path, peer: str, folder: Path) -> tuple[Folder, PeerView]:
    """A tiny model, and what a peer made of it."""
    source = Folder(tiny_checkpoint(folder / "source", "llama", tie_word_embeddings=False))
    save_file({"ids": tokens(8, 64)}, folder / "windows.safetensors")
    # GPTQModel's pool of threads refuses a single one.
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    command = [python, WORKER, "quantise", peer, source.path, folder / "windows.safetensors", str(GROUP), folder / peer]
    subprocess.run(command, check=True, env=environment, cwd=folder, capture_output=True, timeout=600)
    return source, PeerView(source, folder / peer)


def test_the_engines_environment_has_gptqmodel_and_hqq(engines_python: Path) -> None:
    listed = json.loads(subprocess.check_output([engines_python, WORKER, "list"]))
    assert {"GPTQModel", "HQQ"} <= set(listed)


@pytest.mark.parametrize("peer", ["GPTQModel", "HQQ"])
def test_a_peers_linears_are_read_on_a_grid_of_sixteen_levels_near_the_source(
    engines_python: Path, tmp_path: Path, peer: str
) -> None:
    source, view = quantised(engines_python, peer, tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    weight, read = source.read(name).float(), view.read(name).float()
    # Noise of half a step on 4 bits, and no more; the exact weight would not be quantised at all.
    assert 0.02 < float((read - weight).norm() / weight.norm()) < 0.3
    assert max(len(group.unique()) for group in read.view(-1, GROUP)) <= 16
    for kept in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        torch.testing.assert_close(view.read(kept).float(), source.read(kept).float(), rtol=2**-8, atol=0)


def test_groups_that_are_out_of_place_are_refused(engines_python: Path, tmp_path: Path) -> None:
    source, view = quantised(engines_python, "GPTQModel", tmp_path)
    file = view.made.path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.g_idx"] = tensors["model.layers.0.mlp.up_proj.g_idx"].flip(0)
    save_file(tensors, file)
    with pytest.raises(BadInput, match=r"model\.layers\.0\.mlp\.up_proj.*g_idx"):
        PeerView(source, view.made.path)


def test_every_peer_has_a_row_and_one_that_fails_is_named(
    engines_python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibration = {"dataset": {"path": "text", "data_files": "text.txt"}, "samples": 8, "sequence_length": 64}
    target = {"format": "gptq", "group_size": GROUP, "method": "gptq", "lm_head": "keep"}
    yaml = project(tmp_path / "p", targets=[target], calibration=calibration)

    def fails_for_hqq(command: list[str], folder: Path) -> object:
        return run(["false"] if "HQQ" in command else command, folder)

    peers = Peers(tmp_path / "peers", yaml, engines_python.absolute(), GROUP)
    rows = {row["methods"].split()[0]: row for row in peers.rows(("symmetric", "float"), fails_for_hqq)}
    assert set(rows) == {"GPTQModel", "Q4_0", "Q4_K_M"}
    assert "HQQ: not measured: false: ended with exit code 1" in capsys.readouterr().err
    assert rows["GPTQModel"]["bits_per_weight"] == 4 + 20 / GROUP and rows["GPTQModel"]["cpu"] > 0
    assert all(0 < row["kl"] < 1 for row in rows.values())
    assert "GPTQModel 7" in line(rows["GPTQModel"]) and "Q4_0" in line(rows["Q4_0"])
    # Kept, so that nothing runs twice.
    assert [row["methods"] for row in peers.rows(("symmetric",), lambda *_: pytest.fail("ran again"))] == [
        rows[name]["methods"] for name in ("GPTQModel", "Q4_0", "Q4_K_M")
    ]
