"""A Spark-X2.5 checkpoint as a bf16 GGUF file, as llama.cpp (August 2026 and later) names things: for speed only.

It holds no tokenizer (`tokenizer.ggml.model` is `none`): the benchmark feeds token ids.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import torch

from models.checkpoint import Checkpoint
from models.spark2_5 import Spark2_5Config

TOP = {"model.embedding": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_k_v_proj": "attn_qkv",
    "self_attn.g_proj": "attn_gate",
    "self_attn.out_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a checkpoint's tensor."""
    module = name.removesuffix(".weight")
    if module in TOP:
        return f"{TOP[module]}.weight"
    layer, _, inside = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{IN_LAYER[inside]}.weight"


def write_gguf(checkpoint: Checkpoint, path: Path) -> None:
    """Writes the file in a stream; norms in fp32, everything else in bf16."""
    config = Spark2_5Config(**checkpoint.config)
    rope = config.rope_parameters
    writer = gguf.GGUFWriter(path, "spark2_5")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_sliding_window(config.sliding_window)
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_array("spark2_5.attention.sliding_window_pattern", sliding)
    for kind, suffix in (("full_attention", ""), ("sliding_attention", "_swa")):
        rotated = int(config.head_dim * rope[kind].get("partial_rotary_factor", 1.0))
        writer.add_uint32(f"spark2_5.rope.dimension_count{suffix}", rotated)
        writer.add_float32(f"spark2_5.rope.freq_base{suffix}", float(rope[kind]["rope_theta"]))
    writer.add_tokenizer_model("none")
    types = gguf.GGMLQuantizationType
    names = sorted(checkpoint.tensors)
    for name in names:
        shape = checkpoint.tensors[name].shape
        kind, size = (types.F32, 4) if len(shape) == 1 else (types.BF16, 2)
        # The dtype is only read where the type of the stored values is not given.
        dtype = torch.zeros(0).numpy().dtype
        elements = checkpoint.tensors[name].elements
        writer.add_tensor_info(gguf_name(name), shape, dtype, elements * size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in names:
        value = checkpoint.read(name)
        wide = value.float() if value.dim() == 1 else value.bfloat16().view(torch.int16)
        writer.write_tensor_data(wide.contiguous().numpy())
    writer.close()
