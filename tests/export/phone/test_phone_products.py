"""Products of activations: which they are, and on which grids their sides are."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType

from calibrate.ranges import Range, Ranges
from export.phone.products import joined_caches, products, signed_overrides, span_new_entries
from export.phone.quantize import tied_tensors


def attention() -> onnx.ModelProto:
    """Queries by keys: the new key is cut from a projection with an int8 weight to be."""
    nodes = [
        helper.make_node("MatMul", ["hidden", "weight"], ["fused"], "projection"),
        helper.make_node("Split", ["fused"], ["query", "new"], "cut", axis=1, num_outputs=2),
        helper.make_node("Concat", ["past", "new"], ["whole"], "join", axis=1),
        helper.make_node("MatMul", ["query", "whole"], ["scores"], "scores"),
        helper.make_node("Concat", ["mask", "mask"], ["masks"], "rows", axis=0),
        helper.make_node("Add", ["scores", "masks"], ["masked"], "add"),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in ("hidden", "past", "mask")]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in ("masked", "new")]
    weight = numpy_helper.from_array(np.zeros((4, 8), dtype=np.float32), "weight")
    return helper.make_model(helper.make_graph(nodes, "attention", inputs, outputs, [weight]))


def seen() -> Ranges:
    ranges = Ranges()
    for name, low, high in (("fused", -9, 8), ("query", -9, 8), ("new", -3, 2), ("past", -1, 2), ("whole", -1, 2)):
        ranges.add(name, low, high)
    return ranges


def test_a_product_with_a_weight_is_none_of_activations_and_a_mask_is_no_cache() -> None:
    assert [node.name for node in products(attention())] == ["scores"]
    assert [(cache.past, cache.new, cache.whole) for cache in joined_caches(attention())] == [("past", "new", "whole")]


def test_a_caches_grid_spans_new_entries_and_not_what_they_were_cut_from() -> None:
    model, ranges = attention(), seen()
    span_new_entries(model, ranges)
    ranges.tie([name for name in group if name in ranges.by_name] for group in tied_tensors(model))
    assert ranges.by_name["past"] == ranges.by_name["whole"] == Range(-3, 2)
    assert ranges.by_name["new"] == ranges.by_name["fused"] == Range(-9, 8)
    overrides = signed_overrides(model, ranges, "uint16")
    assert overrides.keys() == {"past", "whole", "new", "query"}
    (cache,), (new,), (query,) = (overrides[name] for name in ("past", "new", "query"))
    assert cache == overrides["whole"][0] == new["convert"]
    assert (cache["quant_type"], cache["symmetric"]) == (QuantType.QInt16, True)
    assert (float(cache["rmin"]), float(cache["rmax"])) == (-3, 2)
    # Only the product takes the query's signed codes.
    assert query["convert"]["recv_nodes"] == {"scores"} and "rmin" not in query["convert"]
