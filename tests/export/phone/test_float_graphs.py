"""The exported graphs compute what the model computes, and what is written is what phones take."""

from __future__ import annotations

import getpass
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from export.phone.files import external, load_graph
from export.phone.float_graphs import write_float
from export.phone.manifest import GRAPHS, Manifest
from export.phone.options import PhoneOptions
from export.phone.ports import spans
from export.phone.structure import structure_of
from models.errors import BadInput
from tests.phone import CASES, OPTIONS, Make, source
from tests.runs import content
from validate.engines.workers.phone_host import Host

TOLERANCE = 1e-4


@pytest.mark.parametrize("case", CASES)
def test_prefill_and_decode_give_torchs_logits(graphs: Make, case: str) -> None:
    made = graphs(case)
    host = Host(made.folder)
    ids = made.text(60)
    expected = made.reference(ids)
    assert np.abs(expected).max() > 5
    # Two chunks, the second one padded, then steps.
    assert np.abs(host.score(ids, 20) - expected).max() < TOLERANCE
    # In one pass each, short texts too.
    assert np.abs(host.score(ids[:24], 0) - expected[:24]).max() < TOLERANCE


def test_two_exports_give_the_same_bytes(graphs: Make, tmp_path: Path) -> None:
    made = graphs("spark2_5, hybrid")
    write_float(made.checkpoint, OPTIONS, tmp_path)
    assert content(made.folder) == content(tmp_path)


def test_parts_compute_what_one_graph_computes(graphs: Make, tmp_path: Path) -> None:
    whole = graphs("spark2_5, hybrid")
    manifest = write_float(whole.checkpoint, replace(OPTIONS, parts=4), tmp_path)
    assert [part.layers for part in manifest.parts] == [(0, 0), (0, 1), (1, 2), (2, 2)]
    assert len(list(tmp_path.glob("*.onnx"))) == 8 and len(list(tmp_path.glob("*.data"))) == 4
    ids = whole.text(60)
    assert np.array_equal(Host(tmp_path).score(ids, 20), Host(whole.folder).score(ids, 20))


@pytest.mark.parametrize("case", CASES)
def test_every_weight_is_written_once_and_both_graphs_name_it(graphs: Make, case: str) -> None:
    made = graphs(case)
    places = []
    for kind in GRAPHS:
        model = load_graph(made.folder, f"{kind}.onnx")
        places.append({t.name: {e.key: e.value for e in t.external_data} for t in external(model)})
        assert sum(len(t.raw_data) for t in model.graph.initializer) < 2000
    assert places[0] == places[1]
    sizes = sum(int(place["length"]) for place in places[0].values())
    assert sizes <= (made.folder / "model.data").stat().st_size < sizes + 4096 * len(places[0])


def test_names_in_the_graph_are_the_models(graphs: Make) -> None:
    made = graphs("spark2_5, hybrid")
    model = load_graph(made.folder, "prefill.onnx")
    stored = {tensor.name for tensor in external(model)}
    # The tied head has weights of its own: it is quantised otherwise than the table.
    assert stored == {*made.checkpoint.tensors, "lm_head.weight"}
    names = {node.name for node in model.graph.node}
    assert {"model.layers.0.mlp.up_proj/MatMul_0", "model.norm/RMSNormalization_0", "lm_head/MatMul_0"} <= names


def test_nothing_of_the_exporting_machine_is_in_the_files(graphs: Make) -> None:
    made = graphs("phi3, fused")
    for file in ("prefill.onnx", "decode.onnx", "manifest.json"):
        text = (made.folder / file).read_bytes()
        for trace in (rb"site-packages", rb"\.py\b", rb"Traceback", rb"/home", rb"torch", b"stack"):
            assert not re.search(trace, text), (file, trace)
        for word in (str(made.folder), str(Path.home()), str(Path.cwd())):
            assert word == "/" or word.encode() not in text, (file, word)
    assert getpass.getuser().encode() not in (made.folder / "manifest.json").read_bytes()


def test_the_manifest_reads_back_as_it_was_written(graphs: Make) -> None:
    made = graphs("spark2_5, hybrid")
    assert Manifest.read(made.folder) == made.manifest
    caches = made.manifest.caches
    assert (caches["sliding_attention"].kind, caches["sliding_attention"].slots) == ("ring", 15)
    assert (caches["full_attention"].kind, caches["full_attention"].slots) == ("full", 64)
    # A quarter of the full layers' 32 dims is rotated, all of the sliding ones'.
    frequencies = {type: len(rotary.inverse_frequencies) for type, rotary in made.manifest.rotary.items()}
    assert frequencies == {"sliding_attention": 16, "full_attention": 4}


def test_a_window_that_the_context_does_not_reach_needs_no_ring(tmp_path: Path) -> None:
    structure = structure_of(source("mistral, sliding", tmp_path), 16)
    (cache,) = structure.caches.values()
    assert (cache.kind, cache.slots, cache.window) == ("full", 16, None)


def test_tanh_takes_the_place_of_the_exact_gelu_where_asked(tmp_path: Path) -> None:
    checkpoint = source("spark2_5, hybrid", tmp_path / "source")
    write_float(checkpoint, PhoneOptions(context=64, prefill=8, gelu="tanh", parts=3), tmp_path)
    model = load_graph(tmp_path, "prefill-1.onnx")
    kinds = [a.s for node in model.graph.node if node.op_type == "Gelu" for a in node.attribute]
    assert kinds == [b"tanh", b"tanh"]


@pytest.mark.parametrize("parts", [0, 2, 31])
def test_a_number_of_parts_that_cannot_be_is_refused(parts: int) -> None:
    with pytest.raises(BadInput, match="expected at least 3"):
        spans(28, parts)


def test_spans_follow_each_other_without_a_gap() -> None:
    found = spans(28, 6)
    assert [(span.start, span.stop) for span in found] == [(0, 0), (0, 7), (7, 14), (14, 21), (21, 28), (28, 28)]
    assert [span.embedding for span in found] == [True, *[False] * 5]
    assert [span.head for span in found] == [*[False] * 5, True]
