"""The recipe as the command line sees it, and the published sizes. Importing this imports no model code."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from openinfer.recipes.engine import Options, Recipe, Source

if TYPE_CHECKING:
    from openinfer.recipes.engine.gguf import GgufFormat
    from openinfer.recipes.qwen3.blueprint import Qwen3

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
    """The keys of config.json that matter, for a size of SIZES or MIXTURES; `fp8`: of the block-scaled checkpoint;
    `awq`: of the one in INT4."""
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


@dataclass(frozen=True, slots=True)
class Qwen3Options(Options):
    """The options of every engine."""

    refused: ClassVar[Mapping[str, str]] = {}
    draft_methods: ClassVar[tuple[str, ...]] = (*Options.draft_methods, "eagle3")
    lone_tokens: ClassVar[int] = 4096


class Qwen3Recipe(Recipe[Qwen3Options]):
    """Serves Qwen3 checkpoints, dense and mixtures of experts."""

    name, options = "qwen3", Qwen3Options
    small: Mapping[str, Any] = {
        "model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 16, "vocab_size": 1024,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    }  # fmt: skip

    def matches(self, config: Mapping[str, Any]) -> bool:
        """Whether config.json is a Qwen3's."""
        return config.get("model_type") in MODEL_TYPES

    def blueprint(self, source: Source, options: Qwen3Options, *, ranks: int = 1, rank: int = 0) -> "Qwen3":
        """The model of a source."""
        from openinfer.recipes.qwen3.blueprint import Qwen3
        from openinfer.recipes.qwen3.config import Config

        coded = options.activation_quantization == "on"
        config = Config.parse(source.config, source.eos, options.quantization, coded, source.checkpoint)
        config = config.of_rank(rank, ranks)
        head, speculation = None, options.speculation()
        if speculation is not None and speculation.proposes:
            from openinfer.recipes.eagle3 import Head

            head = Head.read(Path(speculation.model), config)
        return Qwen3(config, options.block_size, head)

    def gguf(self) -> "Mapping[str, GgufFormat]":
        """Files of dense models."""
        from openinfer.recipes.engine.gguf import REST, WORDS, dense

        return {"qwen3": dense({"model_type": "qwen3"}, {"qwen2": WORDS + r"|\p{N}" + REST}, head_norms=True)}

    def published(self) -> Mapping[str, Mapping[str, Any]]:
        """The published sizes, in BF16 and FP8, and those in INT4."""
        sizes = (*SIZES, *MIXTURES)
        plain = {size: config_json(size) for size in sizes}
        plain |= {f"{size}-FP8": config_json(size, fp8=True) for size in sizes}
        return plain | {f"{size}-AWQ": config_json(size, awq=True) for size in IN_AWQ}


RECIPE = Qwen3Recipe()
