"""Spark-X2.5: one fused ``q_k_v_proj``, separate gate and up, a small head gate that engines keep in bf16."""

from models.family import Family, Fusion, Links

FAMILY = Family(
    model_types=("spark2_5",),
    linears=(
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.out_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ),
    kept={"self_attn.g_proj": "the head gate stays in bf16: engines build it without a quantisation config"},
    fusions=(
        Fusion("self_attn.q_k_v_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), rows="heads"),
    ),
    embedding="model.embedding",
    fused_on_disk=True,
    engine_splits=True,
    links=Links(
        norms=(
            ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.g_proj")),
            ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ),
        residual=("self_attn.out_proj", "mlp.down_proj"),
        # The head gate multiplies whole heads, so it commutes with what is done to the channels inside one.
        values=("self_attn.v_proj", "self_attn.out_proj"),
        product=("mlp.up_proj", "mlp.down_proj"),
    ),
    phone=True,
)
