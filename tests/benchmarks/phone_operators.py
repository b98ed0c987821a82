"""What every operator of a phone artifact loses in Qualcomm's simulator, each by itself:

    python tests/benchmarks/phone_operators.py output/phone .venv-engines/bin/python

All operators of the decode graphs become one graph of operators that share nothing: each takes the codes that ONNX
Runtime computes for it on the CPU in the middle of a text, and gives codes that are compared with the CPU's. First come
products of two random activations in the forms that they could have in a graph.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
TOKENS, STEPS = 40, 4
Values = dict[str, np.ndarray]


def simulate(folder: Path) -> None:
    """Runs ``model.onnx`` on ``feeds.npz`` in the simulator; runs in the engine's interpreter."""
    sys.path.insert(0, str(ROOT / "validate" / "engines" / "workers"))
    from qnn_session import compiled

    session = compiled(folder / "model.onnx")
    names = [output.name for output in session.get_outputs()]
    results = session.run(None, dict(np.load(folder / "feeds.npz")))
    np.savez(folder / "results.npz", **dict(zip(names, results, strict=True)))


def simulated(python: str, model: Any, feeds: Values) -> Values:
    """The simulator's outputs of a model, by name."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "model.onnx").write_bytes(model.SerializeToString())
        np.savez(Path(scratch) / "feeds.npz", **feeds)
        subprocess.run([python, __file__, "--simulate", scratch], check=True)
        return dict(np.load(Path(scratch) / "results.npz"))


def on_cpu(model: Any, feeds: Values) -> Values:
    """ONNX Runtime's outputs, its optimisations off."""
    from validate.engines.workers.phone_host import cpu_session

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.onnx"
        path.write_bytes(model.SerializeToString())
        session = cpu_session(path)
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(None, feeds), strict=True))


def decibels(expected: np.ndarray, found: np.ndarray) -> float:
    """Of codes around their zero point; 200 for equal ones."""
    noise = np.square(expected - found).sum()
    return min(200.0, float(10 * np.log10(np.square(expected).sum() / noise))) if noise else 200.0


def product(left: str, right: str, converted: bool) -> tuple[Any, Values, np.ndarray]:
    """A product of random activations in two dtypes, unsigned ones around the middle of their range.

    Args:
        converted: whether both are converted to int16 inside the graph.

    Returns:
        The graph, what it takes, and the codes of the exact result.
    """
    import onnx
    from onnx import helper, numpy_helper

    random = np.random.default_rng(0)
    shapes = {"left": (1, 2, 8, 64), "right": (1, 2, 64, 128)}
    reals = {name: random.standard_normal(shape) for name, shape in shapes.items()}
    nodes, constants, feeds = [], [], {}
    inputs, sides = [], []

    def grid(name: str, values: np.ndarray, dtype: str) -> list[str]:
        signed, limit = dtype.startswith("int"), np.iinfo(dtype).max
        zero = 0 if signed else (limit + 1) // 2
        scale = np.float32(np.abs(values).max() / (limit if signed else limit // 2))
        constants.append(numpy_helper.from_array(np.array(scale), f"{name}_scale"))
        constants.append(numpy_helper.from_array(np.array(zero, dtype=dtype), f"{name}_zero"))
        feeds[name] = np.clip(np.rint(values / scale) + zero, 0 if not signed else -limit, limit).astype(dtype)
        return [f"{name}_scale", f"{name}_zero"]

    def pair(source: str, name: str, of: list[str]) -> str:
        nodes.append(helper.make_node("QuantizeLinear", [source, *of], [name], name=f"{name}/Q"))
        nodes.append(helper.make_node("DequantizeLinear", [name, *of], [f"{name}_real"], name=f"{name}/DQ"))
        return f"{name}_real"

    for name, dtype in (("left", left), ("right", right)):
        type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        inputs.append(helper.make_tensor_value_info(name, type, shapes[name]))
        given = grid(name, reals[name], dtype)
        nodes.append(helper.make_node("DequantizeLinear", [name, *given], [f"{name}_real"], name=f"{name}/DQ"))
        side = f"{name}_real"
        if converted and dtype != "int16":
            side = pair(side, f"{name}_converted", grid(f"{name}_converted", reals[name], "int16"))
        sides.append(side)
    result = reals["left"] @ reals["right"]
    nodes.append(helper.make_node("MatMul", sides, ["product_real"], name="product"))
    last = grid("product", result, "uint16")
    nodes.append(helper.make_node("QuantizeLinear", ["product_real", *last], ["product"], name="product/Q"))
    output = helper.make_tensor_value_info("product", onnx.TensorProto.UINT16, result.shape)
    graph = helper.make_graph(nodes, "product", inputs, [output], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    exact = feeds["product"]
    return onnx.shape_inference.infer_shapes(model), {name: feeds[name] for name in shapes}, exact


def seen(folder: Path) -> dict[str, Values]:
    """What every decode graph of an artifact takes for a token in the middle of a text."""
    from export.phone.artifact import PhoneArtifact
    from export.phone.expand import PhoneExpansion
    from models.tokenizer import load_tokenizer
    from validate.engines.workers.phone_host import Host, cpu_session

    feeds: dict[str, Values] = {}

    class Watched:
        def __init__(self, path: Path) -> None:
            self.path, self.session = path, cpu_session(path)

        def run(self, _: None, given: Mapping[str, np.ndarray]) -> Any:
            feeds[self.path.name] = {name: value.copy() for name, value in given.items()}
            return self.session.run(None, dict(given))

    text = (ROOT / "examples" / "text" / "evaluation.txt").read_text(encoding="utf-8")[:2000]
    tokenizer = load_tokenizer(PhoneExpansion(PhoneArtifact(folder)))
    ids = np.array(tokenizer(text, add_special_tokens=False).input_ids[:TOKENS])
    Host(folder, Watched).score(ids, STEPS)  # type: ignore[arg-type]
    return feeds


def operators(folder: Path, file: str, feeds: Values) -> tuple[Any, Values, dict[str, str]]:
    """A graph of a graph's operators, each by itself.

    Returns:
        The graph, what it takes, and by the name of an output the operator's type and its module's name.
    """
    import onnx
    from onnx import helper

    model = onnx.load(folder / file)
    graph = model.graph
    constants = {tensor.name for tensor in graph.initializer}
    values = {value.name: value for value in [*graph.input, *graph.value_info, *graph.output]}
    producers = {name: node for node in graph.node for name in node.output}
    quantizers = {node.input[0]: node for node in graph.node if node.op_type == "QuantizeLinear"}
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    present = {output.name for output in graph.output}
    whole.graph.output.extend(values[n.output[0]] for n in quantizers.values() if n.output[0] not in present)
    known = feeds | on_cpu(whole, feeds)
    nodes: list[Any] = []
    inputs: dict[str, Any] = {}
    outputs, what = [], {}
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            continue
        alone = onnx.NodeProto()
        alone.CopyFrom(node)
        for index, name in enumerate(node.input):
            source = producers.get(name)
            if source is None:
                inputs |= {} if name in constants else {name: values[name]}
                continue
            assert source.op_type == "DequantizeLinear", f"{node.name} reads {name} in float"
            inputs |= {} if source.input[0] in constants else {source.input[0]: values[source.input[0]]}
            alone.input[index] = f"{node.name}<{index}"
            copy = onnx.NodeProto()
            copy.CopyFrom(source)
            copy.name, copy.output[0] = f"{node.name}/DQ{index}", alone.input[index]
            nodes.append(copy)
        alone.output[:] = [f"{node.name}>{index}" for index in range(len(node.output))]
        nodes.append(alone)
        for index, name in enumerate(node.output):
            quantizer = quantizers[name]
            codes = f"{node.name}>{index}_codes"
            grid = list(quantizer.input[1:])
            nodes.append(helper.make_node("QuantizeLinear", [alone.output[index], *grid], [codes], name=f"{codes}/Q"))
            value = onnx.ValueInfoProto()
            value.CopyFrom(values[quantizer.output[0]])
            value.name = codes
            outputs.append(value)
            module = re.sub(r"[.]\d+[.]", ".N.", node.name)
            what[codes] = f"{node.op_type:18} {module}"
    cut = helper.make_graph(nodes, "operators", list(inputs.values()), outputs, list(graph.initializer))
    made = helper.make_model(cut, opset_imports=list(model.opset_import), ir_version=model.ir_version)
    return made, {name: known[name] for name in inputs}, what


def main(folder: Path, python: str) -> None:
    sys.path.insert(0, str(ROOT))
    print(f"{'a product of two activations, dB':44} {'CPU':>6} {'HTP':>6}")
    forms = [("uint16", "uint16", False), ("uint16", "uint8", False), ("uint16", "uint16", True)]
    forms += [("uint16", "int16", True), ("int16", "int16", False)]
    for left, right, converted in forms:
        model, feeds, exact = product(left, right, converted)
        both = (values["product"] for values in (on_cpu(model, feeds), simulated(python, model, feeds)))
        kept = [decibels(exact - 32768.0, found - 32768.0) for found in both]
        label = f"{left} x {right}{', converted to int16' if converted else ''}"
        print(f"{label:44} {kept[0]:6.1f} {kept[1]:6.1f}")
    rows: dict[str, list[float]] = {}
    for file, given in seen(folder).items():
        if not file.startswith("decode"):
            continue
        model, feeds, what = operators(folder, file, given)
        zeros = zero_points(model)
        expected_codes, found_codes = on_cpu(model, feeds), simulated(python, model, feeds)
        for name, kind in what.items():
            reals = (codes[name].astype(float) - zeros[name] for codes in (expected_codes, found_codes))
            rows.setdefault(kind, []).append(decibels(*reals))
    print(f"\n{'operator':78} {'count':>5} {'worst dB':>9} {'mean':>6}")
    for kind, found_decibels in sorted(rows.items(), key=lambda row: min(row[1])):
        print(f"{kind:78} {len(found_decibels):5} {min(found_decibels):9.1f} {np.mean(found_decibels):6.1f}")


def zero_points(model: Any) -> dict[str, int]:
    """Of every output of `operators`."""
    from onnx import numpy_helper

    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    quantizers = (node for node in model.graph.node if node.op_type == "QuantizeLinear")
    return {node.output[0]: int(numpy_helper.to_array(constants[node.input[2]])) for node in quantizers}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    if sys.argv[1] == "--simulate":
        simulate(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]), sys.argv[2])
