"""Int8 weights on disk: what a runtime's DequantizeLinear reads is what calibration chose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from calibrate.grid import Grid, Quantized
from calibrate.search import search
from export.phone.int8 import pack, unpack
from models.errors import BadInput


def linear(rows: int, columns: int, seed: int = 0) -> Quantized:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return search(weight, Grid(columns, dtype=torch.float32, bits=8))


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 5))
def test_unpacking_gives_back_what_was_packed(rows: int, columns: int, seed: int) -> None:
    quantized = linear(rows, columns, seed)
    again = unpack(*pack(quantized))
    assert torch.equal(again.codes, quantized.codes) and torch.equal(again.scales, quantized.scales)
    assert again.bits == 8


def test_a_runtime_reads_the_same_numbers() -> None:
    quantized = linear(24, 40)
    codes, scales = pack(quantized)
    node = helper.make_node("DequantizeLinear", ["codes", "scales"], ["weight"], axis=1)
    output = helper.make_tensor_value_info("weight", TensorProto.FLOAT, [40, 24])
    constants = [numpy_helper.from_array(codes, "codes"), numpy_helper.from_array(scales, "scales")]
    graph = helper.make_graph([node], "dequantize", [], [output], constants)
    (found,) = ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])).run(None, {})
    assert np.array_equal(found, quantized.dequantize(torch.float32).numpy().T)


@pytest.mark.parametrize("grid", [Grid(16), Grid(16, dtype=torch.float32, bits=8)], ids=["4 bits", "groups"])
def test_another_grid_is_no_phone_weight(grid: Grid) -> None:
    with pytest.raises(ValueError, match="expected one fp32 scale per output channel and 8 bits"):
        pack(search(torch.randn(4, 32), grid))


def test_damaged_codes_and_scales_are_explained() -> None:
    codes, scales = pack(linear(4, 8))
    wrong = scales.copy()
    wrong[2] = np.nan
    with pytest.raises(BadInput, match="scales: expected positive finite ones"):
        unpack(codes, wrong)
    with pytest.raises(BadInput, match="codes: expected -127..127, found -128"):
        unpack(np.full_like(codes, -128), scales)
    with pytest.raises(
        BadInput, match=r"expected int8 \[K, N\] and float32 \[N\], found int8 \(8, 4\), float32 \(3,\)"
    ):
        unpack(codes, scales[:3])
