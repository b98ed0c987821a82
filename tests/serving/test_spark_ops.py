"""Spark-X2.5's small operations against the reference implementation."""

from __future__ import annotations

import pytest
import torch

import models.spark2_5 as reference
from export.serving import spark_ops


def bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize("layer_type", ["sliding_attention", "full_attention"])
def test_the_rotation_is_the_references(layer_type: str) -> None:
    config = reference.Spark2_5Config(num_hidden_layers=4, head_dim=32)
    positions = torch.tensor([0, 1, 511, 70_000, 1_000_000])
    cos, sin = reference.Spark2_5RotaryEmbedding(config)(positions[None], layer_type)
    x = bf16(5, 3, 32)
    expected = reference.rotate(x.transpose(0, 1)[None], cos, sin)[0].transpose(0, 1)
    half = cos.shape[-1] // 2
    assert torch.equal(spark_ops.rotate(x, cos[0, :, None, :half], sin[0, :, None, :half]), expected)


def test_the_norm_is_the_references() -> None:
    norm = reference.Spark2_5RMSNorm(128, 1e-6).to(torch.bfloat16)
    norm.weight.data.copy_(bf16(128, seed=1))
    x = 100 * bf16(6, 128).float()
    assert torch.equal(spark_ops.rms_norm(x, norm.weight, 1e-6), norm(x))


@pytest.mark.parametrize("way", ["traced", "operator"])
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_the_reductions_are_as_good_as_the_projection(tokens: int, way: str) -> None:
    x, weight = bf16(tokens, 2048), bf16(8, 2048, seed=1)
    exact = x.double() @ weight.double().t()
    plain, reduced = spark_ops.gate_scores(x, weight), spark_ops.GATES[way](x, weight.float())
    compiled = torch.compile(spark_ops.GATES[way], backend="aot_eager", fullgraph=True)(x, weight.float())
    for found in (plain, reduced, compiled):
        assert found.dtype == torch.bfloat16
        assert torch.allclose(found.double(), exact, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("activation", sorted(reference.GATE_ACTIVATIONS))
def test_the_gate_scales_each_head_in_fp32(activation: str) -> None:
    output, scores = bf16(3, 4, 16), bf16(3, 4, seed=1)
    gate = reference.GATE_ACTIVATIONS[activation](scores.float()).to(torch.bfloat16)
    assert torch.equal(spark_ops.apply_gate(output, scores, activation), output * gate[..., None])


def test_the_operator_is_one_node_of_a_traced_graph_and_the_traced_form_is_not() -> None:
    nodes: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    x, weight = bf16(1, 64), bf16(8, 64, seed=1).float()
    for way, inside in (("operator", True), ("traced", False)):
        nodes.clear()
        torch.compile(spark_ops.GATES[way], backend=backend, fullgraph=True)(x, weight)
        assert any("gate_scores" in node for node in nodes) == inside, nodes
