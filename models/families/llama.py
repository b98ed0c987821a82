"""Llama-shaped models: separate q/k/v and gate/up projections, with the biases and QK norms of Qwen 2 and 3."""

from models.family import PRE_NORM, Family

FAMILY = Family(
    model_types=("llama", "qwen2", "qwen3", "mistral"),
    linears=(
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ),
    links=PRE_NORM,
    phone=True,
)
