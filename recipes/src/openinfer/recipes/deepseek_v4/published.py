"""The published DeepSeek-V4 sizes, by their config.json."""

from typing import Any

SIZES = {  # hidden, ratios of the layers, heads, q_lora_rank, o_groups, index_topk, intermediate, experts, scaling
    "Flash": (4096, (0, 0, *(4, 128) * 20, 4), 64, 1024, 8, 512, 2048, 256, 1.5),
    "Pro": (7168, (128, 128, *(4, 128) * 29, 4), 128, 1536, 16, 1024, 3072, 384, 2.5),
}

RELEASES = {"Flash-0731": ("Flash", 256), "Pro-0813": ("Pro", 512)}
"""Later releases of these sizes, with a DSpark drafter of three layers in place of the MTP layer: size, Markov rank."""


def config_json(name: str, *, layers: int | None = None, drafting: bool | None = None) -> dict[str, Any]:
    """The keys of config.json that matter, for a size of SIZES or a release of RELEASES.

    layers: keep only this many layers, for a model cut short. drafting: whether it has the layers that draft, by
    default if it is not cut short.
    """
    size, rank = RELEASES.get(name, (name, 0))
    hidden, whole, heads, q_lora_rank, o_groups, index_topk, intermediate, experts, scaling = SIZES[size]
    ratios, drafting = whole[:layers], layers is None if drafting is None else drafting
    dspark = {
        "dspark_block_size": 5, "dspark_noise_token_id": 128799, "dspark_markov_rank": rank,
        "dspark_target_layer_ids": list(range(len(ratios))[-3:]),
    }  # fmt: skip
    return {
        **(dspark if rank and drafting else {}),
        "model_type": "deepseek_v4",
        "vocab_size": 129280,
        "hidden_size": hidden,
        "num_hidden_layers": len(ratios),
        "compress_ratios": [*ratios, *[0] * drafting * (3 if rank else 1)],
        "num_nextn_predict_layers": int(drafting),
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": q_lora_rank,
        "o_groups": o_groups,
        "o_lora_rank": 1024,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": index_topk,
        "sliding_window": 128,
        "moe_intermediate_size": intermediate,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "num_hash_layers": 3,
        "routed_scaling_factor": scaling,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "max_position_embeddings": 1048576,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "expert_dtype": "fp4",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
    }
