"""Float graphs that also tell what their activations span, run on real text: prefill chunks, then decode steps.

Parts run one after another, each on the states that the part before it gave for the whole text, so only one part's
weights are ever in memory; which tensor spans what is committed part by part, so a killed run repeats one at most.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper
from safetensors.torch import load_file

from calibrate.ranges import Ranges
from calibrate.results import save_tensors
from export.phone.files import load_graph
from export.phone.manifest import Manifest
from export.phone.options import STEPS
from models.errors import BadInput
from models.files import replace_file, to_json

LOW, HIGH = "<low", "<high"
# A step of a text: ``prefill`` or ``decode``, how many tokens it has, and the states that enter a part.
Step = tuple[str, int, np.ndarray]
OpenSession = Callable[[Path], Any]
# (folder, part's index, how graphs are opened) -> what the part makes of a text's states, step by step. It is the host
# loop that engines run too (`validate.engines.workers.phone_host.PartDriver`), which this package does not import.
OpenPart = Callable[[Path, int, OpenSession], Callable[[Sequence[Step]], list[np.ndarray]]]
Progress = Callable[[str, int, int], None]


def observed(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with two more outputs for every float activation: its smallest and its largest value.

    Args:
        model: a float graph with the shape of every tensor; external weights stay where they are.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for name in activations(model):
        for suffix, operator in ((LOW, "ReduceMin"), (HIGH, "ReduceMax")):
            copy.graph.node.append(helper.make_node(operator, [name], [name + suffix], keepdims=0))
            copy.graph.output.append(helper.make_tensor_value_info(name + suffix, TensorProto.FLOAT, []))
    return copy


def activations(model: onnx.ModelProto) -> list[str]:
    """Every float tensor of a float graph that is no constant, in the order of computation."""
    graph = model.graph
    types = {v.name: v.type.tensor_type.elem_type for v in [*graph.input, *graph.value_info, *graph.output]}
    constants = {tensor.name for tensor in graph.initializer}
    names = [*(value.name for value in graph.input), *(name for node in graph.node for name in node.output)]
    return [name for name in names if name not in constants and types[name] == TensorProto.FLOAT]


class ObservedSession:
    """Runs an observed graph; the caller sees the graph's own outputs, and ``ranges`` all others."""

    def __init__(self, path: Path, ranges: Ranges, threads: int) -> None:
        model = load_graph(path.parent, path.name)
        self.outputs, self.ranges = len(model.graph.output), ranges
        # In the same folder: its weights are beside it.
        file = path.with_name(f"observed-{path.name}")
        file.write_bytes(observed(model).SerializeToString())
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Else every session holds a second copy of its weights, in another layout.
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        self.names = [output.name for output in self.session.get_outputs()]

    def run(self, _: None, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """As onnxruntime's sessions. Raises BadInput naming an activation that is not finite."""
        results: list[np.ndarray] = self.session.run(None, dict(feeds))
        found = dict(zip(self.names[self.outputs :], results[self.outputs :], strict=True))
        for name, value in found.items():
            if name.endswith(LOW):
                tensor = name.removesuffix(LOW)
                self.ranges.add(tensor, float(value), float(found[tensor + HIGH]))
        return results[: self.outputs]


def text_steps(window: np.ndarray, manifest: Manifest, steps: int = STEPS) -> list[Step]:
    """A text int [tokens] as whole chunks and then ``steps`` decode steps; what is left over at the end is not used.

    No chunk is padded: a padding token's activations are none that matter, but they would be spanned.

    Raises:
        BadInput: for a text that is too short for one chunk and the steps, or too long for the context.
    """
    size = manifest.prefill
    chunks = (len(window) - steps) // size
    if chunks < 1 or chunks * size + steps > manifest.context:
        raise BadInput(
            f"calibration: sequence_length: expected {size + steps} (a prefill chunk and {steps} decode steps) to"
            f" {manifest.context} tokens (the context), found {len(window)}"
        )
    ids = window.astype(np.int32)[None]
    prefill: list[Step] = [("prefill", size, ids[:, i * size : (i + 1) * size]) for i in range(chunks)]
    start = chunks * size
    return prefill + [("decode", 1, ids[:, i : i + 1]) for i in range(start, start + steps)]


class Observations:
    """A folder of what was seen of each part: its ranges, and the states that enter the next part."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def done(self, part: int) -> bool:
        """Whether a part is committed."""
        return self._ranges(part).is_file()

    def ranges(self, part: int) -> Ranges:
        """A committed part's ranges. Raises BadInput when the file is damaged."""
        path = self._ranges(part)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise BadInput(f"{path}: expected JSON, found {error}") from error
        return Ranges.from_dict(values, str(path))

    def states(self, part: int) -> list[np.ndarray]:
        """The states of every step that enter a part."""
        found = load_file(self._states(part))
        return [found[name].numpy() for name in sorted(found)]

    def save(self, part: int, ranges: Ranges, states: Sequence[np.ndarray] | None) -> None:
        """Commits a part; ``states`` enter the next one, if there is one."""
        if states is not None:
            tensors = {f"{i:06d}": torch.from_numpy(np.ascontiguousarray(state)) for i, state in enumerate(states)}
            save_tensors(self._states(part + 1), tensors)
        replace_file(self._ranges(part), to_json(ranges.to_dict()))
        self._states(part).unlink(missing_ok=True)

    def _ranges(self, part: int) -> Path:
        return self.folder / f"ranges-{part:05d}.json"

    def _states(self, part: int) -> Path:
        return self.folder / f"states-{part:05d}.safetensors"


def observe_part(
    folder: Path,
    index: int,
    texts: Sequence[Sequence[Step]],
    seen: Observations,
    open_part: OpenPart,
    threads: int,
    progress: Progress,
) -> None:
    """Runs one part on all texts and commits what was seen.

    Args:
        folder: with the manifest, and the part's float graphs and weights.
        texts: steps with the token ids that they began with, see `text_steps`; later parts take the states that were
            committed.

    Raises:
        BadInput: when an activation is not finite, naming it.
    """
    ranges = Ranges()
    run = open_part(folder, index, lambda path: ObservedSession(path, ranges, threads))
    entering = iter(seen.states(index)) if index else None
    leaving: list[np.ndarray] = []
    for number, text in enumerate(texts):
        progress("ranges", number, len(texts))
        states = text if entering is None else [(kind, count, next(entering)) for kind, count, _ in text]
        leaving += run(states)
    last = index == len(Manifest.read(folder).parts) - 1
    seen.save(index, ranges, None if last else leaving)
    progress("ranges", len(texts), len(texts))
