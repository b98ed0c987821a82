"""llama.cpp's quantisation of a source: its own choice of types, its own bytes, and the same scorer."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from hypothesis import given
from hypothesis import strategies as st

from models.checkpoint import Folder, TensorInfo
from models.errors import EnvironmentProblem
from models.opened import OpenedModel, open_model
from models.skeleton import skeleton
from tests.helpers import NoFiles, tiny_checkpoint
from tests.validate.test_measure import settings
from validate.llama_cpp import MIXES, GgufView, bits, library_version, more_bits, tensor_types, write
from validate.measure import measure_reference
from validate.positioning import NAMES, not_measured, position

pytest.importorskip("libgguf")
# What llama.cpp's llama_model_quantize (llama-cpp-python 0.3.36) wrote for SmolLM2-135M: 30 layers of width 576 and
# 1536, 3 of 9 heads for keys and values, tied. Matrices by type; file bits per weight as it prints them.
SMOLLM2: dict[str, tuple[dict[str, int], float]] = {
    "Q4_0": ({"Q4_0": 210, "Q8_0": 1}, 5.35),
    "Q4_K_S": ({"Q5_0": 176, "Q4_K": 27, "Q5_1": 4, "Q5_K": 3, "Q8_0": 1}, 5.96),
    "Q4_K_M": ({"Q5_0": 166, "Q4_K": 16, "Q8_0": 15, "Q6_K": 14}, 6.17),
    "Q5_0": ({"Q5_0": 210, "Q8_0": 1}, 6.14),
    "Q5_K_M": ({"Q5_1": 166, "Q5_K": 16, "Q8_0": 15, "Q6_K": 14}, 6.56),
    "Q6_K": ({"Q8_0": 181, "Q6_K": 30}, 8.12),
    "Q8_0": ({"Q8_0": 211}, 8.51),
}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 9, "vocab_size": 512}


def quiet(*_: Any) -> None:
    """Nobody watches."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OpenedModel]:
    """Models whose rows are multiples of 256, which K-quants need, and one of other rows."""
    folder = tmp_path_factory.mktemp("models")
    cases: dict[str, dict[str, Any]] = {
        "untied": {"model_type": "llama", "tie_word_embeddings": False, **SIZES},
        "small": {"model_type": "llama", "tie_word_embeddings": False, **SIZES, "num_hidden_layers": 1},
        "tied": {"model_type": "llama", **SIZES},
        "fused": {"model_type": "phi3", **SIZES},
        "odd": {
            "model_type": "llama",
            **SIZES,
            "hidden_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
        },
        "tiny": {"model_type": "llama", **SIZES, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1},
    }
    return {name: open_model(Folder(tiny_checkpoint(folder / name, **case))) for name, case in cases.items()}


class Headers(NoFiles):
    """SmolLM2-135M without its weights."""

    def __init__(self) -> None:
        self.name = "smollm2"
        self.config = {
            "model_type": "llama",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
            "tie_word_embeddings": True,
        }
        self.tensors: dict[str, TensorInfo] = {}
        shapes = {name: tuple(value.shape) for name, value in skeleton(self, torch.bfloat16).state_dict().items()}
        self.tensors = {k: TensorInfo(torch.bfloat16, v) for k, v in shapes.items() if k != "lm_head.weight"}

    def read(self, name: str) -> torch.Tensor:
        raise AssertionError("types are chosen by headers alone")


@pytest.fixture(scope="module")
def smollm2() -> OpenedModel:
    return open_model(Headers())


@pytest.mark.parametrize("mix", SMOLLM2)
def test_types_are_those_that_llama_cpp_gave_smollm2(smollm2: OpenedModel, mix: str) -> None:
    types = tensor_types(MIXES[mix], smollm2)
    shapes = smollm2.checkpoint.tensors
    counts = Counter(kind for name, kind in types.items() if len(shapes[name].shape) == 2)
    stored = sum(bits(kind) * shapes[name].elements for name, kind in types.items())
    assert (dict(counts), round(stored / sum(info.elements for info in shapes.values()), 2)) == SMOLLM2[mix]


def layers_of(types: dict[str, str], name: str) -> list[str]:
    return [types[f"model.layers.{layer}.{name}.weight"] for layer in range(9)]


def test_q4_k_m_gives_more_bits_where_llama_cpp_does(models: dict[str, OpenedModel]) -> None:
    types = tensor_types(MIXES["Q4_K_M"], models["untied"])
    # Of nine layers: the first, the last two, and every third between.
    expected = ["Q6_K" if layer in (0, 3, 6, 7, 8) else "Q4_K" for layer in range(9)]
    assert layers_of(types, "self_attn.v_proj") == layers_of(types, "mlp.down_proj") == expected
    assert set(layers_of(types, "self_attn.q_proj") + layers_of(types, "mlp.up_proj")) == {"Q4_K"}
    assert types["lm_head.weight"] == "Q6_K" and types["model.embed_tokens.weight"] == "Q4_K"
    assert types["model.norm.weight"] == "F32"


def test_a_table_that_is_the_head_too_is_quantised_as_a_head(models: dict[str, OpenedModel]) -> None:
    assert tensor_types(MIXES["Q4_K_M"], models["tied"])["model.embed_tokens.weight"] == "Q6_K"
    assert tensor_types(MIXES["Q4_0"], models["tied"])["model.embed_tokens.weight"] == "Q6_K"
    assert tensor_types(MIXES["Q8_0"], models["tied"])["model.embed_tokens.weight"] == "Q8_0"


def test_a_fused_projection_counts_as_the_value(models: dict[str, OpenedModel]) -> None:
    types = tensor_types(MIXES["Q4_K_M"], models["fused"])
    assert layers_of(types, "self_attn.qkv_proj") == layers_of(types, "mlp.down_proj")
    assert set(layers_of(types, "mlp.gate_up_proj")) == {"Q4_K"}


def test_rows_that_a_type_does_not_take_fall_back(models: dict[str, OpenedModel]) -> None:
    types = tensor_types(MIXES["Q4_K_M"], models["odd"])
    assert types["model.layers.0.self_attn.q_proj.weight"] == "Q5_0"
    assert types["model.layers.1.self_attn.v_proj.weight"] == "Q8_0"
    assert types["model.layers.1.mlp.down_proj.weight"] == "Q6_K"
    assert types["model.embed_tokens.weight"] == "Q8_0"
    assert tensor_types(MIXES["Q4_K_M"], models["tiny"])["model.layers.0.mlp.up_proj.weight"] == "F16"


@given(st.integers(1, 200))
def test_between_a_third_and_a_half_of_the_layers_get_more_bits(layers: int) -> None:
    count = sum(more_bits(layer, layers) for layer in range(layers))
    assert layers // 4 <= count <= layers // 2 + 2 or layers < 8


def test_the_installed_version_is_one_that_was_run() -> None:
    assert library_version() == importlib.metadata.version("libgguf") == "0.2.2"


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("case", ["small", "odd"])
def test_a_view_reads_what_another_reader_finds_in_the_file(
    models: dict[str, OpenedModel], tmp_path: Path, mix: str, case: str
) -> None:
    model, file = models[case], tmp_path / "model.gguf"
    write(MIXES[mix], model, file, quiet)
    view = GgufView(file, model.checkpoint)
    assert view.tensors.keys() == model.checkpoint.tensors.keys()
    for tensor in GGUFReader(file).tensors:
        source, found = model.checkpoint.read(tensor.name).float(), view.read(tensor.name)
        assert torch.equal(
            found, torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).view(source.shape)
        )
        error = float((found - source).norm() / source.norm())
        bound = 0 if tensor.tensor_type == GGMLQuantizationType.F32 else 2.0 ** (1 - bits(tensor.tensor_type.name))
        assert error <= bound * 1.5, (tensor.name, tensor.tensor_type.name)
    assert sum(view.types().values()) == sum(len(info.shape) == 2 for info in model.checkpoint.tensors.values())
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_q4_0_is_the_arithmetic_that_llama_cpp_documents(models: dict[str, OpenedModel], tmp_path: Path) -> None:
    model, file = models["small"], tmp_path / "model.gguf"
    write(MIXES["Q4_0"], model, file, quiet)
    name = "model.layers.0.mlp.up_proj.weight"
    blocks = model.checkpoint.read(name).float().numpy().reshape(-1, 32)
    # The value of the largest magnitude becomes -8 steps; codes are rounded half up; steps are stored in fp16.
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1, keepdims=True), 1)
    step = largest / np.float32(-8)
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step != 0)
    codes = np.minimum(15, (blocks * inverse + np.float32(8.5)).astype(np.int8))
    expected = (codes.astype(np.float32) - 8) * step.astype(np.float16).astype(np.float32)
    found = GgufView(file, model.checkpoint).read(name).numpy().reshape(-1, 32)
    assert np.array_equal(found, expected)


def test_a_position_has_a_targets_figures(models: dict[str, OpenedModel], tmp_path: Path) -> None:
    model, how = models["small"], settings()
    reference = measure_reference(model.checkpoint, how, tmp_path, quiet)
    rows = {name: position(name, model, reference, how, tmp_path, quiet) for name in NAMES[:1] + NAMES[2:3]}
    four, eight = rows["llama.cpp:Q4_0"], rows["llama.cpp:Q8_0"]
    assert four["bits_per_weight"] == 4.5 and eight["bits_per_weight"] == 8.5
    assert four["kl"] > 10 * eight["kl"] > 0 and four["top1"] < eight["top1"]
    assert four["file_bytes"] < eight["file_bytes"] and four["tokens"] == 24 * 47
    assert four["greedy"]["of"] == 4 and four["types"] == {"Q4_0": 8, "Q6_K": 1}
    assert four["version"].startswith("llama.cpp:Q4_0 0.")
    assert [path.name for path in tmp_path.iterdir()] == ["reference.safetensors"]


def test_an_absent_package_is_a_row_that_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr("importlib.metadata.version", absent)
    with pytest.raises(EnvironmentProblem) as caught:
        library_version()
    assert not_measured("llama.cpp:Q4_0", caught.value) == {
        "name": "llama.cpp:Q4_0",
        "skipped": "libgguf is not installed: pip install 'edge-convert[positioning]'",
    }
