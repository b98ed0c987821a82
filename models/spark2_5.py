"""Spark-X2.5: configuration and modelling code, registered with transformers' Auto classes.

A decoder with grouped-query attention over a fused ``q_k_v_proj``, a sigmoid (or silu) gate per attention head,
three sliding-window layers to one full layer, a rotary embedding per layer type and an fp32 residual stream.
Importing this module registers ``model_type: spark2_5``; a checkpoint whose ``config.json`` carries an ``auto_map``
then loads through this code too, without remote code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

LAYER_TYPES = ("sliding_attention", "full_attention")
GATE_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": nn.functional.silu,
}


class Spark2_5Config(PreTrainedConfig):
    """Configuration of Spark-X2.5; the defaults are the 1.7B model's.

    Attributes:
        layer_types: one of ``sliding_attention`` or ``full_attention`` per layer; three sliding, then one full,
            when not given.
        rope_parameters: per layer type, ``rope_theta`` and ``partial_rotary_factor`` (the share of ``head_dim``,
            from the front, that is rotated).
        gate_attn_act_mode: activation of the head gate, ``sigmoid`` or ``silu``, computed in fp32.

    Raises:
        ValueError: for a layer type, gate activation or head count that the model does not define.
    """

    model_type = "spark2_5"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]

    vocab_size: int = 131072
    hidden_size: int = 2048
    intermediate_size: int = 6656
    num_hidden_layers: int = 28
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 256
    hidden_act: str = "gelu"
    max_position_embeddings: int = 1_048_576
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    pad_token_id: int | None = 2
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    attention_dropout: float = 0.0
    mlp_bias: bool = False
    sliding_window: int = 512
    layer_types: list[str] | None = None
    rope_parameters: dict | None = None
    headwise_attn_output_gate: bool = True
    gate_attn_act_mode: str = "sigmoid"

    def __post_init__(self, **kwargs: Any) -> None:
        if self.layer_types is None:
            self.layer_types = [LAYER_TYPES[(i + 1) % 4 == 0] for i in range(self.num_hidden_layers)]
        if self.rope_parameters is None:
            self.rope_parameters = {
                "sliding_attention": {"rope_theta": 10_000, "partial_rotary_factor": 1.0},
                "full_attention": {"rope_theta": 5_000_000, "partial_rotary_factor": 0.25},
            }
        self._check()
        super().__post_init__(**kwargs)

    def _rope(self, layer_type: str) -> Mapping[str, Any]:
        entry = self.rope_parameters.get(layer_type) if isinstance(self.rope_parameters, dict) else None
        return entry if isinstance(entry, dict) else {}

    def _check(self) -> None:
        problems = []
        if len(self.layer_types or ()) != self.num_hidden_layers:
            problems.append(
                f"layer_types has {len(self.layer_types or ())} entries for {self.num_hidden_layers} layers"
            )
        for layer_type in sorted(set(self.layer_types or ())):
            if layer_type not in LAYER_TYPES:
                problems.append(f"layer_types: expected one of {LAYER_TYPES}, found {layer_type!r}")
            elif "rope_theta" not in self._rope(layer_type):
                problems.append(f"rope_parameters: no rope_theta for {layer_type!r}")
            elif (kind := self._rope(layer_type).get("rope_type", "default")) != "default":
                problems.append(f"rope_parameters: {layer_type}: rope_type: expected default, found {kind!r}")
        if self.gate_attn_act_mode not in GATE_ACTIVATIONS:
            problems.append(f"gate_attn_act_mode: expected sigmoid or silu, found {self.gate_attn_act_mode!r}")
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            problems.append(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of"
                f" num_key_value_heads {self.num_key_value_heads}"
            )
        if problems:
            raise ValueError("spark2_5 configuration: " + "; ".join(problems))


class Spark2_5RMSNorm(nn.Module):
    """Root mean square norm in fp32; the product with the weight is cast to the weight's dtype."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * x).to(self.weight.dtype)


class Spark2_5RotaryEmbedding(nn.Module):
    """fp32 cos and sin of one layer type, [batch, tokens, rotated dims]."""

    def __init__(self, config: Spark2_5Config) -> None:
        super().__init__()
        self.layer_types = sorted(set(config.layer_types or ()))
        for layer_type in self.layer_types:
            self.register_buffer(f"{layer_type}_inv_freq", self.inv_freq(config, layer_type), persistent=False)

    @staticmethod
    def inv_freq(config: Spark2_5Config, layer_type: str) -> torch.Tensor:
        parameters = (config.rope_parameters or {})[layer_type]
        rotated = int(config.head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
        return 1.0 / (float(parameters["rope_theta"]) ** exponents)

    @torch.no_grad()
    def forward(self, position_ids: torch.Tensor, layer_type: str) -> tuple[torch.Tensor, torch.Tensor]:
        inv_freq = getattr(self, f"{layer_type}_inv_freq").float()
        angles = position_ids[..., None].float() * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first ``cos.shape[-1]`` dims of each head in fp32 (half-rotation style); the rest pass.

    x [batch, heads, tokens, head_dim]; cos and sin fp32 [batch, tokens, rotated].
    """
    rotated = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    head, tail = x[..., :rotated].float(), x[..., rotated:]
    first, second = head.chunk(2, dim=-1)
    head = head * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((head.to(x.dtype), tail), dim=-1)


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain softmax attention (softmax in fp32); query [batch, heads, tokens, head_dim], grouped keys and values."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class Spark2_5Attention(nn.Module):
    """Grouped-query attention with one fused input projection and a gate per head."""

    def __init__(self, config: Spark2_5Config, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.layer_type = (config.layer_types or ())[layer_idx]
        self.is_causal = True
        self.head_dim = config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.num_key_value_groups = self.heads // self.kv_heads
        self.scaling = self.head_dim**-0.5
        self.sliding_window = config.sliding_window if self.layer_type == "sliding_attention" else None
        bias = config.attention_bias
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.q_k_v_proj = nn.Linear(config.hidden_size, rows, bias=bias)
        self.out_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=bias)
        if config.headwise_attn_output_gate:
            self.g_proj = nn.Linear(config.hidden_size, self.heads, bias=False)
            self.gate = GATE_ACTIVATIONS[config.gate_attn_act_mode]

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        batch, tokens = hidden_states.shape[:2]
        fused = self.q_k_v_proj(hidden_states).view(batch, tokens, -1, self.head_dim).transpose(1, 2)
        query, key, value = fused.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attention: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention
        )
        output, _ = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=self.config.attention_dropout if self.training else 0.0,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        if self.config.headwise_attn_output_gate:
            gate = self.gate(self.g_proj(hidden_states).float()).to(output.dtype)
            output = output * gate.unsqueeze(-1)
        return self.out_proj(output.reshape(batch, tokens, -1))


class Spark2_5MLP(nn.Module):
    def __init__(self, config: Spark2_5Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Spark2_5DecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: Spark2_5Config, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = Spark2_5Attention(config, layer_idx)
        self.mlp = Spark2_5MLP(config)
        self.input_layernorm = Spark2_5RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Spark2_5RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Spark2_5PreTrainedModel(PreTrainedModel):
    config_class = Spark2_5Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Spark2_5DecoderLayer"]
    _supports_sdpa = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Spark2_5RotaryEmbedding):
            # from_pretrained builds the model on the meta device: the buffers must be computed again.
            for layer_type in module.layer_types:
                buffer = getattr(module, f"{layer_type}_inv_freq")
                buffer.copy_(module.inv_freq(self.config, layer_type))


class Spark2_5Model(Spark2_5PreTrainedModel):
    def __init__(self, config: Spark2_5Config) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(Spark2_5DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Spark2_5RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Spark2_5RotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embedding = value

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Runs the decoder on token ids or embeddings; the output is [batch, tokens, hidden] in the embedding dtype.

        Raises:
            ValueError: unless exactly one of ``input_ids`` and ``inputs_embeds`` is given.
        """
        cache = kwargs.pop("past_key_values", cache)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embedding(input_ids)
        if cache is None and (self.config.use_cache if use_cache is None else use_cache) and not self.training:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(past, past + inputs_embeds.shape[1], device=inputs_embeds.device)[None]
        masks = attention_mask if isinstance(attention_mask, dict) else None
        if masks is None:
            arguments = {
                "config": self.config,
                "inputs_embeds": inputs_embeds,
                "attention_mask": attention_mask,
                "cache": cache,
                "position_ids": position_ids,
            }
            masks = {
                "full_attention": create_causal_mask(**arguments),
                "sliding_attention": create_sliding_window_causal_mask(**arguments),
            }
        rotary = {t: self.rotary_emb(position_ids, t) for t in self.rotary_emb.layer_types}
        hidden_states = inputs_embeds.float()
        for layer, layer_type in zip(self.layers, self.config.layer_types or (), strict=True):
            hidden_states = layer(
                hidden_states,
                attention_mask=masks[layer_type],
                position_embeddings=rotary[layer_type],
                cache=cache,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states).to(inputs_embeds.dtype), cache=cache)


class Spark2_5ForCausalLM(Spark2_5PreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}

    def __init__(self, config: Spark2_5Config) -> None:
        super().__init__(config)
        self.model = Spark2_5Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [batch, tokens kept, vocab]; with ``labels`` also the mean cross entropy in nats."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=kwargs.pop("past_key_values", cache),
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=outputs.cache)


AutoConfig.register("spark2_5", Spark2_5Config, exist_ok=True)
AutoModel.register(Spark2_5Config, Spark2_5Model, exist_ok=True)
AutoModelForCausalLM.register(Spark2_5Config, Spark2_5ForCausalLM, exist_ok=True)
