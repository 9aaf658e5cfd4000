"""The published Qwen3 sizes: what their config.json says. Kernels for them are compiled into wheels."""

from typing import Any

MODEL_TYPES = ("qwen3", "qwen3_moe")
"""Dense models and mixtures of experts."""
SIZES = {  # hidden, layers, query heads, intermediate, tied embeddings
    "0.6B": (1024, 28, 16, 3072, True),
    "1.7B": (2048, 28, 16, 6144, True),
    "4B": (2560, 36, 32, 9728, True),
    "8B": (4096, 36, 32, 12288, False),
    "14B": (5120, 40, 40, 17408, False),
    "32B": (5120, 64, 64, 25600, False),
}
MIXTURES = {  # hidden, layers, query heads, key-value heads, experts, width of an expert
    "30B-A3B": (2048, 48, 32, 4, 128, 768),
    "235B-A22B": (4096, 94, 64, 4, 128, 1536),
    "Coder-480B-A35B": (6144, 62, 96, 8, 160, 2560),
}
IN_AWQ = ("4B", "8B", "14B", "32B")
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def config_json(size: str, *, fp8: bool = False, awq: bool = False) -> dict[str, Any]:
    """The keys of config.json that matter, for a size of SIZES or MIXTURES; fp8: block-scaled; awq: in INT4."""
    if size in MIXTURES:
        hidden, layers, heads, kv_heads, experts, width = MIXTURES[size]
        mlp = {
            "num_experts": experts,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": width,
            "norm_topk_prob": True,
        }
        tied = False
    else:
        hidden, layers, heads, intermediate, tied = SIZES[size]
        kv_heads, mlp = 8, {"intermediate_size": intermediate}
    return {
        **({"quantization_config": FP8 if fp8 else AWQ} if fp8 or awq else {}),
        "model_type": MODEL_TYPES[size in MIXTURES],
        "vocab_size": 151936,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        **mlp,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "eos_token_id": 151645,
    }
