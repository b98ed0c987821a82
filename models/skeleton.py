"""A transformers model without weights, filled a module at a time from a lazy checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from models.checkpoint import Checkpoint
from models.errors import BadInput
from models.wide import widen

Reader = Callable[[str], torch.Tensor]


def model_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """The transformers configuration of a checkpoint (remote code in ``auto_map`` is never used).

    Raises:
        BadInput: when the configuration's values contradict each other.
    """
    values = {k: v for k, v in checkpoint.config.items() if k not in ("auto_map", "quantization_config")}
    with _bad_values(checkpoint):
        return CONFIG_MAPPING[values["model_type"]].from_dict(values)


def skeleton(checkpoint: Checkpoint, dtype: torch.dtype, attention: str = "sdpa") -> PreTrainedModel:
    """The model with parameters on the meta device and real buffers (rotary frequencies are in no checkpoint).

    Raises:
        BadInput: when the configuration's values contradict each other.
    """
    config = model_config(checkpoint)
    # Random numbers on the meta device are most of the time otherwise, and no parameter keeps them.
    with _bad_values(checkpoint), init_empty_weights(include_buffers=False), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    widen(model, dtype)
    return model.eval()


@contextmanager
def _bad_values(checkpoint: Checkpoint) -> Iterator[None]:
    # transformers has no type of its own for a value that it cannot use: what its classes do with the value fails.
    try:
        yield
    except Exception as error:
        told = " ".join(str(error).split())
        if not isinstance(error, ValueError):
            told = f"{type(error).__name__}: {told}"
        raise BadInput(f"{checkpoint.name}: config.json: {told}") from error


def check_tensors(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    """Raises BadInput listing every tensor that is missing, unexpected or of another shape than the model's."""
    expected = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    problems = []
    for name, shape in expected.items():
        found = checkpoint.tensors.get(name)
        if found is None:
            if name not in tied:
                problems.append(f"{checkpoint.name}: {name}: expected {list(shape)}, found no such tensor")
        elif found.shape != shape:
            problems.append(f"{checkpoint.name}: {name}: expected shape {list(shape)}, found {list(found.shape)}")
    problems += [
        f"{checkpoint.name}: {name}: the model has no such tensor"
        for name in checkpoint.tensors
        if name not in expected and not is_derived(name)
    ]
    if problems:
        raise BadInput(problems)


def is_derived(name: str) -> bool:
    """Whether a tensor is a buffer that old checkpoints store although models compute it from the configuration."""
    return name.endswith(".rotary_emb.inv_freq")


def reader(checkpoint: Checkpoint, model: PreTrainedModel) -> Reader:
    """Reads a parameter by the model's name for it; a tied one from the tensor that it is tied to."""
    return lambda name: checkpoint.read(stored_name(checkpoint, model, name))


def stored_name(checkpoint: Checkpoint, model: PreTrainedModel, name: str) -> str:
    """The checkpoint's name for a parameter: when it has no tensor of its own, that of the one it is tied to."""
    tied: dict[str, str] = dict(model._tied_weights_keys or {})
    return name if name in checkpoint.tensors else tied.get(name, name)


def materialise(module: nn.Module, prefix: str, read: Reader, dtype: torch.dtype) -> None:
    """Loads a module's own parameters, cast to ``dtype``; ``prefix`` is the module's full name."""
    for name, _ in list(module.named_parameters()):
        _set(module, name, read(f"{prefix}.{name}" if prefix else name).to(dtype))


def release(module: nn.Module) -> None:
    """Drops a module's parameters (buffers stay, they are small and in no checkpoint)."""
    for name, parameter in list(module.named_parameters()):
        _set(module, name, torch.empty_like(parameter, device="meta"))


def _set(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))


def load_model(checkpoint: Checkpoint, dtype: torch.dtype, attention: str = "sdpa") -> PreTrainedModel:
    """The whole model in memory, weights cast to ``dtype``; a head without a tensor of its own shares the embedding."""
    model = skeleton(checkpoint, dtype, attention)
    read = reader(checkpoint, model)
    materialise(model, "", read, dtype)
    model.tie_weights()
    for name in model._tied_weights_keys or ():
        if name in checkpoint.tensors:
            _set(model, name, read(name).to(dtype))
    return model
