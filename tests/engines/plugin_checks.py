"""Runs inside the engines' environment: the plugin's registration and its loading of single layers, without a model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm import ModelRegistry
from vllm.model_executor.layers.quantization import get_quantization_config

from export import tinygemm
from export.layout import LayoutOptions
from export.serving import linear, tinygemm_vllm
from export.serving.vllm_plugin import ARCHITECTURE, register
from models.errors import BadInput

ROWS, COLUMNS, GROUP = (64, 48, 16), 128, 32
CODES = torch.randint(0, 16, (sum(ROWS), COLUMNS), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
TABLE = torch.randn(COLUMNS // GROUP, sum(ROWS), 2, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def config(isa: str, **changes: Any) -> dict[str, Any]:
    return {**tinygemm.quantization_config(LayoutOptions(GROUP, isa=isa)), **changes}


def refused(action: Callable[[], object], *parts: str) -> None:
    try:
        action()
    except BadInput as error:
        assert all(part in str(error) for part in parts), str(error)
    else:
        raise AssertionError(f"not refused: {parts}")


def new_layer(isa: str, workers: int = 1) -> tuple[Any, tinygemm_vllm.TinygemmMethod]:
    layer: Any = torch.nn.Module()
    layer.prefix = "model.layers.0.self_attn.qkv_proj"
    method = tinygemm_vllm.TinygemmMethod(tinygemm_vllm.TinygemmConfig.from_config(config(isa)))
    with mock.patch.object(tinygemm_vllm, "get_tensor_model_parallel_world_size", lambda: workers):
        method.create_weights(layer, COLUMNS, list(ROWS), COLUMNS, sum(ROWS), torch.bfloat16)
    return layer, method


def load(layer: Any, isa: str, shards: bool) -> None:
    if not shards:
        layer.weight_packed.weight_loader(layer.weight_packed, tinygemm.pack_codes(CODES, isa))
        layer.scales_and_zeros.weight_loader(layer.scales_and_zeros, TABLE)
        return
    # In another order than that of the whole.
    for shard in ("v", "q", "k"):
        index = "qkv".index(shard)
        rows = slice(sum(ROWS[:index]), sum(ROWS[: index + 1]))
        layer.weight_packed.weight_loader(layer.weight_packed, tinygemm.pack_codes(CODES[rows], isa), shard)
        layer.scales_and_zeros.weight_loader(layer.scales_and_zeros, TABLE[:, rows], shard)


def main() -> None:
    register()
    register()
    assert get_quantization_config("tinygemm") is tinygemm_vllm.TinygemmConfig
    assert ARCHITECTURE in ModelRegistry.get_supported_archs()
    whole = tinygemm.pack_codes(CODES, linear.host())
    for isa in tinygemm.ISAS:
        for shards in (False, True):
            layer, method = new_layer(isa)
            held = sum(parameter.nbytes for parameter in layer.parameters())
            load(layer, isa, shards)
            method.process_weights_after_loading(layer)
            assert torch.equal(layer.weight_packed, whole) and torch.equal(layer.scales_and_zeros, TABLE), isa
            # One copy: codes and table, nothing else.
            assert sum(parameter.nbytes for parameter in layer.parameters()) == held == whole.nbytes + TABLE.nbytes
            assert not list(layer.buffers())
            x = torch.ones(1, COLUMNS, dtype=torch.bfloat16)
            assert torch.equal(method.apply(layer, x), linear.multiply(x, whole, TABLE, GROUP))
    for changes, part in (
        ({"fingerprint": "0" * 64}, "no known machine"),
        ({"isa": "sse9"}, "isa"),
        ({"bits": 8}, "bits"),
        ({"group_size": 16}, "group_size"),
    ):
        refused(lambda changes=changes: tinygemm_vllm.TinygemmConfig.from_config({**config("avx2"), **changes}), part)
    refused(lambda: new_layer("avx2", workers=2), "qkv_proj", "tensor_parallel_size 1")
    layer, method = new_layer("avx2")
    refused(lambda: method.process_weights_after_loading(layer), "the checkpoint fills 0 of 128 rows")
    table = layer.scales_and_zeros
    refused(lambda: table.weight_loader(table, TABLE[1:]), "scales_and_zeros: expected bfloat16 [4, 128, 2], found")
    refused(lambda: table.weight_loader(table, TABLE[:, :64].float(), "q"), "(shard q)", "float32")
    load(layer, "avx2", True)
    table.data[0, 0, 0] = torch.inf
    refused(lambda: method.process_weights_after_loading(layer), "not finite")
    refused(lambda: method.tie_weights(layer, SimpleNamespace()), "tie_word_embeddings")
    kept = tinygemm_vllm.TinygemmConfig.from_config(
        config("avx2", modules_to_not_convert=["a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj", "b.q_proj", "lm_head"])
    )
    assert kept.is_kept("a.qkv_proj") and kept.is_kept("a.o_proj") and kept.is_kept("lm_head")
    assert not kept.is_kept("c.qkv_proj") and not kept.is_kept("c.o_proj")
    refused(lambda: kept.is_kept("b.qkv_proj"), "b.qkv_proj", "keep all of them or none")
    print("all checks passed")


if __name__ == "__main__":
    sys.exit(main())
