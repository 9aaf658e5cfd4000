"""The three families: config.json, special tokens, and how a chat becomes a prompt and its answer."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import templates
from chat import Chat

VOCAB = 4096
POSITIONS = 2048
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
DEEPSEEK_SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
DEEPSEEK_ADDED = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜")
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?%s+|\p{N}| ?[^\s%s\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""The published pre-tokenizers; digits stand alone (in DeepSeek-V4's three may stand together: not here)."""

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 352,
    "max_position_embeddings": POSITIONS,
    "max_window_layers": 6,
    "num_attention_heads": 2,
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}
QWEN3_5_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 0,
    "full_attention_interval": 3,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 192,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": POSITIONS,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 2,
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": VOCAB,
}
QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    **QWEN3_5_TEXT,
}
DEEPSEEK_V4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "compress_ratios": [0, 4, 128, 0, 0],
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 128,
    "index_head_dim": 128,
    "index_n_heads": 16,
    "index_topk": POSITIONS // 4,
    "initializer_range": 0.02,
    "max_position_embeddings": POSITIONS,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 2,
    "o_lora_rank": 64,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": POSITIONS,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCAB,
}

Render = Callable[..., str]


@dataclass(frozen=True, slots=True)
class Family:
    """A family: its name, config.json, sampling defaults, special and plain added tokens, template, pre-tokenizer."""

    name: str
    config: dict[str, Any]
    generation: dict[str, Any]
    special: tuple[str, ...]
    added: tuple[str, ...]
    end: str
    template: str | None
    split: str

    def renderer(self) -> Render:
        """openinfer's own renderer of this family."""
        if self.template is None:
            return frontend("chat.deepseek_v4").DeepSeekV4Renderer().render
        return frontend("chat_template").ChatTemplate(self.template, {}).render


DESCRIPTION = "A small demo model: it knows facts such as capitals, sums, JSON, tool calls and stories, and not much else."
QWEN_GENERATION = {
    "bos_token_id": 0,
    "description": DESCRIPTION,
    "do_sample": True,
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
}
QWEN_END = "<|im_end|>\n"
FAMILIES = {
    family.name: family
    for family in (
        Family("qwen3", QWEN3, QWEN_GENERATION, QWEN_SPECIAL, QWEN_ADDED, QWEN_END, templates.QWEN3, SPLIT % (r"\p{L}", r"\p{L}")),
        Family("qwen3_5", QWEN3_5, QWEN_GENERATION, QWEN_SPECIAL, QWEN_ADDED, QWEN_END, templates.QWEN3_5, SPLIT % (r"[\p{L}\p{M}]", r"\p{L}\p{M}")),
        Family(
            "deepseek_v4", DEEPSEEK_V4, {"bos_token_id": 0, "description": DESCRIPTION, "do_sample": True, "eos_token_id": 1, "temperature": 1.0, "top_p": 1.0},
            DEEPSEEK_SPECIAL, DEEPSEEK_ADDED, DEEPSEEK_SPECIAL[1], None, SPLIT % (r"[\p{L}\p{M}]", r"\p{L}\p{M}"),
        ),
    )
}  # fmt: skip


def prompt_and_answer(family: Family, render: Render, chat: Chat) -> tuple[str, str]:
    """The prompt as a server renders it, and the text the model should write after it, its end token included."""
    options = {"enable_thinking": chat.thinking}
    prompt = render(chat.messages[:-1], tools=chat.tools or None, add_generation_prompt=True, kwargs=options)
    whole = render(chat.messages, tools=chat.tools or None, add_generation_prompt=False, kwargs=options)
    if not whole.startswith(prompt) or not whole.endswith(family.end):
        raise ValueError(f"{family.name}: the prompt is not how the whole begins: {prompt!r} {whole!r}")
    return prompt, whole[len(prompt) :].removesuffix("\n") if family.end.endswith("\n") else whole[
        len(prompt) :
    ]


def frontend(module: str) -> ModuleType:
    """A module of openinfer.frontend. Where training runs there is jinja2 and nothing else of what a server needs, so
    the packages above it are put in place without running them."""
    if importlib.util.find_spec("msgspec") is None:
        for name in ("openinfer.frontend", "openinfer.frontend.http"):
            if name not in sys.modules:
                sys.modules[name] = package = ModuleType(name)
                package.__path__ = [
                    f"{place}/{name.rpartition('.')[2]}"
                    for place in importlib.import_module(name.rpartition(".")[0]).__path__
                ]
    return importlib.import_module(f"openinfer.frontend.{module}")
