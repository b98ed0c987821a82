"""Spark-X2.5 for vLLM versions that do not have it; the mathematics of ``models.spark2_5`` over vLLM's layers.

Projections may be fused or split on disk, and quantised by any method that vLLM knows. Norms, rotary embedding, gate
and residual stream are computed in fp32 as the reference does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, extract_layer_index, maybe_prefix
from vllm.sequence import IntermediateTensors

from export.serving.spark_ops import GATES, apply_gate, rms_norm, rms_norm_fused, rotate
from export.serving.switches import FUSED_RMS_NORM, HEAD_GATE
from models.errors import BadInput

MAPPER = WeightsMapper(
    orig_to_new_substr={".q_k_v_proj": ".qkv_proj"},
    orig_to_new_stacked={
        ".q_proj": (".qkv_proj", "q"),
        ".k_proj": (".qkv_proj", "k"),
        ".v_proj": (".qkv_proj", "v"),
        ".gate_proj": (".gate_up_proj", 0),
        ".up_proj": (".gate_up_proj", 1),
    },
    orig_to_new_prefix={"model.embedding.": "model.embed_tokens."},
)


class Norm(nn.Module):
    """Root mean square norm of the fp32 residual stream, cast to the weight's dtype."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps
        self.norm = rms_norm_fused if FUSED_RMS_NORM.on() else rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x, self.weight, self.eps)


class HeadGate(nn.Module):
    """The projection [hidden -> heads] behind each head's gate; kept in bf16 in every format."""

    def __init__(self, hidden_size: int, heads: int, activation: str) -> None:
        super().__init__()
        way = HEAD_GATE.read()
        dtype = None if way == "gemm" else torch.float32
        self.weight = nn.Parameter(torch.empty(heads, hidden_size, dtype=dtype))
        self.activation = activation
        self.scores = GATES[way]

    def forward(self, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """The attention's output [tokens, heads, head_dim] with each head scaled by its gate."""
        return apply_gate(output, self.scores(x, self.weight), self.activation)


class SparkAttention(nn.Module):
    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config: Any = vllm_config.model_config.hf_config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        sliding = config.layer_types[extract_layer_index(prefix)] == "sliding_attention"
        arguments = {"bias": config.attention_bias, "quant_config": vllm_config.quant_config}
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, self.head_dim, self.heads, self.kv_heads, prefix=f"{prefix}.qkv_proj", **arguments
        )
        self.out_proj = RowParallelLinear(
            self.heads * self.head_dim, config.hidden_size, prefix=f"{prefix}.out_proj", **arguments
        )
        gated = config.headwise_attn_output_gate
        self.g_proj = HeadGate(config.hidden_size, self.heads, config.gate_attn_act_mode) if gated else None
        self.attn = Attention(
            self.heads,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=self.kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=vllm_config.quant_config,
            per_layer_sliding_window=config.sliding_window if sliding else None,
            prefix=f"{prefix}.attn",
        )

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(x)
        query, key, value = qkv.unflatten(-1, (-1, self.head_dim)).split(
            (self.heads, self.kv_heads, self.kv_heads), dim=1
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        output = self.attn(query.flatten(1), key.flatten(1), value.flatten(1))
        if self.g_proj is not None:
            output = self.g_proj(x, output.unflatten(-1, (self.heads, self.head_dim))).flatten(1)
        output, _ = self.out_proj(output)
        return output


class SparkMLP(nn.Module):
    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config: Any = vllm_config.model_config.hf_config
        arguments = {"bias": config.mlp_bias, "quant_config": vllm_config.quant_config}
        width = config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, [width, width], prefix=f"{prefix}.gate_up_proj", **arguments
        )
        self.down_proj = RowParallelLinear(width, config.hidden_size, prefix=f"{prefix}.down_proj", **arguments)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        gate, up = gate_up.chunk(2, dim=-1)
        output, _ = self.down_proj(nn.functional.gelu(gate) * up)
        return output


class SparkDecoderLayer(nn.Module):
    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config: Any = vllm_config.model_config.hf_config
        self.self_attn = SparkAttention(vllm_config, f"{prefix}.self_attn")
        self.mlp = SparkMLP(vllm_config, f"{prefix}.mlp")
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The fp32 residual stream [tokens, hidden] after this layer."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


# Named, because vLLM reads the annotations otherwise and cannot read postponed ones.
@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": -1, "inputs_embeds": 0})
class Spark2_5Model(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: Any = vllm_config.model_config.hf_config
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.embed_tokens",
        )
        self.layers = nn.ModuleList(
            SparkDecoderLayer(vllm_config, f"{prefix}.layers.{index}") for index in range(config.num_hidden_layers)
        )
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.layer_types = list(config.layer_types)
        for layer_type in sorted(set(self.layer_types)):
            self.register_buffer(f"{layer_type}_inv_freq", _inv_freq(config, layer_type), persistent=False)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [tokens, hidden] in the embedding's dtype, for token ids or their embeddings."""
        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        rotary = {}
        for layer_type in sorted(set(self.layer_types)):
            angles = positions[:, None, None].float() * getattr(self, f"{layer_type}_inv_freq")
            rotary[layer_type] = angles.cos(), angles.sin()
        hidden = embedded.float()
        for layer, layer_type in zip(self.layers, self.layer_types, strict=True):
            hidden = layer(hidden, *rotary[layer_type])
        return self.norm(hidden).to(embedded.dtype)


class Spark2_5ForCausalLM(nn.Module):
    hf_to_vllm_mapper = MAPPER
    packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        """Raises BadInput for what this class does not do: tensor parallelism, another activation than exact GELU."""
        super().__init__()
        config: Any = vllm_config.model_config.hf_config
        if get_tensor_model_parallel_world_size() > 1 or vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise BadInput("Spark-X2.5 runs on one worker here: use tensor_parallel_size 1, pipeline_parallel_size 1")
        if config.hidden_act != "gelu":
            raise BadInput(f"config.json: hidden_act: expected gelu, found {config.hidden_act!r}")
        # What the switches decide is traced into the compiled graph, so a cached graph must depend on them.
        if isinstance(vllm_config.additional_config, dict):
            vllm_config.additional_config["edge_convert"] = [HEAD_GATE.read(), FUSED_RMS_NORM.read()]
        self.config = config
        self.model = Spark2_5Model(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.model.embed_tokens(input_ids)
        return embedded

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids, positions, inputs_embeds)
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits: torch.Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        skipped = ["lm_head."] if self.config.tie_word_embeddings else None
        loaded: set[str] = AutoWeightsLoader(self, ignore_unexpected_prefixes=skipped).load_weights(
            weights, mapper=self.hf_to_vllm_mapper
        )
        return loaded


def _inv_freq(config: Any, layer_type: str) -> torch.Tensor:
    """fp32 [rotated dims / 2]: a full layer rotates a share of each head's dims, from the front."""
    parameters = config.rope_parameters[layer_type]
    rotated = int(config.head_dim * parameters.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    return 1.0 / (float(parameters["rope_theta"]) ** exponents)
