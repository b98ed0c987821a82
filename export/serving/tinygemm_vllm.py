"""vLLM's side of the tinygemm layout: its configuration, and the method that loads and multiplies one linear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Parameter
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from export import tinygemm
from export.layout import describe, raise_problems, resolve_group_size
from export.serving import linear
from models.errors import BadInput, EnvironmentProblem

# Modules that engines fuse, by name, for models whose class does not say so.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
SHARDS = {"q": 0, "k": 1, "v": 2}


class TinygemmConfig(QuantizationConfig):
    """A checkpoint's ``quantization_config``.

    Raises:
        BadInput: when its tag, fingerprint, bits or group size are not what the operator computes with.
        EnvironmentProblem: anywhere but on the CPU, and where torch packs in an unknown way.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        if not current_platform.is_cpu():
            raise EnvironmentProblem("tinygemm weights are packed for the CPU: use a CPU build of vLLM")
        linear.check_config(config)
        # vLLM's CPU attention uses AMX without asking the system for it. A bf16 product asks, but with a quantised
        # head the first prompt may have had none, and the process would end with SIGILL.
        torch.cpu._init_amx()
        self.stored = config
        self.here = {**config, "isa": linear.host(), "fingerprint": tinygemm.fingerprint(linear.host())}
        self.group_size = int(config["group_size"])
        self.lm_head = bool(config.get("lm_head"))
        self.kept = list(config.get("modules_to_not_convert") or ())

    @classmethod
    def get_name(cls) -> str:
        return "tinygemm"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TinygemmConfig:
        return cls(config)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.kept = hf_to_vllm_mapper.apply_list(self.kept)

    def get_quant_method(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod() if self.is_kept(prefix) else TinygemmMethod(self)
        if isinstance(layer, ParallelLMHead) and self.lm_head and not self.is_kept(prefix):
            return TinygemmMethod(self)
        return None

    def is_kept(self, prefix: str) -> bool:
        """Whether a module stays bf16; a fused one does when all of its parts do.

        Raises:
            BadInput: when only some of a fused module's parts do.
        """
        if prefix in self.kept:
            return True
        parent, _, name = prefix.rpartition(".")
        for parts in (self.packed_modules_mapping.get(name, ()), FUSED.get(name, ())):
            kept = [part for part in parts if f"{parent}.{part}" in self.kept]
            if kept and len(kept) < len(parts):
                raise BadInput(
                    f"{prefix}: modules_to_not_convert keeps {', '.join(kept)} in bf16, but vLLM loads"
                    f" {', '.join(parts)} as one: keep all of them or none"
                )
            if kept:
                return True
        return False


@dataclass
class _Loading:
    """How far one linear's parameters are filled.

    Attributes:
        name: the layer's name in messages.
        sizes: out features of the parts that vLLM stacks.
        padding: rows after them that no checkpoint fills (a padded vocabulary).
        filled: per suffix, out features of what was loaded, by first row.
    """

    name: str
    sizes: list[int]
    padding: int
    filled: dict[str, dict[int, int]] = field(default_factory=lambda: {suffix: {} for suffix in tinygemm.SUFFIXES})

    def rows(self, shard: str | int | tuple[int, ...] | None) -> tuple[int, int]:
        """First row and number of rows of a shard; none means all parts, fused on disk."""
        if shard is None:
            return 0, sum(self.sizes)
        indices = shard if isinstance(shard, tuple) else (SHARDS[shard] if isinstance(shard, str) else shard,)
        start = indices[0]
        return sum(self.sizes[:start]), sum(self.sizes[start : start + len(indices)])

    def stacked(self, suffix: str) -> list[int]:
        """Out features of the loaded pieces, in order. Raises BadInput when they do not fill the parameter."""
        pieces = dict(sorted(self.filled[suffix].items()))
        expected = 0
        for start, rows in pieces.items():
            if start != expected:
                break
            expected += rows
        if expected != sum(self.sizes):
            raise BadInput(
                f"{self.name}.{suffix}: the checkpoint fills {sum(pieces.values())} of {sum(self.sizes)} rows"
            )
        return list(pieces.values())


class TinygemmMethod(LinearMethodBase):
    """Loads one linear's bytes, makes them this machine's, and multiplies with them.

    The parameters are filled with the shards' bytes as they are on disk, one after another. When all are there, they
    become one linear's bytes for this machine, in place; mostly that changes nothing.
    """

    def __init__(self, config: TinygemmConfig) -> None:
        self.config = config

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """See LinearMethodBase. Raises BadInput under tensor parallelism and for shapes that the operator refuses."""
        name = getattr(layer, "prefix", "") or type(layer).__name__
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        if get_tensor_model_parallel_world_size() > 1:
            raise BadInput(f"{name}: tinygemm weights are packed whole: use tensor_parallel_size 1")
        if params_dtype != torch.bfloat16:
            raise BadInput(f"{name}: tinygemm weights are bfloat16, not {params_dtype}: use dtype bfloat16")
        size = resolve_group_size(self.config.group_size, columns)
        raise_problems(f"{name}: {p}" for p in tinygemm.shape_problems(rows, columns, self.config.group_size))
        # A head's vocabulary is padded to whole blocks; the checkpoint holds the first rows.
        filled = layer.org_vocab_size if isinstance(layer, ParallelLMHead) else rows
        sizes = [filled] if filled < rows else output_partition_sizes
        loading = _Loading(name, list(sizes), rows - filled)
        for suffix, tensor in (
            ("weight_packed", torch.empty(rows, columns // 2, dtype=torch.uint8)),
            ("scales_and_zeros", torch.empty(columns // size, rows, 2, dtype=torch.bfloat16)),
        ):
            parameter = Parameter(tensor, requires_grad=False)
            set_weight_attrs(parameter, {"weight_loader": _loader(suffix, loading)})
            layer.register_parameter(suffix, parameter)
        layer.tinygemm_loading = loading

    def process_weights_after_loading(self, layer: Any) -> None:
        """See QuantizeMethodBase. Raises BadInput for what is missing or would be computed wrongly."""
        loading: _Loading = layer.tinygemm_loading
        packed, table = layer.weight_packed.data, layer.scales_and_zeros.data
        if _is_dummy():
            pieces = [packed.shape[0]]
        else:
            loading.stacked("scales_and_zeros")
            pieces = loading.stacked("weight_packed")
            if loading.padding:
                pieces.append(loading.padding)
                packed[-loading.padding :] = 0
                table[:, -loading.padding :] = 0
        host = linear.to_host(packed, pieces, self.config.stored)
        linear.check_linear(loading.name, host, table, self.config.here)
        layer.weight_packed.data = host

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear.forward(x, layer.weight_packed, layer.scales_and_zeros, self.config.group_size, bias)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """A quantised head cannot share the embedding's table."""
        raise BadInput(
            f"{layer.tinygemm_loading.name}: quantization_config says lm_head: true, config.json tie_word_embeddings:"
            " true; a quantised head is a matrix of its own"
        )


def _loader(suffix: str, loading: _Loading) -> Callable[..., None]:
    dim = 0 if suffix == "weight_packed" else 1

    def load(parameter: Parameter, loaded: torch.Tensor, shard: str | int | tuple[int, ...] | None = None) -> None:
        start, rows = loading.rows(shard)
        target = parameter.data.narrow(dim, start, rows)
        name = loading.name if shard is None else f"{loading.name} (shard {shard})"
        if loaded.dtype != target.dtype or loaded.shape != target.shape:
            raise BadInput(f"{name}.{suffix}: expected {describe(target)}, found {describe(loaded)}")
        target.copy_(loaded)
        loading.filled[suffix][start] = rows

    return load


def _is_dummy() -> bool:
    """Whether vLLM fills the parameters with random numbers, to measure speed."""
    config = get_current_vllm_config_or_none()
    return config is not None and config.load_config.load_format == "dummy"
