"""Phone artifacts, written whole: what they compute, what they say of themselves, and every trap of quantising them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import export.phone.check
import export.phone.files
import export.phone.quantize
import export.phone.write
from calibrate.quantize import quantize
from calibrate.ranges import Ranges
from calibrate.results import Results
from export.ledger import Ledger
from export.phone.artifact import PhoneArtifact
from export.phone.check import graph_problems
from export.phone.expand import PhoneExpansion
from export.phone.files import load_graph
from export.phone.manifest import GRAPHS, Graph, Manifest
from export.phone.observe import Observations, text_steps
from export.phone.options import PhoneOptions
from export.phone.plan import PhoneSpec, make_phone_plan
from export.phone.quantized import Counts, quantized_problems
from export.phone.trace import Traced
from export.phone.write import RANGES, write
from models.checkpoint import Folder, Writer
from models.errors import BadInput
from models.files import sha256, to_json
from models.opened import OpenedModel, open_model
from models.skeleton import load_model
from tests.helpers import tiny_checkpoint, tokens
from tests.phone import HYBRID
from validate.engines.workers.phone_host import Host, PartDriver

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


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    made: dict[str, Written] = {}

    def get(case: str) -> Written:
        if case not in made:
            base = tmp_path_factory.mktemp("phone")
            model_type, config = CASES[case]
            model = open_model(Folder(tiny_checkpoint(base / "source", model_type, **config)))
            made[case] = Written(model, written(model, base))
        return made[case]

    return get


@torch.no_grad()
def reference(model: OpenedModel, ids: np.ndarray) -> np.ndarray:
    logits: np.ndarray = load_model(model.checkpoint, torch.float32)(torch.from_numpy(ids)[None]).logits[0].numpy()
    return logits


def decibels(expected: np.ndarray, found: np.ndarray) -> float:
    return float(10 * np.log10(np.square(expected).sum() / np.square(expected - found).sum()))


def copied(artifact: PhoneArtifact, folder: Path) -> PhoneArtifact:
    shutil.copytree(artifact.folder, folder)
    return PhoneArtifact(folder)


@pytest.mark.parametrize("case", CASES)
def test_the_graphs_compute_the_model_in_chunks_and_steps(case: str, make: Callable[[str], Written]) -> None:
    made = make(case)
    ids = np.asarray(tokens(60, seed=9))
    found = Host(made.artifact.folder).score(ids, 20)
    assert decibels(reference(made.model, ids), found) > 25


@pytest.mark.parametrize("case", CASES)
def test_the_expansion_is_a_checkpoint_that_transformers_loads(
    case: str, make: Callable[[str], Written], tmp_path: Path
) -> None:
    made = make(case)
    expansion = PhoneExpansion(made.artifact)
    writer = Writer(tmp_path, 2**30)
    for name in expansion.tensors:
        writer.add(name, expansion.read(name))
    writer.finish()
    (tmp_path / "config.json").write_bytes(to_json(expansion.config))
    assert "tokenizer.json" in expansion.side_files()
    ids = np.asarray(tokens(60, seed=9))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        logits = loaded(torch.from_numpy(ids)[None]).logits[0].numpy()
    assert decibels(reference(made.model, ids), logits) > 25


@pytest.mark.parametrize("case", CASES)
def test_every_source_tensor_has_a_row_and_the_bytes_pass_their_check(
    case: str, make: Callable[[str], Written]
) -> None:
    made = make(case)
    made.artifact.check()
    rows = {row.tensor: row for row in made.artifact.ledger.tensors}
    assert set(made.model.checkpoint.tensors) <= set(rows)
    assert rows["lm_head.weight"].outcome == "quantized"
    assert abs(made.artifact.bits_per_weight - 8) < 0.5


def test_a_model_in_parts_computes_what_it_does_in_one(make: Callable[[str], Written], tmp_path: Path) -> None:
    made = make("llama, tied")
    parts = written(made.model, tmp_path, replace(OPTIONS, parts=4))
    assert len(parts.manifest.parts) == 4
    ids = np.asarray(tokens(60, seed=9))
    found = Host(parts.folder).score(ids, 20)
    assert decibels(reference(made.model, ids), found) > 25
    parts.check()


@pytest.mark.parametrize(("parts", "embedding", "bytes"), [(1, "int8", 1), (3, "int8", 1), (1, "uint16", 2)])
def test_a_table_of_codes_is_read_on_its_own_grid(
    parts: int, embedding: Literal["int8", "uint16"], bytes: int, make: Callable[[str], Written], tmp_path: Path
) -> None:
    made = make("llama, tied")
    coded = written(made.model, tmp_path, replace(OPTIONS, parts=parts, embedding=embedding))
    coded.check()
    ids = np.asarray(tokens(60, seed=9))
    expected = reference(made.model, ids)
    found, float_table = (
        decibels(expected, Host(folder).score(ids, 20)) for folder in (coded.folder, made.artifact.folder)
    )
    assert found > (22 if embedding == "int8" else float_table - 0.5)
    size = sum(path.stat().st_size for path in coded.weight_files)
    assert size < sum(path.stat().st_size for path in made.artifact.weight_files) - 512 * 128 * (4 - bytes) + 20_000
    table = PhoneExpansion(coded).read("model.embed_tokens.weight").float()
    kept = PhoneExpansion(made.artifact).read("model.embed_tokens.weight").float()
    assert 0 < float((table - kept).abs().max()) < float(kept.abs().max()) / (100 if embedding == "int8" else 200)


def test_activations_of_8_bits_are_another_artifact(make: Callable[[str], Written], tmp_path: Path) -> None:
    made = make("llama, tied")
    coarse = written(made.model, tmp_path, replace(OPTIONS, activations="uint8"))
    coarse.check()
    ids = np.asarray(tokens(60, seed=9))
    expected = reference(made.model, ids)
    fine, found = (decibels(expected, Host(a.folder).score(ids, 20)) for a in (made.artifact, coarse))
    assert found < fine - 5


def test_writing_twice_gives_the_same_bytes(
    make: Callable[[str], Written], tmp_path: Path, traced: dict[Any, Traced]
) -> None:
    made = make("spark2_5, hybrid")
    traced.clear()
    again = written(made.model, tmp_path)
    assert again.ledger.files == made.artifact.ledger.files


def graphs(artifact: PhoneArtifact) -> dict[str, onnx.ModelProto]:
    (part,) = artifact.manifest.parts
    return {kind: load_graph(artifact.folder, part.graph(kind).file) for kind in GRAPHS}


def problems(artifact: PhoneArtifact, models: dict[str, onnx.ModelProto], manifest: Manifest | None = None) -> str:
    (part,) = (manifest or artifact.manifest).parts
    return "\n".join(quantized_problems(models, part, "uint16"))


def initializer(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def test_an_intact_pair_breaks_no_rule(make: Callable[[str], Written]) -> None:
    artifact = make("llama, tied").artifact
    assert problems(artifact, graphs(artifact)) == ""


def test_a_product_with_one_scale_for_all_channels_is_seen(make: Callable[[str], Written]) -> None:
    """`get_qnn_qdq_config(per_channel=True)` silently makes a MatMul per tensor."""
    artifact = make("llama, tied").artifact
    models = graphs(artifact)
    name = "model.layers.0.mlp.down_proj.weight"
    for model in models.values():
        initializer(model, name + "_scale").CopyFrom(
            numpy_helper.from_array(np.array(0.1, dtype=np.float32), name + "_scale")
        )
    assert f"{name}: expected a scale for each of 128 output channels, found []" in problems(artifact, models)


def test_a_head_in_float_is_seen(make: Callable[[str], Written]) -> None:
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


def test_cache_entries_on_two_grids_are_seen(make: Callable[[str], Written]) -> None:
    artifact = make("llama, tied").artifact
    (part,) = artifact.manifest.parts
    outputs = tuple(
        replace(port, scale=port.scale * 1.01) if port.name == "new_value_1" and port.scale else port
        for port in part.prefill.outputs
    )
    other = replace(artifact.manifest, parts=(replace(part, prefill=replace(part.prefill, outputs=outputs)),))
    found = problems(artifact, graphs(artifact), other)
    assert "past_value_1, new_value_1: expected one grid" in found and "new_value_1: on (" in found


def test_graphs_with_different_scales_are_seen(make: Callable[[str], Written]) -> None:
    artifact = make("llama, tied").artifact
    models = graphs(artifact)
    name = next(t.name for t in models["decode"].graph.initializer if t.name.endswith("Softmax_0:0_scale"))
    initializer(models["decode"], name).CopyFrom(numpy_helper.from_array(np.array(0.5, dtype=np.float32), name))
    assert "in prefill" in problems(artifact, models) and "Softmax_0:0" in problems(artifact, models)


def test_a_product_of_unsigned_activations_is_seen(make: Callable[[str], Written]) -> None:
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
    make: Callable[[str], Written], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export.phone.quantize, "signed_overrides", lambda *_: {})
    with pytest.raises(
        RuntimeError, match=r"self_attn/MatMul_0: reads .* as uint16 around \d+: expected int16 around 0"
    ):
        written(make("llama, tied").model, tmp_path)
    assert not (tmp_path / "phone").exists()


def test_no_artifact_that_breaks_a_rule_is_written(
    make: Callable[[str], Written], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    make: Callable[[str], Written], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_ranges_of_random_tokens_take_the_place_of_a_text(make: Callable[[str], Written], tmp_path: Path) -> None:
    made = make("llama, tied")
    blind = written(made.model, tmp_path, windows=None)
    blind.check()
    ids = np.asarray(tokens(60, seed=9))
    # The tiny model's weights are random, so that no text is very unlike another one to it.
    assert decibels(reference(made.model, ids), Host(blind.folder).score(ids, 20)) > 15


def test_caches_and_the_sides_of_products_are_signed(make: Callable[[str], Written]) -> None:
    artifact = make("spark2_5, hybrid").artifact
    (part,) = artifact.manifest.parts
    caches = [port for port in (*part.decode.inputs, *part.decode.outputs) if port.layer is not None]
    assert len(caches) == 8 and {(port.dtype, port.zero_point) for port in caches} == {("int16", 0)}
    # Values are cut from a fused projection, whose queries and keys span more: their grid is their own.
    seen = json.loads((artifact.folder / RANGES).read_text())[part.data]
    scale = next(port.scale for port in caches if port.name == "past_value_0")
    own, fused = (max(map(abs, seen[name])) for name in ("past_value_0", "new_value_0"))
    assert own < fused and scale == pytest.approx(own / 32767, rel=1e-4)


def test_constants_of_codes_are_counted(make: Callable[[str], Written]) -> None:
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


def test_default_optimisations_would_change_the_numbers(make: Callable[[str], Written]) -> None:
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


def test_an_activation_that_stayed_in_float_is_seen(make: Callable[[str], Written]) -> None:
    artifact = make("llama, tied").artifact
    models = graphs(artifact)
    for model in models.values():
        norm = next(node for node in model.graph.node if node.op_type == "RMSNormalization")
        source = next(node for node in model.graph.node if norm.input[0] in node.output)
        quantizer = next(node for node in model.graph.node if source.input[0] in node.output)
        norm.input[0] = quantizer.input[0]
    assert "in float" in problems(artifact, models)


def test_all_scales_span_the_whole_range_that_was_seen(make: Callable[[str], Written]) -> None:
    """Nothing is clipped: percentiles took SmolLM2's perplexity from 10.7 to 29.7."""
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
                assert high >= found.high - scale and low <= found.low + scale, name
                checked += 1
    assert checked > 40


def test_a_damaged_graph_and_a_changed_weight_are_named(make: Callable[[str], Written], tmp_path: Path) -> None:
    artifact = copied(make("llama, tied").artifact, tmp_path / "damaged")
    for file in ("decode.onnx", "model.data"):
        path = artifact.folder / file
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
    with pytest.raises(BadInput) as error:
        artifact.check()
    assert [problem.split(": ")[1] for problem in error.value.problems] == ["decode.onnx", "model.data"]


def test_a_rewritten_graph_is_checked_against_the_rules(make: Callable[[str], Written], tmp_path: Path) -> None:
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


def test_a_truncated_weight_file_is_named_with_its_tensor(make: Callable[[str], Written], tmp_path: Path) -> None:
    artifact = copied(make("llama, tied").artifact, tmp_path / "short")
    path = artifact.folder / "model.data"
    path.write_bytes(path.read_bytes()[:-4096])
    expansion = PhoneExpansion(artifact)
    with pytest.raises(BadInput, match="truncated"):
        for name in expansion.tensors:
            expansion.read(name)


def test_a_weight_that_is_not_finite_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "llama", num_hidden_layers=1)
    weights = load_file(source / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInput, match="model.layers.0.mlp.up_proj.weight: expected finite weights, found nan"):
        written(open_model(Folder(source)), tmp_path)
    assert not (tmp_path / "phone").exists()


def test_ranges_that_are_not_finite_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="activation x: expected finite values, found -inf"):
        Ranges().add("x", float("-inf"), 1.0)
    seen = Observations(tmp_path)
    (tmp_path / "ranges-00000.json").write_text('{"x": [0, NaN], "y": [2, 1], "z": 3}')
    with pytest.raises(BadInput) as error:
        seen.ranges(0)
    assert [problem.split(": ")[1] for problem in error.value.problems] == ["x", "y", "z"]


def test_a_text_without_room_for_a_chunk_and_the_steps_is_refused(make: Callable[[str], Written]) -> None:
    manifest = make("llama, tied").artifact.manifest
    assert [kind for kind, _, _ in text_steps(np.arange(48), manifest)] == ["prefill"] * 2 + ["decode"] * 16
    for length in (31, 81):
        with pytest.raises(BadInput, match="sequence_length: expected 32 .* to 64 tokens"):
            text_steps(np.arange(length), manifest)


def test_written_graphs_pass_the_rules_of_all_graphs(make: Callable[[str], Written]) -> None:
    artifact = make("phi3, fused").artifact
    (part,) = artifact.manifest.parts
    for kind, model in graphs(artifact).items():
        assert graph_problems(model, part.graph(kind), OPTIONS.opset, part.norms) == []
