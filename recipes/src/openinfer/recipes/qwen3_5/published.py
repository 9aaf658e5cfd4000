"""The published Qwen3.5 sizes: what their config.json says. Kernels for them are compiled into wheels."""

from typing import Any

MODEL_TYPES = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Checkpoints with a vision tower (which is not loaded), and those of the text model only."""
STATE_DTYPES = ("float32", "bfloat16")
"""Of recurrent states."""
SIZES: dict[str, tuple[int, int, int, int, int, int | tuple[int, int, int], bool]] = {
    # hidden, layers, query heads, key-value heads, linear value heads, MLP or (experts, chosen, width), tied
    "0.8B": (1024, 24, 8, 2, 16, 3584, True),
    "2B": (2048, 24, 8, 2, 16, 6144, True),
    "4B": (2560, 32, 16, 4, 32, 9216, True),
    "9B": (4096, 32, 16, 4, 32, 12288, False),
    "27B": (5120, 64, 24, 4, 48, 17408, False),
    "35B-A3B": (2048, 40, 16, 2, 32, (256, 8, 512), False),
    "122B-A10B": (3072, 48, 32, 2, 64, (256, 8, 1024), False),
    "397B-A17B": (4096, 60, 32, 2, 64, (512, 10, 1024), False),
    "Qwen3-Next-80B-A3B": (2048, 48, 16, 2, 32, (512, 10, 512), False),
}
SAME = {"Qwen3.6-27B": "27B", "Qwen3.6-35B-A3B": "35B-A3B", "Qwen3.8-27B": "27B",
        "Qwen3-Coder-Next": "Qwen3-Next-80B-A3B"}  # fmt: skip
"""Later models of the same sizes."""


def config_json(size: str, *, fp8: bool = False) -> dict[str, Any]:
    """The keys of config.json that matter, for a name of SIZES or SAME; `fp8`: of the block-scaled checkpoint."""
    size = SAME.get(size, size)
    hidden, layers, heads, kv_heads, value_heads, mlp, tied = SIZES[size]
    text: dict[str, Any] = {
        "vocab_size": 248320,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "full_attention_interval": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
        "mtp_num_hidden_layers": 1,
        "eos_token_id": 248044,
    }
    if isinstance(mlp, int):
        text["intermediate_size"] = mlp
    else:
        experts, chosen, width = mlp
        text |= {
            "num_experts": experts,
            "num_experts_per_tok": chosen,
            "moe_intermediate_size": width,
            "shared_expert_intermediate_size": width,
        }
    raw: dict[str, Any] = {
        "model_type": "qwen3_5" if isinstance(mlp, int) else "qwen3_5_moe",
        "text_config": text,
        "tie_word_embeddings": tied,
    }
    if "Next" in size:
        raw = {**text, "model_type": "qwen3_next", "vocab_size": 151936, "eos_token_id": 151645}
    if fp8:
        raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return raw
