"""Phi-3 and Phi-4: fused ``qkv_proj`` and ``gate_up_proj``, which vLLM wants fused on disk too."""

from models.family import PRE_NORM, Family, Fusion

FAMILY = Family(
    model_types=("phi3",),
    linears=(
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ),
    fusions=(
        Fusion("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), rows="heads"),
        Fusion("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"), rows="equal"),
    ),
    fused_on_disk=True,
    links=PRE_NORM,
    phone=True,
)
