"""The tinygemm layout against torch's own packing under three instruction sets, and every check on its tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from calibrate.grid import Quantized, ZeroKind
from export import tinygemm
from export.layout import LayoutOptions
from models.errors import BadInput, EnvironmentProblem

GOLDEN = Path(__file__).parents[1] / "golden"
OPTIONS = LayoutOptions(32, "float", isa="avx512")
CONFIG = tinygemm.quantization_config(OPTIONS)
ISAS = sorted(tinygemm.ISAS)


def linear(rows: int = 48, columns: int = 128, size: int = 32, zero: ZeroKind = "float", seed: int = 0) -> Quantized:
    generator = torch.Generator().manual_seed(seed)
    groups = columns // size
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)
    scales = torch.randn(rows, groups, generator=generator).to(torch.bfloat16)
    if zero == "float":
        return Quantized(codes, scales, zeros=torch.randn(rows, groups, generator=generator).to(torch.bfloat16))
    if zero == "integer":
        points = torch.randint(0, 16, (rows, groups), dtype=torch.uint8, generator=generator)
        return Quantized(codes, scales, zero_points=points)
    return Quantized(codes, scales)


def problems(config: dict[str, Any] | None = None, **changed: torch.Tensor) -> list[str]:
    tensors = {**tinygemm.pack(linear(), OPTIONS), **changed}
    return tinygemm.tensor_problems("layer.q_proj", tensors, {**CONFIG, **(config or {})})


@pytest.mark.parametrize("isa", ["avx512", "avx2", "default"])
def test_packs_and_unpacks_the_bytes_that_torch_makes_under_each_instruction_set(isa: str) -> None:
    golden = load_file(GOLDEN / f"tinygemm-{isa}.safetensors")
    cases = sorted({key.rsplit(".", 1)[0] for key in golden})
    assert len(cases) == 7
    for case in cases:
        codes, packed = golden[f"{case}.codes"], golden[f"{case}.packed"]
        assert torch.equal(tinygemm.pack_codes(codes, isa), packed), case
        assert torch.equal(tinygemm.unpack_codes(packed, isa), codes), case


def test_neon_packs_pairs_of_neighbours_in_blocks_of_sixteen() -> None:
    codes = torch.arange(32, dtype=torch.uint8)[:, None].repeat(1, 2) % 16
    codes[:, 1] = 15 - codes[:, 1]
    block = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE, 0xEF, 0xCD, 0xAB, 0x89, 0x67, 0x45, 0x23, 0x01]
    assert tinygemm.pack_codes(codes, "neon").flatten().tolist() == block * 2


def test_fingerprints_never_change_and_tell_all_machines_apart() -> None:
    # Artifacts in the world carry these: changing the fixed codes would make all of them unreadable.
    assert {isa: tinygemm.fingerprint(isa)[:16] for isa in ISAS} == {
        "avx2": "3e888f326668387c",
        "avx512": "e06b8854bef462c1",
        "default": "c7c6aab2eb53c904",
        "neon": "45f84f38d6488350",
    }


def test_the_host_is_recognised_and_packs_as_its_tag_says() -> None:
    codes = linear(80, 64).codes
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 2)
    assert torch.equal(tinygemm.pack_codes(codes, tinygemm.host_isa()), packed)


def test_an_unknown_host_packing_is_an_environment_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    host = tinygemm.host_isa()
    others = {isa: blocks for isa, blocks in tinygemm.ISAS.items() if isa != host}
    monkeypatch.setattr(tinygemm, "ISAS", others)
    with pytest.raises(EnvironmentProblem, match="unknown layout"):
        tinygemm.host_isa()


def test_unpack_agrees_with_the_operator_fed_an_identity() -> None:
    codes = linear(80, 64).codes
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 2)
    table = torch.stack([torch.ones(2, 80), torch.full((2, 80), 8.0)], dim=-1).bfloat16()
    found = torch.ops.aten._weight_int4pack_mm_for_cpu(torch.eye(64).bfloat16(), packed, 32, table)
    assert torch.equal(tinygemm.unpack_codes(packed, tinygemm.host_isa()).t(), found.to(torch.uint8))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 11),
    groups=st.integers(1, 3),
    size=st.sampled_from([32, 64, 128, 256, -1]),
    isa=st.sampled_from(ISAS),
    seed=st.integers(0, 999),
)
def test_unpack_inverts_pack_and_stored_bits_counts_every_bit(
    rows: int, groups: int, size: int, isa: str, seed: int
) -> None:
    columns = 64 if size == -1 else size * groups
    q = linear(16 * rows, columns, columns if size == -1 else size, seed=seed)
    options = LayoutOptions(size, "float", isa=isa)
    tensors = tinygemm.pack(q, options)
    config = tinygemm.quantization_config(options)
    again = tinygemm.unpack(tensors, config)
    assert again.zeros is not None and q.zeros is not None
    assert torch.equal(again.codes, q.codes) and torch.equal(again.scales, q.scales)
    assert torch.equal(again.zeros, q.zeros) and again.grid == q.grid
    assert tinygemm.tensor_problems("x", tensors, config) == []
    assert tinygemm.stored_bits(q.codes.shape[0], columns, size) == 8 * sum(t.nbytes for t in tensors.values())
    assert all(t.is_contiguous() for t in tensors.values()) and tuple(tensors) == tinygemm.SUFFIXES


def test_an_integer_zero_point_is_stored_as_its_rounded_float_zero() -> None:
    q = linear(zero="integer")
    again = tinygemm.unpack(tinygemm.pack(q, OPTIONS), CONFIG)
    assert q.zero_points is not None and again.zeros is not None and again.zero_points is None
    assert torch.equal(again.zeros, ((8.0 - q.zero_points) * q.scales.float()).bfloat16())
    assert len(set(again.zeros.flatten().tolist())) > 50


def test_a_symmetric_grid_is_stored_with_zeros_of_nought() -> None:
    q = linear(zero="none")
    again = tinygemm.unpack(tinygemm.pack(q, OPTIONS), CONFIG)
    assert again.zeros is not None and not again.zeros.any()
    assert torch.equal(again.dequantize(), q.dequantize())


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((48, 128, 32), []),
        ((40, 128, 32), "40 out features: the operator needs a multiple of 16"),
        ((48, 33, -1), "33 in features: the operator needs an even number"),
        ((48, 128, 16), "group size 16: the operator takes 32, 64, 128, 256"),
        ((48, 96, 64), "group size 64 does not divide 96 in features"),
        ((48, 512, -1), "group size 512: the operator takes 32, 64, 128, 256"),
    ],
)
def test_shapes_that_the_operator_refuses_are_named(shape: tuple[int, int, int], expected: str | list[str]) -> None:
    found = tinygemm.shape_problems(*shape)
    assert (found == []) if not expected else (expected in found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": torch.full((48, 128), 16, dtype=torch.uint8)}, "codes: expected 0..15, found 16"),
        ({"scales": torch.ones(48, 2, dtype=torch.bfloat16)}, r"scales: expected \[48, 4\]"),
        ({"scales": torch.ones(48, 4)}, "scales: expected bfloat16"),
        ({"zeros": torch.ones(48, 4)}, "zeros: expected bfloat16"),
        ({"zeros": torch.full((48, 4), torch.nan, dtype=torch.bfloat16)}, "zeros: not finite"),
    ],
)
def test_pack_refuses_what_the_operator_would_not_check(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        tinygemm.pack(replace(linear(), **change), OPTIONS)


def test_tensors_as_packed_have_no_problem() -> None:
    assert problems() == []


def test_an_unknown_machine_tag_is_refused_everywhere() -> None:
    assert "expected one of avx512, avx2, default, neon, found 'vsx'" in problems({"isa": "vsx"})[0]
    with pytest.raises(BadInput, match="vsx"):
        tinygemm.unpack(tinygemm.pack(linear(), OPTIONS), {**CONFIG, "isa": "vsx"})
    with pytest.raises(BadInput, match="'vsx': unknown machine tag"):
        tinygemm.pack(linear(), replace(OPTIONS, isa="vsx"))
    with pytest.raises(BadInput, match="'': unknown machine tag"):
        tinygemm.quantization_config(LayoutOptions(32))


def test_the_fingerprint_of_another_machine_is_refused_and_named() -> None:
    wrong = {"fingerprint": tinygemm.fingerprint("avx2")}
    assert problems(wrong)[0].endswith("of avx2")
    with pytest.raises(BadInput, match="for avx512, found .* of avx2"):
        tinygemm.unpack(tinygemm.pack(linear(), OPTIONS), {**CONFIG, **wrong})


def test_an_unknown_or_absent_fingerprint_is_refused() -> None:
    assert problems({"fingerprint": "0" * 64})[0].endswith("of no known machine")
    assert problems({"fingerprint": None})


def test_too_few_scale_groups_are_found() -> None:
    assert (
        "expected bfloat16 [4, 48, 2], found bfloat16 [3, 48, 2]"
        in problems(scales_and_zeros=torch.zeros(3, 48, 2, dtype=torch.bfloat16))[0]
    )


def test_another_group_size_in_the_configuration_is_found() -> None:
    assert "expected bfloat16 [2, 48, 2]" in problems({"group_size": 64})[0]
    assert "group size 48: the operator takes" in problems({"group_size": 48})[0]


def test_scales_that_are_not_contiguous_are_found() -> None:
    table = torch.zeros(48, 4, 2, dtype=torch.bfloat16).transpose(0, 1)
    assert problems(scales_and_zeros=table) == ["layer.q_proj.scales_and_zeros: not contiguous"]


@pytest.mark.parametrize("part", [0, 1])
def test_a_scale_or_zero_that_is_not_finite_is_found(part: int) -> None:
    table = torch.ones(4, 48, 2, dtype=torch.bfloat16)
    table[1, 2, part] = torch.nan
    assert problems(scales_and_zeros=table) == ["layer.q_proj.scales_and_zeros: not finite"]


@pytest.mark.parametrize(
    "packed",
    [torch.zeros(48, 64, dtype=torch.int8), torch.zeros(48 * 64, dtype=torch.uint8), torch.zeros(40, 64).byte()],
)
def test_packed_weights_of_another_dtype_or_shape_are_found(packed: torch.Tensor) -> None:
    assert len(problems(weight_packed=packed)) == 1


def test_missing_and_unknown_tensors_are_named() -> None:
    tensors = tinygemm.pack(linear(), OPTIONS)
    tensors["scales"] = tensors.pop("scales_and_zeros")
    assert tinygemm.tensor_problems("x", tensors, CONFIG) == [
        "x.scales_and_zeros: missing",
        "x.scales: unexpected in this layout",
    ]


def test_the_configuration_carries_tag_and_fingerprint() -> None:
    options = LayoutOptions(64, "float", lm_head=True, kept=("lm_head.adapter",), isa="neon")
    assert tinygemm.quantization_config(options) == {
        "quant_method": "tinygemm",
        "bits": 4,
        "group_size": 64,
        "isa": "neon",
        "fingerprint": tinygemm.fingerprint("neon"),
        "lm_head": True,
        "modules_to_not_convert": ["lm_head.adapter"],
    }
    assert tinygemm.extra_files(CONFIG) == {}
