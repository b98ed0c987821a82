"""Every trap of quantising a graph is seen, and no artifact that walked into one is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import export.phone.check
import export.phone.files
import export.phone.quantize
import export.phone.write
from calibrate.ranges import Range, Ranges
from export.phone.artifact import PhoneArtifact
from export.phone.check import graph_problems
from export.phone.files import load_graph
from export.phone.manifest import Graph, Manifest
from export.phone.options import MARGIN
from export.phone.quantized import Counts, quantized_problems
from export.phone.write import RANGES
from models.errors import BadInput
from models.files import sha256
from tests.helpers import tokens
from tests.phone_written import (
    OPTIONS,
    Make,
    copied,
    decibels,
    graphs,
    initializer,
    written,
)
from validate.engines.workers.phone_host import Host


def problems(artifact: PhoneArtifact, models: dict[str, onnx.ModelProto], manifest: Manifest | None = None) -> str:
    (part,) = (manifest or artifact.manifest).parts
    return "\n".join(quantized_problems(models, part, "uint16"))


def test_an_intact_pair_breaks_no_rule(make: Make) -> None:
    artifact = make("llama, tied").artifact
    assert problems(artifact, graphs(artifact)) == ""


def test_a_product_with_one_scale_for_all_channels_is_seen(make: Make) -> None:
    """`get_qnn_qdq_config(per_channel=True)` silently makes a MatMul per tensor."""
    artifact = make("llama, tied").artifact
    models = graphs(artifact)
    name = "model.layers.0.mlp.down_proj.weight"
    for model in models.values():
        initializer(model, name + "_scale").CopyFrom(
            numpy_helper.from_array(np.array(0.1, dtype=np.float32), name + "_scale")
        )
    assert f"{name}: expected a scale for each of 128 output channels, found []" in problems(artifact, models)


def test_a_head_in_float_is_seen(make: Make) -> None:
    """A tied head exports as a transposed table, which misses int8."""
    artifact = make("llama, tied").artifact
    models = graphs(artifact)
    for model in models.values():
        node = next(node for node in model.graph.node if "lm_head.weight" in node.output)
        model.graph.node.remove(node)
        model.graph.initializer.append(
            numpy_helper.from_array(np.zeros((128, 512), dtype=np.float32), "lm_head.weight")
        )
    assert "lm_head.weight is a float weight" in problems(artifact, models)


def test_cache_entries_on_two_grids_are_seen(make: Make) -> None:
    artifact = make("llama, tied").artifact
    (part,) = artifact.manifest.parts
    outputs = tuple(
        replace(port, scale=port.scale * 1.01) if port.name == "new_value_1" and port.scale else port
        for port in part.prefill.outputs
    )
    other = replace(artifact.manifest, parts=(replace(part, prefill=replace(part.prefill, outputs=outputs)),))
    found = problems(artifact, graphs(artifact), other)
    assert "past_value_1, new_value_1: expected one grid" in found and "new_value_1: on (" in found


def test_graphs_with_different_scales_are_seen(make: Make) -> None:
    artifact = make("llama, tied").artifact
    models = graphs(artifact)
    name = next(t.name for t in models["decode"].graph.initializer if t.name.endswith("Softmax_0:0_scale"))
    initializer(models["decode"], name).CopyFrom(numpy_helper.from_array(np.array(0.5, dtype=np.float32), name))
    assert "in prefill" in problems(artifact, models) and "Softmax_0:0" in problems(artifact, models)


def test_a_product_of_unsigned_activations_is_seen(make: Make) -> None:
    """Qualcomm's HTP takes its right side in 8 bits: 41 dB of 84 are left."""
    artifact = make("llama, tied").artifact
    models = graphs(artifact)
    name = next(t.name for t in models["decode"].graph.initializer if t.name.endswith("Softmax_0:0_zero_point_convert"))
    for model in models.values():
        initializer(model, name).CopyFrom(numpy_helper.from_array(np.array(7, dtype=np.int16), name))
        cache = initializer(model, "past_value_0_zero_point")
        cache.CopyFrom(numpy_helper.from_array(np.array(0, dtype=np.uint16), cache.name))
    found = problems(artifact, models)
    assert (
        "MatMul_1: reads model.layers.0.self_attn/Softmax_0:0_convert_QuantizeLinear_Output as int16 around 7" in found
    )
    assert "reads past_value_0 as uint16 around 0: expected int16 around 0" in found


def test_no_artifact_with_a_product_of_unsigned_activations_is_written(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export.phone.quantize, "signed_overrides", lambda *_: {})
    with pytest.raises(
        RuntimeError, match=r"self_attn/MatMul_0: reads .* as uint16 around \d+: expected int16 around 0"
    ):
        written(make("llama, tied").model, tmp_path)
    assert not (tmp_path / "phone").exists()


def test_no_artifact_that_breaks_a_rule_is_written(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rule is asserted while the artifact is written, on the very graphs that are."""
    whole = export.phone.write.quantize_graph

    def broken(model: onnx.ModelProto, entry: Graph, *rest: Any) -> tuple[onnx.ModelProto, Graph]:
        made, ports = whole(model, entry, *rest)
        norm = initializer(made, "model.norm.weight_quantized")
        norm.CopyFrom(numpy_helper.from_array(np.zeros(128, dtype=np.int8), norm.name))
        made.graph.value_info[0].type.tensor_type.shape.dim[0].dim_param = "batch"
        nodes = {node.op_type: node for node in made.graph.node}
        nodes["Sigmoid"].op_type = "Sinh"
        nodes["RMSNormalization"].op_type = "Mul"
        if entry.file == "decode.onnx":
            name = next(t.name for t in made.graph.initializer if t.name.endswith("Softmax_0:0_scale"))
            initializer(made, name).CopyFrom(numpy_helper.from_array(np.array(0.5, dtype=np.float32), name))
        return made, ports

    monkeypatch.setattr(export.phone.write, "quantize_graph", broken)
    with pytest.raises(RuntimeError) as told:
        written(make("llama, tied").model, tmp_path)
    for rule in (
        "prefill.onnx: 1 x Sinh: not an operator that phones were seen to run",
        "prefill.onnx: expected 5 RMSNormalization operators, found 4",
        "has a symbolic dimension",
        "prefill.onnx: expected 15 constants in int8 codes, found 16",
        "decode.onnx: expected 7 constants in uint16 codes, found 6",
        "in prefill, ",
    ):
        assert rule in str(told.value)
    assert not (tmp_path / "phone").exists()


def test_a_graph_that_no_protobuf_message_holds_is_refused(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = make("llama, tied").artifact
    (part,) = artifact.manifest.parts
    monkeypatch.setattr(export.phone.check, "PROTOBUF_LIMIT", 1000)
    model = graphs(artifact)["decode"]
    found = graph_problems(model, part.decode, OPTIONS.opset, part.norms)
    assert found == [f"decode.onnx: {model.ByteSize()} bytes; a protobuf message holds less than 2 GB"]
    monkeypatch.setattr(export.phone.files, "PROTOBUF_LIMIT", 1000)
    with pytest.raises(BadInput, match=r"prefill.onnx: \d+ bytes without its weights; .* holds 2 GB: split"):
        written(make("llama, tied").model, tmp_path)
    assert not (tmp_path / "phone").exists()


def test_constants_of_codes_are_counted(make: Make) -> None:
    """A weight that stays in float, or is there twice, is seen whatever reads it."""
    artifact = make("llama, tied").artifact
    models = graphs(artifact)
    (part,) = artifact.manifest.parts
    # In each layer seven linears, two norms and a factor of the queries; the head and its norm.
    held = Counts(2 * 7 + 1, {"int8": 2 * 7 + 1, "uint16": 2 * 3 + 1})
    assert quantized_problems(models, part, "uint16", held) == []
    for model in models.values():
        norm = initializer(model, "model.norm.weight_quantized")
        norm.CopyFrom(numpy_helper.from_array(np.zeros(128, dtype=np.int8), norm.name))
    found = "\n".join(quantized_problems(models, part, "uint16", replace(held, products=14)))
    for message in (
        "decode.onnx: expected 15 constants in int8 codes, found 16",
        "prefill.onnx: expected 7 constants in uint16 codes, found 6",
        "prefill.onnx: expected 14 products with int8 weights, found 15",
    ):
        assert message in found


def test_default_optimisations_would_change_the_numbers(make: Make) -> None:
    """ONNX Runtime merges dequantisers into other kernels; what a phone computes is the graph as it stands."""
    folder = make("llama, tied").artifact.folder
    ids = np.asarray(tokens(60, seed=9))

    def opened(level: onnxruntime.GraphOptimizationLevel) -> Host:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level, options.intra_op_num_threads = level, 1
        options.log_severity_level = 3
        return Host(folder, lambda path: onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"]))

    levels = onnxruntime.GraphOptimizationLevel
    found = Host(folder).score(ids, 20)
    assert np.array_equal(found, opened(levels.ORT_DISABLE_ALL).score(ids, 20))
    assert decibels(found, opened(levels.ORT_ENABLE_ALL).score(ids, 20)) < 60


def test_an_activation_that_stayed_in_float_is_seen(make: Make) -> None:
    artifact = make("llama, tied").artifact
    models = graphs(artifact)
    for model in models.values():
        norm = next(node for node in model.graph.node if node.op_type == "RMSNormalization")
        source = next(node for node in model.graph.node if norm.input[0] in node.output)
        quantizer = next(node for node in model.graph.node if source.input[0] in node.output)
        norm.input[0] = quantizer.input[0]
    assert "in float" in problems(artifact, models)


def test_all_scales_span_more_than_the_range_that_was_seen(make: Make) -> None:
    """Nothing is clipped, not on other texts either: percentiles took SmolLM2's perplexity from 10.7 to 29.7."""
    artifact = make("llama, tied").artifact
    (part,) = artifact.manifest.parts
    ranges = json.loads((artifact.folder / RANGES).read_text())[part.data]
    seen = Ranges.from_dict(ranges, RANGES)
    checked = 0
    for model in graphs(artifact).values():
        scales = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if not t.external_data}
        for name, found in seen.by_name.items():
            if f"{name}_scale" in scales and "Sigmoid" not in name:
                scale, zero = float(scales[f"{name}_scale"]), int(scales[f"{name}_zero_point"])
                limits = np.iinfo(scales[f"{name}_zero_point"].dtype)
                low, high = (limits.min - zero) * scale, (limits.max - zero) * scale
                # A share of attention is at most one.
                factor = 1 if "Softmax" in name else MARGIN
                assert high >= factor * found.high - scale and low <= factor * found.low + scale, name
                checked += 1
    assert checked > 40


def test_a_rewritten_graph_is_checked_against_the_rules(make: Make, tmp_path: Path) -> None:
    """Also when the ledger was made to agree with it."""
    artifact = copied(make("llama, tied").artifact, tmp_path / "changed")
    path = artifact.folder / "decode.onnx"
    model = load_graph(artifact.folder, path.name)
    name = next(t.name for t in model.graph.initializer if t.name.endswith("Softmax_0:0_scale"))
    initializer(model, name).CopyFrom(numpy_helper.from_array(np.array(0.5, dtype=np.float32), name))
    path.write_bytes(model.SerializeToString())
    artifact.ledger.files[path.name] = sha256(path)
    with pytest.raises(BadInput, match="Softmax_0:0.* in prefill, .* in decode"):
        artifact.check()


def test_a_range_is_widened_away_from_zero() -> None:
    seen = {"both": Range(-2, 4), "above": Range(1, 4), "below": Range(-4, -1), "zero": Range(0, 0)}
    wide = Ranges(dict(seen)).widened(1.5).by_name
    assert wide == {"both": Range(-3, 6), "above": Range(1, 6), "below": Range(-6, -1), "zero": Range(0, 0)}
