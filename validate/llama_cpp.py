"""llama.cpp's own quantisation of a checkpoint: which type each tensor gets, its row quantisers, and the GGUF file.

The types are those that `llama-quantize MODEL TYPE` without an importance matrix gives (src/llama-quant.cpp,
`llama_tensor_get_type`; its rules for experts, Falcon and models of 80 layers concern no family of ours). The rows are
quantised by `libgguf`, llama.cpp's reference code as a package; `gguf` writes, reads and dequantises the container.
Its tensors have the checkpoint's names: the file is for measuring, not for llama.cpp.
"""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize

from models.checkpoint import Checkpoint, TensorInfo, View
from models.errors import EnvironmentProblem
from models.family import Family, Linear
from models.opened import OpenedModel
from models.skeleton import is_derived

LIBRARY = "libgguf"
INSTALL = "pip install 'edge-convert[positioning]'"
# Where a row is no multiple of a type's block, the type that llama.cpp takes instead.
FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


@dataclass(frozen=True)
class Mix:
    """What a file type gives its tensors.

    Attributes:
        default: the type of every matrix without a rule.
        value, down: (layer, layers) -> type of attention's value projection, and of the MLP's down projection.
    """

    default: str
    value: Callable[[int, int], str] | None = None
    down: Callable[[int, int], str] | None = None

    @property
    def output(self) -> str:
        """Of the head, and of a table that is the head too."""
        return "Q8_0" if self.default == "Q8_0" else "Q6_K"


def more_bits(layer: int, layers: int) -> bool:
    """The layers of which llama.cpp holds that they need more: the first and last eighth, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _medium(default: str) -> Mix:
    def chosen(layer: int, layers: int) -> str:
        return "Q6_K" if more_bits(layer, layers) else default

    return Mix(default, chosen, chosen)


MIXES: Mapping[str, Mix] = {
    "Q4_0": Mix("Q4_0"),
    "Q5_0": Mix("Q5_0"),
    "Q8_0": Mix("Q8_0"),
    "Q4_K_S": Mix(
        "Q4_K",
        value=lambda layer, layers: "Q5_K" if layer < 4 else "Q4_K",
        down=lambda layer, layers: "Q5_K" if layer < layers // 8 else "Q4_K",
    ),
    "Q4_K_M": _medium("Q4_K"),
    "Q5_K_S": Mix("Q5_K"),
    "Q5_K_M": _medium("Q5_K"),
    "Q6_K": Mix("Q6_K"),
}


def tensor_types(mix: Mix, model: OpenedModel) -> dict[str, str]:
    """The type of every tensor, by its name in the checkpoint; those of other dimensions than two stay F32.

    A projection that the checkpoint holds fused counts as a value projection when the value is a part of it, as
    llama.cpp counts ``attn_qkv``.
    """
    family = model.family
    roles: dict[str, tuple[Callable[[int, int], str] | None, int]] = {}
    for linear in model.linears:
        if linear.layer is not None and (rule := _rule(mix, family, linear)) is not None:
            roles[f"{linear.module}.weight"] = (rule, linear.layer)
    tied = f"{family.head}.weight" not in model.checkpoint.tensors
    types = {}
    for name, info in model.checkpoint.tensors.items():
        if is_derived(name):
            continue
        if len(info.shape) != 2 or not name.endswith(".weight"):
            types[name] = "F32"
            continue
        wanted = mix.default
        if name == f"{family.head}.weight" or (tied and name == f"{family.embedding}.weight"):
            fits = info.shape[1] % _block(mix.default) == 0
            wanted = mix.output if fits else "Q8_0"
        elif name in roles:
            rule, layer = roles[name]
            assert rule is not None
            wanted = rule(layer, model.dimensions.layers)
        types[name] = _fitting(wanted, info.shape[1])
    return types


def _rule(mix: Mix, family: Family, linear: Linear) -> Callable[[int, int], str] | None:
    inside = linear.name.removeprefix(f"{family.layers}.{linear.layer}.")
    return {"self_attn.v_proj": mix.value, "mlp.down_proj": mix.down}.get(inside)


def _fitting(kind: str, columns: int) -> str:
    if columns % _block(kind) == 0:
        return kind
    fallback = FALLBACK.get(kind, "F16")
    return fallback if columns % _block(fallback) == 0 else "F16"


def _block(kind: str) -> int:
    return int(GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0])


def bits(kind: str) -> float:
    """Bits per weight of a type, scales included."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return 8 * size / block


def library_version() -> str:
    """Of the row quantisers. Raises EnvironmentProblem, with the line that installs them, when they are absent."""
    try:
        return importlib.metadata.version(LIBRARY)
    except importlib.metadata.PackageNotFoundError as error:
        raise EnvironmentProblem(f"{LIBRARY} is not installed: {INSTALL}") from error


def write(mix: Mix, model: OpenedModel, file: Path, progress: Callable[[int, int], None]) -> None:
    """Quantises a checkpoint into a GGUF file, a tensor at a time; it appears under its name when it is whole.

    Raises:
        EnvironmentProblem: when the row quantisers are not installed.
    """
    library_version()
    import libgguf

    checkpoint = model.checkpoint
    partial = file.with_name(f".{file.name}.partial")
    types = tensor_types(mix, model)
    writer = GGUFWriter(partial, str(checkpoint.config["model_type"]))
    try:
        for name, kind in types.items():
            info = checkpoint.tensors[name]
            size = int(info.elements * bits(kind)) // 8
            writer.add_tensor_info(name, info.shape, np.dtype(np.float32), size, GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, (name, kind) in enumerate(types.items()):
            progress(done, len(types))
            rows = checkpoint.read(name).float().contiguous().numpy()
            writer.write_tensor_data(libgguf.quantize_rows(rows, GGMLQuantizationType[kind]))
        progress(len(types), len(types))
    finally:
        writer.close()
    partial.replace(file)


class GgufView(View):
    """A file that `write` made, seen as the checkpoint that it was made from; tensors are dequantised when read."""

    def __init__(self, file: Path, source: Checkpoint) -> None:
        super().__init__(source)
        self.file, self.name = file, file.name
        self.tensors = {
            name: TensorInfo(torch.float32, info.shape) for name, info in source.tensors.items() if name in self._stored
        }

    @cached_property
    def _stored(self) -> dict[str, Any]:
        return {tensor.name: tensor for tensor in GGUFReader(self.file).tensors}

    def read(self, name: str) -> torch.Tensor:
        stored = self._stored[name]
        values = dequantize(stored.data, stored.tensor_type)
        # A copy: fp32 tensors come as a view of the read-only mapping.
        return torch.from_numpy(values.copy()).float().view(self.tensors[name].shape)

    def bits_per_weight(self, linears: list[Linear]) -> float:
        """Of the tensors that hold these linears, scales included."""
        names = {f"{linear.module}.weight" for linear in linears}
        total = sum(bits(self._stored[name].tensor_type.name) * self.tensors[name].elements for name in names)
        return total / max(1, sum(self.tensors[name].elements for name in names))

    @property
    def tensor_bytes(self) -> int:
        """Of all tensors, without the file's header."""
        return sum(int(tensor.n_bytes) for tensor in self._stored.values())

    def types(self) -> dict[str, int]:
        """How many tensors each type has, the matrices only."""
        kinds = (tensor.tensor_type.name for tensor in self._stored.values() if len(tensor.shape) == 2)
        return dict(Counter(kinds).most_common())
