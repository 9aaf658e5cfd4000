"""The published sizes: what their config.json says. Kernels for them are compiled into wheels."""

from typing import Any

SPARSE_TYPES = ("deepseek_v32", "glm_moe_dsa")
MODEL_TYPES = ("deepseek_v3", "kimi_k2", *SPARSE_TYPES)
INDEX = {"index_head_dim": 128, "index_topk": 2048}
GLM = {
    "model_type": "glm_moe_dsa", "vocab_size": 154880, "hidden_size": 6144, "num_hidden_layers": 78,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048, "qk_nope_head_dim": 192,
    "v_head_dim": 256, "intermediate_size": 12288, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202752, "rope_theta": 1e6, "rope_scaling": None, "index_n_heads": 32, **INDEX,
    "eos_token_id": [154820, 154827, 154829],
}  # fmt: skip
NEXT_GLM = {
    **GLM, "max_position_embeddings": 1048576, "rope_theta": 8e6, "index_topk_freq": 4, "index_skip_topk_offset": 3,
}  # fmt: skip
PLAIN = {"quantization_config": None}
SIZES: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": {},
    "DeepSeek-V3.2": {"model_type": "deepseek_v32", "index_n_heads": 64, **INDEX},
    "Kimi-K2": {
        "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827,
        "num_nextn_predict_layers": 0, "vocab_size": 163840, "max_position_embeddings": 131072, "rope_theta": 50000.0,
        "eos_token_id": 163585,
        "rope_scaling": {
            "type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
    "GLM-5": {**GLM, **PLAIN}, "GLM-5-FP8": GLM, "GLM-5.2": {**NEXT_GLM, **PLAIN}, "GLM-5.2-FP8": NEXT_GLM,
}  # fmt: skip
"""What config.json says otherwise than that of V3, by the short name."""
SAME = {
    **dict.fromkeys(("DeepSeek-V3-0324", "DeepSeek-V3.1", "DeepSeek-R1"), "DeepSeek-V3"),
    **dict.fromkeys(("DeepSeek-V3.2-Exp", "DeepSeek-V3.2-Speciale"), "DeepSeek-V3.2"),
    "GLM-5.1": "GLM-5", "GLM-5.1-FP8": "GLM-5-FP8",
}  # fmt: skip
"""Other names of the same sizes."""
SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "intermediate_size": 64, "moe_intermediate_size": 16, "n_routed_experts": 8, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2, "vocab_size": 1024, "max_position_embeddings": 8192,
    "num_nextn_predict_layers": 0, "quantization_config": None, "rope_scaling": None,
}  # fmt: skip
"""What a small model's says otherwise, for checks at start."""


def config_json(name: str) -> dict[str, Any]:
    """The keys of config.json that matter, for a size of SIZES."""
    return {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
        "first_k_dense_replace": 3, "moe_layer_freq": 1, "num_attention_heads": 128, "num_key_value_heads": 128,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1, "hidden_act": "silu",
        "attention_bias": False, "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 163840,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        },
        "eos_token_id": 1,
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        },
        **SIZES[name],
    }  # fmt: skip
