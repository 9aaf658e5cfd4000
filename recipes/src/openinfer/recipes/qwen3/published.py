"""The published Qwen3 sizes: what their config.json says. Kernels for them are compiled into wheels."""

from __future__ import annotations

from typing import Any

SIZES = {  # hidden, layers, query heads, intermediate, tied embeddings
    "0.6B": (1024, 28, 16, 3072, True),
    "1.7B": (2048, 28, 16, 6144, True),
    "4B": (2560, 36, 32, 9728, True),
    "8B": (4096, 36, 32, 12288, False),
    "14B": (5120, 40, 40, 17408, False),
    "32B": (5120, 64, 64, 25600, False),
}


IN_AWQ = ("4B", "8B", "14B", "32B")
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def config_json(size: str, *, fp8: bool = False, awq: bool = False) -> dict[str, Any]:
    """The keys of config.json that matter, for a size of SIZES; `fp8`: of the block-scaled checkpoint; `awq`: of the
    one in INT4."""
    hidden, layers, heads, intermediate, tied = SIZES[size]
    return {
        **({"quantization_config": FP8 if fp8 else AWQ} if fp8 or awq else {}),
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": intermediate,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "eos_token_id": 151645,
    }
