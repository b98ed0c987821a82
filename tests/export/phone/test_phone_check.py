"""Each trap that a phone graph was seen to fall into is told by name, with a graph that has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

from export.phone.check import graph_problems, manifest_problems, pair_problems
from export.phone.files import load_graph, save_part
from export.phone.graph import export_part
from export.phone.ports import manifest_of, spans
from export.phone.structure import structure_of
from tests.phone import OPTIONS, FloatGraphs, Make, source

CASE = "llama, tied"
NORMS = 3


def problems_of(made: FloatGraphs, model: ModelProto) -> list[str]:
    return graph_problems(model, made.manifest.parts[0].prefill, OPTIONS.opset, NORMS)


def opset(model: ModelProto) -> None:
    model.opset_import[0].version = 21


def lost_norm(model: ModelProto) -> None:
    node = next(node for node in model.graph.node if node.op_type == "RMSNormalization")
    node.op_type = "Mul"


def gather_nd(model: ModelProto) -> None:
    next(node for node in model.graph.node if node.op_type == "Gather").op_type = "GatherND"


def scatter_nd(model: ModelProto) -> None:
    next(node for node in model.graph.node if node.op_type == "Concat").op_type = "ScatterND"


def foreign_domain(model: ModelProto) -> None:
    next(node for node in model.graph.node if node.op_type == "MatMul").domain = "com.microsoft"


def tied_head(model: ModelProto) -> None:
    head = next(node for node in model.graph.node if node.name == "lm_head/MatMul_0")
    model.graph.node.append(helper.make_node("Transpose", ["model.embed_tokens.weight"], ["turned"], "turn"))
    head.input[1] = "turned"


def smallest_mask(model: ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.float32([np.finfo(np.float32).min]), "mask"))


def infinite_mask(model: ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.float32([-np.inf]), "mask"))


def symbolic(model: ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "tokens"


def symbolic_inside(model: ModelProto) -> None:
    model.graph.value_info[5].type.tensor_type.shape.dim[0].dim_param = "batch"


def twice(model: ModelProto) -> None:
    model.graph.node[4].output[0] = model.graph.node[3].output[0]


def unknown(model: ModelProto) -> None:
    del model.graph.value_info[5]


def empty(model: ModelProto) -> None:
    model.graph.value_info[5].type.tensor_type.shape.dim[0].dim_value = 0


def stack_trace(model: ModelProto) -> None:
    model.graph.node[3].metadata_props.add(key="pkg.torch.onnx.stack_trace", value="File '/home/somebody/model.py'")


def doc_string(model: ModelProto) -> None:
    model.graph.doc_string = "made by somebody"


def long_ids(model: ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64


@pytest.mark.parametrize(
    ("trap", "message"),
    [
        (opset, "expected opset 23, found {'': 21}"),
        (lost_norm, "expected 3 RMSNormalization operators, found 2"),
        (gather_nd, "1 x GatherND: not an operator"),
        (scatter_nd, "1 x ScatterND: not an operator"),
        (foreign_domain, "1 x com.microsoft.MatMul: not an operator"),
        (tied_head, "turn: transposes the constant model.embed_tokens.weight"),
        (smallest_mask, "mask: holds -3.4028"),
        (infinite_mask, "mask: holds -inf"),
        (symbolic, "input_ids: has a symbolic dimension"),
        (symbolic_inside, "has a symbolic dimension"),
        (twice, ": defined 2 times"),
        (unknown, "has no shape"),
        (empty, "has an empty dimension"),
        (stack_trace, "carries metadata of the machine"),
        (doc_string, "carries metadata of the machine"),
        (
            long_ids,
            "expected ('input_ids', (1, 24), 'int32') as the manifest says, found ('input_ids', (1, 24), 'int64')",
        ),
    ],
)
def test_a_trap_is_told(graphs: Make, trap: Callable[[ModelProto], None], message: str) -> None:
    made = graphs(CASE)
    model = load_graph(made.folder, "prefill.onnx")
    assert problems_of(made, model) == []
    trap(model)
    found = problems_of(made, model)
    assert any(message in problem for problem in found), found


def test_an_older_opset_really_takes_the_norm_apart(tmp_path: Path) -> None:
    checkpoint = source(CASE, tmp_path)
    options = replace(OPTIONS, opset=21, parts=3)
    structure = structure_of(checkpoint, options.context)
    manifest = manifest_of(structure, options, -100)
    # The head alone: its one norm is enough.
    exported = export_part(checkpoint, structure, spans(1, 3)[2], options)
    found = graph_problems(exported.prefill, manifest.parts[2].prefill, 21, manifest.parts[2].norms)
    assert any("expected 1 RMSNormalization operators, found 0" in problem for problem in found), found


@pytest.mark.parametrize("value", [float(np.finfo(np.float32).min), -1e4, -10.0, 0.0])
def test_a_mask_that_costs_steps_or_lets_tokens_through_is_told(graphs: Make, value: float) -> None:
    manifest = graphs(CASE).manifest
    assert manifest_problems(manifest) == []
    assert manifest_problems(replace(manifest, mask_value=value)) == [
        f"mask_value: expected -100 to -50, found {value:g}"
    ]


def test_graphs_that_do_not_share_weights_or_names_are_told(graphs: Make) -> None:
    folder = graphs(CASE).folder
    prefill, decode = (load_graph(folder, f"{kind}.onnx") for kind in ("prefill", "decode"))
    assert pair_problems(prefill, decode, "model") == []
    moved = next(t for t in decode.graph.initializer if t.name == "lm_head.weight")
    next(entry for entry in moved.external_data if entry.key == "offset").value = "64"
    decode.graph.node[4].name = "another"
    found = pair_problems(prefill, decode, "model")
    assert "model: prefill and decode do not share lm_head.weight" in found
    assert any("differ in their nodes" in problem and "another" in problem for problem in found)


def test_weights_of_another_shape_or_dtype_are_not_written(tmp_path: Path, graphs: Make) -> None:
    made = graphs(CASE)
    model = load_graph(made.folder, "prefill.onnx")
    span = spans(1, 1)[0]
    with pytest.raises(RuntimeError, match=r"model.data: lm_head.weight: in 1 of 1 graphs as .* read as"):
        save_part(tmp_path, span, {"prefill": model}, lambda name: np.zeros(3, dtype=np.float32))
