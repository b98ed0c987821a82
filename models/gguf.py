"""A GGUF file as a lazy checkpoint: every tensor is dequantised by the `gguf` package when it is read.

transformers' GGUF loading gives the configuration, the tokenizer and the names; only its tensor loop, which
dequantises a whole model at once, is replaced by one that reads a tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from models.checkpoint import Checkpoint, TensorInfo
from models.errors import BadInput
from models.files import sha256

if TYPE_CHECKING:
    from gguf import GGUFReader


class GgufFile(Checkpoint):
    """One ``.gguf`` file. Tensors are given in fp32, named as transformers names them.

    The tokenizer is rebuilt from the file into ``side_folder`` (``side_files`` needs real files to copy).

    Raises:
        BadInput: when the file is not a GGUF that transformers can map to a model.
    """

    def __init__(self, path: Path, side_folder: Path, name: str | None = None) -> None:
        # Lazily: gguf and transformers cost seconds that a safetensors source need not pay.
        from accelerate import init_empty_weights
        from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        self.path, self.name = path, name or str(path)
        self._side_folder = side_folder
        if not path.is_file():
            raise BadInput(f"{path}: expected a GGUF file, found no such file")
        try:
            self._reader = reader = GGUFReader(path)
            with _shared(reader):
                config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
            architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
            known = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
            names = get_tensor_name_map(known[architecture], config.num_hidden_layers)
        except (ValueError, KeyError, IndexError, OSError, NotImplementedError) as error:
            raise BadInput(f"{path}: expected a GGUF file of a model that transformers knows, found {error}") from error
        stated = reader.fields.get("general.license")
        self.license = None if stated is None else str(stated.contents())
        config.architectures = None
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config)
        config.architectures = [type(model).__name__]
        self.config = _plain(config.to_diff_dict())
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
        suffixes = (".weight", ".bias")
        ours = {names.get_name(name, try_suffixes=suffixes): name for name in model.state_dict()}
        self._stored = {ours[t.name]: t for t in reader.tensors if t.name in ours}
        self._unmapped = [t.name for t in reader.tensors if t.name not in ours]
        # GGUF counts dimensions from the innermost.
        shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._stored.items()}
        self.tensors = {name: TensorInfo(torch.float32, shape) for name, shape in shapes.items()}

    def read(self, name: str) -> torch.Tensor:
        from gguf import dequantize

        stored = self._stored[name]
        weights = dequantize(stored.data, stored.tensor_type)
        result = self._processor.process(weights=weights, name=stored.name)
        # A copy: fp32 tensors come as a view of the read-only mapping.
        return torch.from_numpy(result.weights.copy()).float()

    @cached_property
    def _sides(self) -> dict[str, Path]:
        from transformers import AutoTokenizer

        self._side_folder.mkdir(parents=True, exist_ok=True)
        try:
            with _shared(self._reader):
                tokenizer = AutoTokenizer.from_pretrained(str(self.path.parent), gguf_file=self.path.name)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise BadInput(f"{self.path}: expected a tokenizer that transformers can rebuild, found {error}") from error
        tokenizer.save_pretrained(self._side_folder)
        return {p.name: p for p in sorted(self._side_folder.iterdir()) if p.is_file()}

    def side_files(self) -> dict[str, Path]:
        return self._sides

    def skipped_files(self) -> dict[str, str]:
        return {name: "a tensor that the model does not have" for name in self._unmapped}

    def hashes(self) -> dict[str, str]:
        return {self.path.name: sha256(self.path)}


@contextmanager
def _shared(reader: GGUFReader) -> Iterator[None]:
    """Lets transformers take a reader that is there, instead of reading a vocabulary again: seconds each time."""
    with mock.patch("gguf.GGUFReader", lambda path: reader):
        yield


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Without the private keys, such as those that say where the file lay on this machine."""
    return {k: v for k, v in config.items() if not k.startswith("_")}
