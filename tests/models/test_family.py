"""Families as data: which linears there are, and how fused projections split into them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from models.checkpoint import Folder, TensorInfo
from models.errors import BadInput
from models.family import Dimensions, Fusion, families, family_of, find_linears, part_rows
from models.opened import OpenedModel, open_model
from models.skeleton import load_model
from tests.helpers import MODEL_TYPES, tiny_checkpoint, tokens

FUSED = {
    "phi3": {
        "self_attn.qkv_proj": (("q_proj", 128), ("k_proj", 64), ("v_proj", 64)),
        "mlp.gate_up_proj": (("gate_proj", 256), ("up_proj", 256)),
    },
    "spark2_5": {"self_attn.q_k_v_proj": (("q_proj", 128), ("k_proj", 64), ("v_proj", 64))},
}


def opened(folder: Path, model_type: str, **config: Any) -> OpenedModel:
    return open_model(Folder(tiny_checkpoint(folder, model_type, **config)))


def test_the_tests_cover_every_known_model_type() -> None:
    assert set(families()) == set(MODEL_TYPES)


def test_an_unknown_model_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadInput, match="expected one of llama, mistral, phi3, qwen2, qwen3, spark2_5, found 'gemma3'"):
        family_of({"model_type": "gemma3"}, "org/model")


@pytest.mark.parametrize("value", [None, ["llama"], 3])
def test_a_missing_or_strange_model_type_is_refused(value: Any) -> None:
    with pytest.raises(BadInput, match="^org/model: config.json: model_type: expected one of"):
        family_of({"model_type": value}, "org/model")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_linear_of_the_model_is_found_or_kept_by_name(model_type: str, tmp_path: Path) -> None:
    model = opened(tmp_path, model_type)
    full = load_model(model.checkpoint, torch.float32)
    expected = {name for name, module in full.named_modules() if isinstance(module, torch.nn.Linear)}
    kept = {f"model.layers.{i}.{name}" for i in range(model.dimensions.layers) for name in model.family.kept}
    assert {linear.module for linear in model.linears} | kept == expected
    assert not kept & {linear.module for linear in model.linears}
    # Rows of a module are covered once, in order.
    for name in expected - kept:
        parts = [(part.start, part.stop) for part in model.linears if part.module == name]
        starts, stops = zip(*parts, strict=True)
        assert list(starts) == [0, *stops[:-1]] and stops[-1] == full.get_submodule(name).weight.shape[0]
    assert all(linear.columns == full.get_submodule(linear.module).weight.shape[1] for linear in model.linears)
    names = [linear.name for linear in model.linears]
    assert len(set(names)) == len(names) == 7 * model.dimensions.layers + 1
    assert names[0] == "model.layers.0.self_attn.q_proj" and names[-1] == "lm_head"
    assert [linear.layer for linear in model.linears] == [*(int(name.split(".")[2]) for name in names[:-1]), None]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_head_has_the_vocabulary_as_rows_also_without_a_tensor(tmp_path: Path, tied: bool) -> None:
    model = opened(tmp_path, "llama", tie_word_embeddings=tied)
    assert ("lm_head.weight" in model.checkpoint.tensors) is not tied
    head = model.linears[-1]
    assert (head.layer, head.rows, head.columns, head.weights) == (None, 512, 128, 512 * 128)


@pytest.mark.parametrize(
    ("model_type", "config"),
    [("phi3", {}), ("spark2_5", {}), ("spark2_5", {"attention_bias": True, "num_key_value_heads": 1})],
    ids=["phi3", "spark2_5", "spark2_5 with biases and one KV head"],
)
def test_split_rows_compute_what_the_fused_module_computes(
    tmp_path: Path, model_type: str, config: dict[str, Any]
) -> None:
    model = opened(tmp_path, model_type, **config)
    full = load_model(model.checkpoint, torch.float64)
    x = torch.randn(5, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kv_rows = 32 * config.get("num_key_value_heads", 2)
    for fused, parts in FUSED[model_type].items():
        module = full.get_submodule(f"model.layers.1.{fused}")
        assert isinstance(module, torch.nn.Linear) and (module.bias is None) == ("attention_bias" not in config)
        split = [p for p in model.linears if p.module == f"model.layers.1.{fused}"]
        assert [(p.name.rpartition(".")[2], p.rows) for p in split] == [
            (name, kv_rows if name in ("k_proj", "v_proj") else rows) for name, rows in parts
        ]
        for part in split:
            rows = slice(part.start, part.stop)
            bias = None if module.bias is None else module.bias[rows]
            found = torch.nn.functional.linear(x, module.weight[rows], bias)
            assert torch.allclose(found, module(x)[:, rows], rtol=0, atol=1e-12)


@pytest.mark.parametrize("model_type", ["phi3", "spark2_5"])
def test_split_q_k_v_are_the_query_key_and_value_of_the_models_attention(
    tmp_path: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only in the right sizes but in the right order: values are passed to attention as they are projected."""
    model = opened(tmp_path, model_type)
    full = load_model(model.checkpoint, torch.float32, attention="eager")
    seen = attention_arguments(full, monkeypatch)
    inputs: list[torch.Tensor] = []
    by_name = {linear.name: linear for linear in model.linears}
    value = by_name["model.layers.0.self_attn.v_proj"]
    fused = full.get_submodule(value.module)
    fused.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    full(tokens(1, 9), use_cache=False)
    # The first token has position 0: rotation leaves its query and key as they are.
    for name, index in (("q_proj", 0), ("k_proj", 1), ("v_proj", 2)):
        linear = by_name[f"model.layers.0.self_attn.{name}"]
        projected = inputs[0] @ fused.weight[linear.start : linear.stop].t()
        heads = projected.view(1, 9, -1, 32).transpose(1, 2)
        positions = slice(None) if name == "v_proj" else slice(0, 1)
        assert torch.allclose(heads[:, :, positions], seen[0][index][:, :, positions], atol=1e-4), name


def attention_arguments(model: PreTrainedModel, patch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, ...]]:
    """Query, key and value of each call of the model's eager attention, filled while the model runs."""
    from transformers.models.phi3 import modeling_phi3

    from models import spark2_5

    seen: list[tuple[torch.Tensor, ...]] = []
    owner, name = (
        (modeling_phi3, "eager_attention_forward") if "Phi3" in type(model).__name__ else (spark2_5, "eager_attention")
    )
    original = getattr(owner, name)

    def record(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        seen.append((query, key, value))
        return original(module, query, key, value, *args, **kwargs)

    patch.setattr(owner, name, record)
    return seen


def dimensions(heads: int = 8, kv_heads: int = 2, head_dim: int = 256) -> Dimensions:
    return Dimensions(layers=1, hidden=16, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


QKV = Fusion("self_attn.qkv", ("q", "k", "v"), rows="heads")


@pytest.mark.parametrize(
    ("fusion", "rows", "expected"),
    [
        (QKV, 3072, [2048, 512, 512]),
        (Fusion("mlp.gate_up", ("gate", "up"), rows="equal"), 512, [256, 256]),
        (Fusion("mlp.three", ("a", "b", "c"), rows="equal"), 96, [32, 32, 32]),
    ],
)
def test_rows_of_the_parts(fusion: Fusion, rows: int, expected: list[int]) -> None:
    assert part_rows(fusion, rows, dimensions()) == expected


@pytest.mark.parametrize(
    ("fusion", "rows", "message"),
    [
        (
            QKV,
            3071,
            r"self_attn.qkv: expected \(8 query \+ 2 x 2 key/value heads\) x 256 = 3072 output channels, found 3071",
        ),
        (
            Fusion("mlp.gate_up", ("gate", "up"), rows="equal"),
            513,
            "mlp.gate_up: expected 2 equal parts = 512 .* found 513",
        ),
    ],
)
def test_a_row_count_that_does_not_split_is_refused(fusion: Fusion, rows: int, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        part_rows(fusion, rows, dimensions())


def test_every_linear_that_is_missing_or_does_not_split_is_named_once(tmp_path: Path) -> None:
    model = opened(tmp_path, "spark2_5")
    tensors = dict(model.checkpoint.tensors)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.mlp.down_proj.weight"] = TensorInfo(torch.bfloat16, (128,))
    tensors["model.layers.3.self_attn.q_k_v_proj.weight"] = TensorInfo(torch.bfloat16, (255, 128))
    with pytest.raises(BadInput) as error:
        find_linears(model.family, model.dimensions, tensors)
    assert error.value.problems == [
        "model.layers.1.mlp.up_proj.weight: expected a matrix, found no such tensor",
        "model.layers.2.mlp.down_proj.weight: expected a matrix, found (128,)",
        "model.layers.3.self_attn.q_k_v_proj: expected (4 query + 2 x 2 key/value heads) x 32 = 256 output channels,"
        " found 255",
    ]


@pytest.mark.parametrize(
    ("model_type", "config", "expected"),
    [
        ("llama", {}, (2, 128, 4, 2, 32)),
        ("llama", {"num_key_value_heads": None}, (2, 128, 4, 4, 32)),
        ("qwen3", {"head_dim": 64, "num_hidden_layers": 3}, (3, 128, 4, 2, 64)),
        ("spark2_5", {"head_dim": 16}, (4, 128, 4, 2, 16)),
        ("phi3", {}, (2, 128, 4, 2, 32)),
    ],
)
def test_dimensions_are_read_from_every_kind_of_configuration(
    tmp_path: Path, model_type: str, config: dict[str, Any], expected: tuple[int, ...]
) -> None:
    d = opened(tmp_path, model_type, **config).dimensions
    assert (d.layers, d.hidden, d.heads, d.kv_heads, d.head_dim) == expected
