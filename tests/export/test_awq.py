"""The AWQ layout against AutoAWQ's way of unpacking, and every check on its tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.grid import Quantized
from export import awq
from export.layout import LayoutOptions
from models.errors import BadInput

OPTIONS = LayoutOptions(32, "integer")
CONFIG = awq.quantization_config(OPTIONS)


def linear(rows: int = 64, columns: int = 128, size: int = 32, seed: int = 0) -> Quantized:
    generator = torch.Generator().manual_seed(seed)
    groups = columns // size
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(rows, groups, generator=generator) + 0.01).to(torch.bfloat16)
    points = torch.randint(0, 16, (rows, groups), dtype=torch.uint8, generator=generator)
    return Quantized(codes, scales, zero_points=points)


def autoawq_unpack(words: torch.Tensor) -> torch.Tensor:
    """As AutoAWQ's reference does: nibbles from the low end, then columns picked by its reverse order."""
    shifts = torch.arange(0, 32, 4)
    nibbles = torch.bitwise_right_shift(words[:, :, None], shifts[None, None, :]).view(words.shape[0], -1)
    reverse_order = torch.arange(nibbles.shape[-1]).view(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].reshape(-1)
    return torch.bitwise_and(nibbles[:, reverse_order], 15).to(torch.uint8)


def problems(**changed: torch.Tensor) -> list[str]:
    return awq.tensor_problems("layer.q_proj", {**awq.pack(linear(), OPTIONS), **changed}, CONFIG)


def test_autoawq_unpacks_the_codes_and_zero_points_that_were_packed() -> None:
    q = linear()
    tensors = awq.pack(q, OPTIONS)
    assert tensors["qweight"].dtype == torch.int32 and tensors["qweight"].shape == (128, 8)
    assert torch.equal(autoawq_unpack(tensors["qweight"]), q.codes.t())
    assert q.zero_points is not None
    assert torch.equal(autoawq_unpack(tensors["qzeros"]), q.zero_points.t())
    assert torch.equal(tensors["scales"], q.scales.t())


def test_a_word_holds_eight_channels_in_the_gemm_order() -> None:
    codes = torch.arange(32, dtype=torch.uint8)[:, None].expand(32, 32) % 8
    q = Quantized(codes.contiguous(), torch.ones(32, 1).bfloat16(), zero_points=torch.zeros(32, 1, dtype=torch.uint8))
    assert awq.pack(q, OPTIONS)["qweight"][0, 0] == 0x75316420


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 4), groups=st.integers(1, 4), size=st.sampled_from([32, 64, 128, -1]), seed=st.integers(0, 999)
)
def test_unpack_inverts_pack_and_stored_bits_counts_every_bit(rows: int, groups: int, size: int, seed: int) -> None:
    columns = 32 * groups if size == -1 else size * groups
    q = linear(32 * rows, columns, columns if size == -1 else size, seed)
    options = LayoutOptions(size, "integer")
    tensors = awq.pack(q, options)
    config = awq.quantization_config(options)
    again = awq.unpack(tensors, config)
    assert again.zero_points is not None and q.zero_points is not None
    assert torch.equal(again.codes, q.codes) and torch.equal(again.scales, q.scales)
    assert torch.equal(again.zero_points, q.zero_points) and again.grid == q.grid
    assert awq.tensor_problems("x", tensors, config) == []
    assert awq.stored_bits(q.codes.shape[0], columns, size) == 8 * sum(t.nbytes for t in tensors.values())
    assert all(t.is_contiguous() for t in tensors.values()) and tuple(tensors) == awq.SUFFIXES


@pytest.mark.parametrize("shape", [(48, 128, 32), (64, 80, -1), (64, 128, 16), (64, 96, 64), (64, 576, -1)])
def test_shapes_that_the_engine_refuses_are_named(shape: tuple[int, int, int]) -> None:
    assert awq.shape_problems(*shape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": torch.full((64, 128), 16, dtype=torch.uint8)}, "codes: expected 0..15, found 16"),
        ({"zero_points": torch.full((64, 4), 16, dtype=torch.uint8)}, "zero_points: expected 0..15, found 16"),
        ({"zero_points": torch.zeros((64, 3), dtype=torch.uint8)}, r"zero_points: expected \[64, 4\]"),
        ({"scales": torch.ones(64, 3, dtype=torch.bfloat16)}, r"scales: expected \[64, 4\]"),
        ({"zero_points": None}, "zero: expected one of integer, found none"),
        (
            {"zero_points": None, "zeros": torch.zeros(64, 4, dtype=torch.bfloat16)},
            "zero: expected one of integer, found float",
        ),
    ],
)
def test_pack_refuses_what_the_layout_cannot_hold(change: dict[str, torch.Tensor | None], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        awq.pack(replace(linear(), **change), OPTIONS)  # type: ignore[arg-type]


def test_tensors_as_packed_have_no_problem() -> None:
    assert problems() == []


@pytest.mark.parametrize(
    ("suffix", "tensor"),
    [
        ("qweight", torch.zeros(128, 8, dtype=torch.int64)),
        ("qweight", torch.zeros(128, 12, dtype=torch.int32)),
        ("qzeros", torch.zeros(4, 64, dtype=torch.int32)),
        ("scales", torch.ones(2, 64, dtype=torch.bfloat16)),
        ("scales", torch.ones(64, 4, dtype=torch.bfloat16).t()),
        ("scales", torch.zeros(4, 64, dtype=torch.bfloat16)),
    ],
)
def test_a_wrong_tensor_is_found(suffix: str, tensor: torch.Tensor) -> None:
    assert any("layer.q_proj" in line for line in problems(**{suffix: tensor}))


def test_another_group_size_in_the_configuration_is_found() -> None:
    found = awq.tensor_problems("x", awq.pack(linear(), OPTIONS), {**CONFIG, "group_size": 64})
    assert any(line.startswith("x.scales: expected bfloat16 or float16 [2, 64]") for line in found)


def test_missing_and_unknown_tensors_are_named() -> None:
    tensors = awq.pack(linear(), OPTIONS)
    del tensors["qzeros"]
    tensors["g_idx"] = torch.zeros(1)
    assert awq.tensor_problems("x", tensors, CONFIG) == ["x.qzeros: missing", "x.g_idx: unexpected in this layout"]


def test_the_configuration_is_the_one_that_engines_read() -> None:
    options = LayoutOptions(64, "integer", lm_head=True, kept=("model.layers.0.self_attn.g_proj",))
    assert awq.quantization_config(options) == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "zero_point": True,
        "version": "gemm",
        "lm_head": True,
        "modules_to_not_convert": ["model.layers.0.self_attn.g_proj"],
    }
    assert awq.quantization_config(LayoutOptions(64))["modules_to_not_convert"] is None
    assert awq.extra_files(CONFIG) == {}
