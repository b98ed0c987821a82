"""transformers' side of the tinygemm layout: a quantizer that puts packed linears in the place of plain ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

import models.spark2_5  # noqa: F401 - its artifacts load through the same call
from export import tinygemm
from export.layout import raise_problems, resolve_group_size
from export.serving import linear
from models.errors import BadInput


class TinygemmLinear(nn.Module):
    """A linear [N, K] as the operator's bytes; the shapes of ``nn.Linear``, bf16 in and out."""

    weight_packed: torch.Tensor
    scales_and_zeros: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, rows: int, columns: int, bias: bool, group_size: int) -> None:
        """``group_size`` as in the configuration; the tensors wait for the checkpoint."""
        super().__init__()
        self.in_features, self.out_features, self.group_size = columns, rows, group_size
        size = resolve_group_size(group_size, columns)
        self.register_buffer("weight_packed", torch.empty(rows, columns // 2, dtype=torch.uint8))
        self.register_buffer("scales_and_zeros", torch.empty(columns // size, rows, 2, dtype=torch.bfloat16))
        self.register_buffer("bias", torch.empty(rows, dtype=torch.bfloat16) if bias else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x bf16 [..., K]; returns bf16 [..., N]."""
        return linear.forward(x, self.weight_packed, self.scales_and_zeros, self.group_size, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class TinygemmConfig(QuantizationConfigMixin):
    """A checkpoint's ``quantization_config``, as it is on disk."""

    def __init__(self, **entries: Any) -> None:
        for name, value in entries.items():
            setattr(self, name, value)
        self.quant_method: Any = "tinygemm"


class TinygemmQuantizer(HfQuantizer):
    """Loads packed linears; it quantises nothing itself."""

    requires_calibration = True
    quantization_config: Any

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Raises BadInput for a configuration whose bytes cannot be told, and for another device than the CPU."""
        linear.check_config(self.quantization_config.to_dict())
        devices = kwargs.get("device_map")
        named = set(devices.values()) if isinstance(devices, dict) else {devices}
        if not {str(device) for device in named if device not in (None, "auto")} <= {"cpu"}:
            raise BadInput(f"device_map {devices}: tinygemm weights are packed for the CPU")

    def update_device_map(self, device_map: Any) -> Any:
        return {"": "cpu"} if device_map is not None else None

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Raises BadInput for another dtype than the operator's fast one."""
        if dtype not in (None, torch.bfloat16):
            raise BadInput(f"dtype {dtype}: tinygemm weights are bfloat16: use dtype=torch.bfloat16")
        return torch.bfloat16

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        """Puts packed linears in place. Raises BadInput for what the model or the operator has no place for."""
        stored = _stored(kwargs.get("checkpoint_files") or [])
        linears = dict(model.named_modules())
        size = self.quantization_config.group_size
        problems = []
        for name, shapes in sorted(stored.items()):
            module = linears.get(name)
            if not isinstance(module, nn.Linear):
                problems.append(_unknown(name))
                continue
            rows, columns = module.out_features, module.in_features
            found = [f"{name}: {problem}" for problem in tinygemm.shape_problems(rows, columns, size)]
            if not found:
                packed = TinygemmLinear(rows, columns, module.bias is not None, size)
                for suffix in tinygemm.SUFFIXES:
                    expected = list(packed.get_buffer(suffix).shape)
                    if shapes.get(suffix) != expected:
                        found.append(f"{name}.{suffix}: expected {expected}, found {shapes.get(suffix)}")
                model.set_submodule(name, packed.to(module.weight.device))
            problems += found
        raise_problems(problems)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        """Checks every packed linear and makes its bytes this machine's, one after the other."""
        stored = self.quantization_config.to_dict()
        here = {**stored, "isa": linear.host(), "fingerprint": tinygemm.fingerprint(linear.host())}
        for name, module in model.named_modules():
            if isinstance(module, TinygemmLinear):
                linear.check_linear(name, module.weight_packed, module.scales_and_zeros, stored)
                module.weight_packed = linear.to_host(module.weight_packed, [module.out_features], stored)
        # What the model would say about itself when it is asked or saved.
        self.quantization_config.isa, self.quantization_config.fingerprint = here["isa"], here["fingerprint"]
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def register() -> None:
    """Registers the method with transformers; calling it again changes nothing."""
    if "tinygemm" not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config("tinygemm")(TinygemmConfig)
        register_quantizer("tinygemm")(TinygemmQuantizer)


def _stored(files: list[str | Path]) -> dict[str, dict[str, list[int]]]:
    """Shapes of the packed linears' tensors in a checkpoint's files, by linear and suffix, from their headers."""
    found: dict[str, dict[str, list[int]]] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in list(opened.keys()):
                name, _, suffix = key.rpartition(".")
                if suffix in tinygemm.SUFFIXES:
                    found.setdefault(name, {})[suffix] = list(opened.get_slice(key).get_shape())
    return found


def _unknown(name: str) -> str:
    parent, _, last = name.rpartition(".")
    if last in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        return (
            f"{name}: the artifact holds it split, but this model's class has one fused projection in {parent}:"
            " write the target with qkv: fused"
        )
    return f"{name}: the artifact holds packed weights for it, but the model has no such linear"


register()
