"""The ledger: a faithful round trip, refusals of what it cannot read, and split biases of fused projections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from calibrate.grid import Grid
from calibrate.results import QuantizedLayer, Results
from calibrate.search import round_to_nearest
from export.artifact import Artifact, Expansion, write
from export.ledger import FILE, PACKAGES, Ledger, LinearRow, TensorRow, missing_rows
from export.plan import make_plan
from models.checkpoint import TensorInfo
from models.errors import BadInput
from models.families.phi3 import FAMILY
from models.family import Dimensions, find_linears
from tests.helpers import NoFiles
from tests.workshop import Workshop, spec


def ledger(**changes: Any) -> Ledger:
    values: dict[str, Any] = {
        "source": {"name": "x", "files": {}},
        "target": {"name": "t"},
        "notes": ("a note",),
        "tensors": [
            TensorRow("a.weight", (2, 3), "bfloat16", "kept", ("a.weight",), "why"),
            TensorRow(
                "b.weight",
                (4, 32),
                "bfloat16",
                "quantized",
                ("b",),
                linears=(LinearRow("b", "b", (0, 4), ("rtn",), 32, "none", 0.1),),
            ),
        ],
        "skipped_files": {"x.bin": "weights in another format"},
        "source_config": {"model_type": "llama"},
        "dtype": "bfloat16",
    }
    return Ledger(**{**values, **changes})


def test_a_ledger_reads_back_as_it_was_written(tmp_path: Path) -> None:
    original = ledger(validation={"report": {"kl": 0.5}})
    original.write(tmp_path)
    assert Ledger.read(tmp_path) == original


def test_writing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    ledger().write(tmp_path)
    first = (tmp_path / FILE).read_bytes()
    Ledger.read(tmp_path).write(tmp_path)
    assert (tmp_path / FILE).read_bytes() == first


@pytest.mark.parametrize(
    "content, wanted",
    [
        (None, "expected an artifact's ledger, found no such file"),
        ("{", "not a readable ledger"),
        ("[]", "not a readable ledger"),
        ('{"schema": 99}', "schema: expected 1, found 99"),
        ('{"schema": 1}', "not a readable ledger"),
    ],
)
def test_what_is_no_ledger_is_refused(tmp_path: Path, content: str | None, wanted: str) -> None:
    if content is not None:
        (tmp_path / FILE).write_text(content)
    with pytest.raises(BadInput, match=wanted):
        Ledger.read(tmp_path)


def test_an_unknown_key_is_refused(tmp_path: Path) -> None:
    ledger().write(tmp_path)
    data = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**data, "surprise": 1}))
    with pytest.raises(BadInput, match="surprise"):
        Ledger.read(tmp_path)


def test_missing_rows_names_the_tensors_without_one() -> None:
    assert missing_rows(ledger(), ["a.weight", "c.weight", "b.weight"]) == ["c.weight"]


def test_versions_name_python_and_every_package_that_decides_numbers() -> None:
    assert ledger().versions.keys() == {"python", *PACKAGES}


def test_the_hashes_cover_every_file_but_the_ledger(workshop: Workshop) -> None:
    folder = workshop.built("llama-tied", spec()).artifact.folder
    assert Artifact(folder).ledger.files.keys() == {path.name for path in folder.iterdir()} - {FILE}


class Memory(NoFiles):
    """A checkpoint without files: phi3's fused projections, but with biases, as other families have them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = {
            "model.embed_tokens.weight": (64, 64),
            "model.norm.weight": (64,),
            "lm_head.weight": (64, 64),
            "model.layers.0.self_attn.qkv_proj.weight": (128, 64),
            "model.layers.0.self_attn.qkv_proj.bias": (128,),
            "model.layers.0.self_attn.o_proj.weight": (64, 64),
            "model.layers.0.self_attn.o_proj.bias": (64,),
            "model.layers.0.mlp.gate_up_proj.weight": (256, 64),
            "model.layers.0.mlp.down_proj.weight": (64, 128),
        }
        self.name, self.config = "memory", {"model_type": "phi3"}
        self.values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        self.tensors = {name: TensorInfo(torch.float32, shape) for name, shape in shapes.items()}

    def read(self, name: str) -> torch.Tensor:
        return self.values[name]


@pytest.mark.parametrize("fused", [True, False])
def test_a_fused_bias_follows_its_projections(tmp_path: Path, fused: bool) -> None:
    source = Memory()
    linears = find_linears(FAMILY, Dimensions(1, 64, 4, 2, 16), source.tensors)
    plan = make_plan(spec(fused=fused, quantize_head=False), source, FAMILY, linears, torch.bfloat16)
    results = Results(tmp_path / "results")
    found = QuantizedLayer({}, {})
    for linear in plan.linears:
        weight = source.read(f"{linear.module}.weight")[linear.start : linear.stop]
        found.linears[linear.name] = round_to_nearest(weight, Grid(32))
        found.errors[linear.name] = 0.1
    results.save(0, found)
    results.save(1, QuantizedLayer())
    written = ledger(tensors=[], source={"name": "memory", "files": {}})
    write(plan, source, results, 1, tmp_path / "out", written, 2**30)
    artifact = Artifact(tmp_path / "out")
    artifact.check()
    rows = {row.tensor: row for row in artifact.ledger.tensors}
    bias = rows["model.layers.0.self_attn.qkv_proj.bias"]
    assert bias.outcome == ("kept" if fused else "split")
    names = ("qkv_proj",) if fused else ("q_proj", "k_proj", "v_proj")
    assert bias.stored_as == tuple(f"model.layers.0.self_attn.{name}.bias" for name in names)
    expected = source.read("model.layers.0.self_attn.qkv_proj.bias").bfloat16()
    assert torch.equal(Expansion(artifact).read("model.layers.0.self_attn.qkv_proj.bias"), expected)
    assert rows["model.layers.0.self_attn.o_proj.bias"].reason.endswith("cast to bfloat16")
    stored = sum(info.nbytes for info in artifact.files.tensors.values())
    assert plan.quantized_bytes() + plan.kept_bytes(source) == stored
