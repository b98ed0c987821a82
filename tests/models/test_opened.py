"""Opening a model: tensors against the configuration, and the whole model from a lazy checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from models.checkpoint import Folder
from models.errors import BadInput
from models.opened import open_model
from models.skeleton import load_model, skeleton
from models.wide import widen
from tests.helpers import MODEL_TYPES, tiny_checkpoint, tokens


def change_config(folder: Path, **changes: Any) -> Folder:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return Folder(folder, name="org/model")


def change_tensors(folder: Path, drop: tuple[str, ...] = (), **changes: torch.Tensor) -> Folder:
    tensors = {name: t for name, t in load_file(folder / "model.safetensors").items() if name not in drop}
    save_file({**tensors, **changes}, folder / "model.safetensors", metadata={"format": "pt"})
    return Folder(folder, name="org/model")


def test_missing_misshapen_and_unexpected_tensors_come_in_one_message(tmp_path: Path) -> None:
    checkpoint = change_tensors(
        tiny_checkpoint(tmp_path, "qwen2"),
        drop=("model.layers.0.self_attn.q_proj.bias", "model.norm.weight"),
        **{
            "model.layers.1.mlp.up_proj.weight": torch.zeros(255, 128),
            "model.layers.2.mlp.up_proj.weight": torch.ones(1),
        },
    )
    with pytest.raises(BadInput) as error:
        open_model(checkpoint)
    assert sorted(error.value.problems) == [
        "org/model: model.layers.0.self_attn.q_proj.bias: expected [128], found no such tensor",
        "org/model: model.layers.1.mlp.up_proj.weight: expected shape [256, 128], found [255, 128]",
        "org/model: model.layers.2.mlp.up_proj.weight: the model has no such tensor",
        "org/model: model.norm.weight: expected [128], found no such tensor",
    ]


def test_an_untied_head_that_is_missing_is_named(tmp_path: Path) -> None:
    checkpoint = change_config(tiny_checkpoint(tmp_path, "llama"), tie_word_embeddings=False)
    with pytest.raises(BadInput, match=r"lm_head.weight: expected \[512, 128\], found no such tensor"):
        open_model(checkpoint)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"hidden_size": "128"}),
        ("llama", {"hidden_act": "nope"}),
        ("llama", {"num_attention_heads": 3}),
        ("llama", {"num_attention_heads": 0}),
        ("llama", {"rope_parameters": {"rope_type": "nope"}}),
        ("phi3", {"pad_token_id": 99_999}),
        ("qwen3", {"layer_types": ["a", "b"]}),
        ("spark2_5", {"num_key_value_heads": 0}),
        ("spark2_5", {"rope_parameters": [1]}),
        ("spark2_5", {"hidden_act": "nope"}),
    ],
    ids=str,
)
def test_a_configuration_that_makes_no_model_ends_in_a_message(
    tmp_path: Path, model_type: str, changes: dict[str, Any]
) -> None:
    checkpoint = change_config(tiny_checkpoint(tmp_path, model_type), **changes)
    with pytest.raises(BadInput, match="^org/model: config.json: "):
        open_model(checkpoint)


def test_an_auto_map_is_never_followed(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    (folder / "evil.py").write_text("raise SystemExit('remote code ran')")
    checkpoint = change_config(folder, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    assert type(load_model(checkpoint, torch.float32)).__name__ == "LlamaForCausalLM"
    assert len(open_model(checkpoint).linears) == 15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_loaded_model_is_that_of_from_pretrained(tmp_path: Path, model_type: str, dtype: torch.dtype) -> None:
    folder = tiny_checkpoint(tmp_path, model_type)
    ours = load_model(Folder(folder), dtype)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    # On processors that multiply no such numbers, by the same products.
    widen(theirs, dtype)
    assert not ours.training
    with torch.no_grad():
        assert torch.equal(ours(tokens(2, 40)).logits, theirs(tokens(2, 40)).logits)


def test_a_head_with_a_tensor_of_its_own_is_used_although_the_config_says_tied(tmp_path: Path) -> None:
    """As transformers does: such a configuration does not describe the checkpoint."""
    folder = tiny_checkpoint(tmp_path)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    checkpoint = change_tensors(folder, **{"lm_head.weight": embedding.flip(0).contiguous()})
    ours = load_model(checkpoint, torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(ours(tokens(1, 20)).logits, theirs(tokens(1, 20)).logits)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_skeleton_holds_no_weights_but_the_buffers_of_the_model(tmp_path: Path, model_type: str) -> None:
    folder = tiny_checkpoint(tmp_path, model_type)
    model = skeleton(Folder(folder), torch.bfloat16)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    buffers = dict(model.named_buffers())
    expected = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).named_buffers())
    assert buffers.keys() == expected.keys() and buffers
    assert all(torch.equal(buffer, expected[name]) for name, buffer in buffers.items())
