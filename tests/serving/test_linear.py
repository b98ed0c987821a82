"""Packed linears at run time: shards, the two paths, and everything that the operator does not check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from calibrate.grid import Quantized
from export import tinygemm
from export.layout import LayoutOptions
from export.serving import linear
from models.errors import BadInput

ISAS = sorted(tinygemm.ISAS)
AVX2 = tinygemm.quantization_config(LayoutOptions(32, isa="avx2"))
# Heads of q, k and v; whole blocks everywhere; a tail in front, in the middle, at the end.
SHARDS = [(64,), (80,), (64, 64), (128, 32, 32), (48, 64), (64, 48, 64), (16, 16, 16), (192, 64, 80), (112, 16)]


def quantized(rows: int = 80, columns: int = 128, size: int = 32, seed: int = 0) -> Quantized:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)
    scales, zeros = torch.randn(2, rows, columns // size, generator=generator).to(torch.bfloat16)
    return Quantized(codes, scales, zeros)


def config(**changes: Any) -> dict[str, Any]:
    return {**tinygemm.quantization_config(LayoutOptions(32, isa=linear.host())), **changes}


def packed(q: Quantized, isa: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return tinygemm.pack_codes(q.codes, isa or linear.host()), tinygemm.scales_and_zeros(q)


def operator_calls(action: Callable[[], object]) -> int:
    """How often an action calls torch's int4 operator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        action()
    return sum(event.name == "aten::_weight_int4pack_mm_for_cpu" for event in profile.events())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("target", ISAS)
@pytest.mark.parametrize("rows", SHARDS, ids=str)
def test_stacked_shards_equal_the_packed_stack(rows: tuple[int, ...], isa: str, target: str) -> None:
    codes = [quantized(count, 64, seed=index).codes for index, count in enumerate(rows)]
    stored = torch.cat([tinygemm.pack_codes(part, isa) for part in codes])
    stacked = tinygemm.restack(stored, rows, isa, target)
    assert torch.equal(stacked, tinygemm.pack_codes(torch.cat(codes), target))


@pytest.mark.parametrize("isa", ISAS)
def test_bytes_that_are_right_already_are_not_copied(isa: str) -> None:
    size = tinygemm.ISAS[isa].size
    stored = torch.cat([tinygemm.pack_codes(quantized(rows, 64).codes, isa) for rows in (2 * size, 80)])
    assert tinygemm.restack(stored, (2 * size, 80), isa, isa) is stored


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [16, 64, 80, 128, 144])
@pytest.mark.parametrize("size", [32, 128])
def test_the_fast_dequantisation_equals_the_plain_one(isa: str, rows: int, size: int) -> None:
    q = quantized(rows, 256, size)
    weight = tinygemm.dequantize_packed(tinygemm.pack_codes(q.codes, isa), tinygemm.scales_and_zeros(q), isa)
    assert torch.equal(weight, q.dequantize(torch.bfloat16))


@pytest.mark.parametrize("rows", [80, 1024, 1040])
def test_a_single_row_takes_the_operator_and_wider_inputs_the_gemm(rows: int) -> None:
    q = quantized(rows, 256)
    weights = packed(q)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    assert operator_calls(lambda: [linear.multiply(row[None], *weights, 32) for row in x]) == 5
    assert operator_calls(lambda: linear.multiply(x, *weights, 32)) == 0
    single = torch.cat([linear.multiply(row[None], *weights, 32) for row in x])
    wide = linear.multiply(x, *weights, 32)
    exact = x.double() @ q.dequantize(torch.bfloat16).double().t()
    # The GEMM rounds its result once; the operator computes in bf16 inside, 1.6e-3 of the norm.
    assert (wide - exact).norm() / exact.norm() < 2e-3
    assert (single - exact).norm() / exact.norm() < 4e-3


def test_the_gemm_equals_a_linear_with_the_expanded_weight() -> None:
    q = quantized(1104, 256)
    x = torch.randn(7, 256).to(torch.bfloat16)
    expected = torch.nn.functional.linear(x, q.dequantize(torch.bfloat16))
    assert torch.allclose(linear.multiply(x, *packed(q), 32).float(), expected.float(), rtol=2**-7, atol=1e-2)


def test_rows_are_flattened_and_a_bias_is_added() -> None:
    q = quantized()
    x, bias = torch.randn(2, 3, 128).to(torch.bfloat16), torch.randn(80).to(torch.bfloat16)
    y = linear.forward(x, *packed(q), 32, bias)
    assert torch.equal(y, linear.multiply(x.view(6, 128), *packed(q), 32, bias).view(2, 3, 80))
    exact = x.double() @ q.dequantize(torch.bfloat16).double().t() + bias.double()
    for found in (y, torch.stack([linear.forward(row, *packed(q), 32, bias) for row in x.view(6, 1, 128)])):
        assert (found.view(2, 3, 80) - exact).norm() / exact.norm() < 4e-3
    assert linear.forward(x[:, :0], *packed(q), 32, bias).shape == (2, 0, 80)
    whole = quantized(size=128)
    single = linear.forward(x[:1, :1], *packed(whole), -1, None)
    assert torch.equal(single, linear.multiply(x[0, :1], *packed(whole), 128)[None])


def test_an_input_that_is_not_contiguous_gives_the_same() -> None:
    weights = packed(quantized())
    x = torch.randn(1, 256).to(torch.bfloat16)
    assert torch.equal(linear.multiply(x[:, ::2], *weights, 32), linear.multiply(x[:, ::2].contiguous(), *weights, 32))


def test_the_operation_is_one_node_of_a_traced_graph() -> None:
    nodes: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    weights = packed(quantized())
    compiled = torch.compile(lambda x: linear.forward(x, *weights, 32, None), backend=backend, dynamic=True)
    for rows in (4, 1):
        x = torch.randn(rows, 128).to(torch.bfloat16)
        assert torch.equal(compiled(x), linear.forward(x, *weights, 32, None))
    assert any("edge_convert.tinygemm" in node for node in nodes)
    assert not any("int4pack" in node or node == "mm" for node in nodes)


@pytest.mark.parametrize(
    "x", [torch.zeros(1, 128), torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(128, dtype=torch.bfloat16)]
)
def test_another_input_is_refused(x: torch.Tensor) -> None:
    with pytest.raises(BadInput, match="input of a tinygemm linear: expected bfloat16"):
        linear.multiply(x, *packed(quantized()), 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"isa": "sse9"}, "isa: expected one of"),
        ({"isa": None}, "isa: expected one of"),
        ({"fingerprint": "0" * 64}, "fingerprint: expected .* of no known machine"),
        ({"fingerprint": tinygemm.fingerprint("neon")}, "fingerprint: expected .* of neon"),
        ({"bits": 8}, "bits: expected 4, found 8"),
        ({"group_size": 16}, "group_size: expected 32, 64, 128, 256 or -1, found 16"),
        ({"group_size": None}, "group_size: expected"),
    ],
)
def test_a_configuration_that_cannot_be_believed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        linear.check_config({**AVX2, **changes})
    linear.check_config(AVX2)


def test_what_the_operator_would_read_wrongly_is_refused() -> None:
    codes, table = packed(quantized())
    linear.check_linear("layer", codes, table, config())
    strided = torch.stack([table, table], dim=-1)[..., 0]
    infinite = table.clone()
    infinite[0, 0, 0] = torch.inf
    for wrong_codes, wrong_table, changes, message in (
        (codes, table[:-1], {}, r"layer.scales_and_zeros: expected .*\[4, 80, 2\]"),
        (codes, table, {"group_size": 64}, r"layer.scales_and_zeros: expected .*\[2, 80, 2\]"),
        (codes, table.float(), {}, "layer.scales_and_zeros: expected bfloat16"),
        (codes, strided, {}, "layer.scales_and_zeros: not contiguous"),
        (codes.t().contiguous().t(), table, {}, "layer.weight_packed: not contiguous"),
        (codes.to(torch.int8), table, {}, "layer.weight_packed: expected uint8"),
        (codes[:72], table[:, :72].contiguous(), {}, "72 out features"),
        (codes, infinite, {}, "layer.scales_and_zeros: not finite"),
    ):
        with pytest.raises(BadInput, match=message):
            linear.check_linear("layer", wrong_codes, wrong_table, config(**changes))
