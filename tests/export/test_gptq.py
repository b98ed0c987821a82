"""The GPTQ layout against GPTQModel's own packing, and every check on its tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from calibrate.grid import Quantized
from export import gptq
from export.layout import LayoutOptions
from export.layouts import LAYOUTS, layout_of
from models.errors import BadInput

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "gptqmodel_pack.safetensors")
SYMMETRIC = sorted({key.rsplit(".", 1)[0] for key in GOLDEN if ".sym." in key})
OPTIONS = LayoutOptions(32)
CONFIG = gptq.quantization_config(OPTIONS)


def linear(rows: int = 64, columns: int = 128, size: int = 32, seed: int = 0) -> Quantized:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)
    scales = torch.rand(rows, columns // size, generator=generator) + 0.01
    return Quantized(codes, scales.to(torch.bfloat16))


def problems(**changed: torch.Tensor) -> list[str]:
    return gptq.tensor_problems("layer.q_proj", {**gptq.pack(linear(), OPTIONS), **changed}, CONFIG)


@pytest.mark.parametrize("case", SYMMETRIC)
def test_packs_the_bytes_that_gptqmodel_packs_with_zero_points_minus_one(case: str) -> None:
    size = int(case.split(".g")[1].split(".")[0])
    q = Quantized(GOLDEN[f"{case}.codes_nk"], GOLDEN[f"{case}.scales"].t().contiguous())
    tensors = gptq.pack(q, LayoutOptions(size))
    for suffix in ("qweight", "scales", "g_idx"):
        assert torch.equal(tensors[suffix], GOLDEN[f"{case}.{suffix}"]), suffix
    # In memory GPTQModel holds the zero point, in a v1 file the zero point minus one, nibble by nibble.
    assert torch.equal(tensors["qzeros"], GOLDEN[f"{case}.qzeros"] - 0x11111111)
    unpacked = gptq.unpack(tensors, gptq.quantization_config(LayoutOptions(size)))
    # Its kernel dequantises in the scales' fp16.
    assert torch.equal(unpacked.dequantize(torch.float16).float().t(), GOLDEN[f"{case}.dequantized_kn"])


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 4), groups=st.integers(1, 4), size=st.sampled_from([32, 64, 128, -1]), seed=st.integers(0, 999)
)
def test_unpack_inverts_pack_and_stored_bits_counts_every_bit(rows: int, groups: int, size: int, seed: int) -> None:
    columns = 32 * groups if size == -1 else size * groups
    q = linear(32 * rows, columns, columns if size == -1 else size, seed)
    options = LayoutOptions(size)
    tensors = gptq.pack(q, options)
    config = gptq.quantization_config(options)
    again = gptq.unpack(tensors, config)
    assert torch.equal(again.codes, q.codes) and torch.equal(again.scales, q.scales)
    assert again.grid == q.grid
    assert gptq.tensor_problems("x", tensors, config) == []
    assert gptq.stored_bits(q.codes.shape[0], columns, size) == 8 * sum(t.nbytes for t in tensors.values())
    assert all(t.is_contiguous() for t in tensors.values()) and tuple(tensors) == gptq.SUFFIXES


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((64, 128, 32), []),
        ((64, 100, -1), ["100 in features: the engine needs a multiple of 32"]),
        ((48, 128, 32), ["48 out features: the engine needs a multiple of 32"]),
        ((64, 128, 16), ["group size 16: the engine takes 32, 64, 128 and -1"]),
        ((64, 96, 64), ["group size 64 does not divide 96 in features"]),
        ((64, 512, -1), []),
        ((64, 576, -1), ["one group of 576 in features: the engine needs a multiple of 128, or at most 128"]),
    ],
)
def test_shapes_that_the_engine_refuses_are_named(shape: tuple[int, int, int], expected: list[str]) -> None:
    found = gptq.shape_problems(*shape)
    assert found[: len(expected)] == expected and bool(found) == bool(expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": torch.full((64, 128), 16, dtype=torch.uint8)}, "codes: expected 0..15, found 16"),
        ({"codes": torch.zeros(64, 128)}, "codes: expected uint8"),
        ({"scales": torch.ones(64, 3, dtype=torch.bfloat16)}, r"scales: expected \[64, 4\]"),
        ({"scales": torch.ones(64, 2, dtype=torch.bfloat16)}, r"scales: expected \[64, 4\]"),
        ({"scales": torch.ones(64, 4)}, "scales: expected bfloat16 or float16"),
        ({"scales": torch.full((64, 4), torch.inf, dtype=torch.bfloat16)}, "scales: not finite"),
        ({"scales": torch.zeros(64, 4, dtype=torch.bfloat16)}, "256 of 256 scales are zero"),
        ({"zeros": torch.zeros(64, 4, dtype=torch.bfloat16)}, "zero: expected one of none, found float"),
        ({"zero_points": torch.zeros(64, 4, dtype=torch.uint8)}, "zero: expected one of none, found integer"),
    ],
)
def test_pack_refuses_what_the_layout_cannot_hold(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        gptq.pack(replace(linear(), **change), OPTIONS)


def test_tensors_as_packed_have_no_problem() -> None:
    assert problems() == []


def test_v2_zero_points_are_recognised_as_the_wrong_convention() -> None:
    wrong = torch.full((4, 8), 0x88888888 - 2**32, dtype=torch.int32)
    assert problems(qzeros=wrong) == [
        "layer.q_proj.qzeros: expected 0x77777777 (zero point minus one) everywhere, found the v2 convention"
    ]


def test_the_zero_points_of_an_asymmetric_checkpoint_are_found() -> None:
    case = "case3.g32.asym"
    tensors = {suffix: GOLDEN[f"{case}.{suffix}"] for suffix in gptq.SUFFIXES}
    assert ["found other words" in line for line in gptq.tensor_problems("x", tensors, CONFIG)] == [True]


def test_one_wrong_zero_point_is_found() -> None:
    wrong = torch.full((4, 8), 0x77777777, dtype=torch.int32)
    wrong[3, 7] = 0x77777776
    assert "found other words" in problems(qzeros=wrong)[0]


def test_a_shuffled_g_idx_is_found() -> None:
    shuffled = (torch.arange(128, dtype=torch.int32) // 32).flip(0)
    assert problems(g_idx=shuffled) == [
        "layer.q_proj.g_idx: expected k // 32, found another order, which vLLM would ignore"
    ]


def test_negative_scales_are_packed_and_come_back() -> None:
    signed = replace(linear(), scales=linear().scales * torch.tensor([1, -1, -1, 1]))
    assert torch.equal(gptq.unpack(gptq.pack(signed, OPTIONS), CONFIG).dequantize(), signed.dequantize())


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), float("-inf")])
def test_a_scale_that_is_zero_or_not_finite_is_found(value: float) -> None:
    scales = torch.ones(4, 64, dtype=torch.bfloat16)
    scales[1, 2] = value
    assert problems(scales=scales) == ["layer.q_proj.scales: 1 of 256 scales are zero or not finite"]


@pytest.mark.parametrize(
    ("suffix", "tensor"),
    [
        ("qweight", torch.zeros(16, 64, dtype=torch.int64)),
        ("qzeros", torch.full((2, 8), 0x77777777, dtype=torch.int32)),
        ("scales", torch.ones(2, 64, dtype=torch.bfloat16)),
        ("scales", torch.ones(4, 64)),
        ("scales", torch.ones(64, 4, dtype=torch.bfloat16).t()),
        ("g_idx", torch.zeros(128, dtype=torch.int64)),
    ],
)
def test_a_tensor_of_another_dtype_shape_or_stride_is_named(suffix: str, tensor: torch.Tensor) -> None:
    found = problems(**{suffix: tensor})
    assert len(found) == 1 and found[0].startswith(f"layer.q_proj.{suffix}: ")


def test_another_group_size_in_the_configuration_is_found() -> None:
    found = gptq.tensor_problems("x", gptq.pack(linear(), OPTIONS), {**CONFIG, "group_size": 64})
    assert any(line.startswith("x.scales: expected bfloat16 or float16 [2, 64]") for line in found)


def test_missing_and_unknown_tensors_are_named() -> None:
    tensors = gptq.pack(linear(), OPTIONS)
    del tensors["g_idx"]
    tensors["perm"] = torch.zeros(1)
    assert gptq.tensor_problems("x", tensors, CONFIG) == ["x.g_idx: missing", "x.perm: unexpected in this layout"]


def test_the_configuration_is_the_one_that_engines_read() -> None:
    config = gptq.quantization_config(LayoutOptions(128))
    producer, version = config.pop("meta")["quantizer"][0].split(":")
    assert producer == "edge-convert" and version
    assert config == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
        "checkpoint_format": "gptq",
    }


def test_named_modules_are_a_list_of_lists_and_include_a_quantised_head() -> None:
    modules = ("self_attn.q_proj", "mlp.down_proj")
    options = LayoutOptions(64, lm_head=True, kept=("model.layers.0.self_attn.g_proj",), quantized_modules=modules)
    config = gptq.quantization_config(options)
    assert config["modules_in_block_to_quantize"] == [["self_attn.q_proj"], ["mlp.down_proj"], ["lm_head"]]
    assert config["lm_head"] is True


def test_a_kept_linear_that_the_engine_would_take_for_a_quantised_one_is_refused() -> None:
    options = LayoutOptions(64, kept=("model.layers.0.mlp.down_proj",), quantized_modules=("mlp.down_proj",))
    with pytest.raises(BadInput, match="model.layers.0.mlp.down_proj: kept in bf16"):
        gptq.quantization_config(options)


def test_quantize_config_json_repeats_the_configuration() -> None:
    assert gptq.extra_files(CONFIG) == {"quantize_config.json": CONFIG}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_known_layout_is_found_under_its_own_name(name: str) -> None:
    module: Any = layout_of(name)
    assert name == module.FORMAT


def test_an_unknown_layout_is_answered_with_the_known_ones() -> None:
    with pytest.raises(BadInput, match="gguf: unknown layout; known: gptq, awq, tinygemm"):
        layout_of("gguf")
