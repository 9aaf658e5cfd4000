"""The recipe as the command line sees it, and the published sizes. Importing this imports no model code."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from openinfer.recipes.engine import Options, Recipe, SetupError, Source, option

if TYPE_CHECKING:
    from openinfer.recipes.engine.gguf import GgufFormat
    from openinfer.recipes.qwen3_5.blueprint import Qwen35

STATE_DTYPES = ("float32", "bfloat16")
CHUNK = 64
"""Tokens after which a state may be kept: ops.gated_delta_net.STATE_CHUNK, which importing it here would make slow."""


@dataclass(frozen=True, slots=True)
class HybridOptions(Options):
    """The options of every engine, and how often snapshots of recurrent states are kept."""

    refused: ClassVar[dict[str, str]] = {}
    refused_on_gpu: ClassVar[dict[str, str]] = {
        "batch_invariant": "how a prompt is cut into steps changes what the delta rule's kernels round"
    }

    draft_methods: ClassVar[tuple[str, ...]] = (*Options.draft_methods, "mtp")

    snapshot_interval: int = option(
        512,
        f"tokens between snapshots of a prompt's state, where a cached prefix can end: a multiple of {CHUNK}",
        kind=int,
    )

    mamba_ssm_cache_dtype: str = option(
        "auto",
        "recurrent states between steps; bfloat16: half the memory, less exact; auto: as config.json says",
        choices=("auto", *STATE_DTYPES),
    )

    def check(self, recipe: str) -> None:
        """Raise SetupError; see Options."""
        Options.check(self, recipe)
        if self.snapshot_interval < CHUNK or self.snapshot_interval % CHUNK:
            raise SetupError(
                f"--snapshot-interval {self.snapshot_interval}: it must be a multiple of {CHUNK} tokens"
            )


MODEL_TYPES = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Checkpoints with a vision tower (which is not loaded), and those of the text model only."""
SIZES: dict[
    str, tuple[int, int, int, int, int, int | tuple[int, int, int], bool]
] = {  # hidden, layers, query heads, key-value heads, linear value heads, MLP or (experts, chosen, width), tied
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


class Qwen35Recipe(Recipe[HybridOptions]):
    """Serves the text model of Qwen3.5 checkpoints, dense and mixtures of experts, and Qwen3-Next."""

    name, options = "qwen3_5", HybridOptions
    small: Mapping[str, Any] = {
        "model_type": "qwen3_5_text", "hidden_size": 16, "num_hidden_layers": 2, "full_attention_interval": 2,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 1,
        "linear_num_value_heads": 1, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4, "intermediate_size": 16, "vocab_size": 1024, "max_position_embeddings": 8192,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    }  # fmt: skip

    def matches(self, config: Mapping[str, Any]) -> bool:
        """Whether config.json is a Qwen3.5's, with or without a vision tower, or a Qwen3-Next's."""
        return config.get("model_type") in MODEL_TYPES

    def blueprint(self, source: Source, options: HybridOptions, *, ranks: int = 1, rank: int = 0) -> "Qwen35":
        """The model of a source. Without a checkpoint its weights are spelled as the published ones are."""
        from openinfer.recipes.qwen3_5.blueprint import Qwen35
        from openinfer.recipes.qwen3_5.config import Config
        from openinfer.recipes.qwen3_5.weights import Format
        from openinfer.tensor import dtypes

        coded = options.activation_quantization == "on"
        config = Config.parse(source.config, source.eos, options.quantization, coded, source.checkpoint)
        if options.mamba_ssm_cache_dtype != "auto":
            config = dataclasses.replace(config, state_dtype=dtypes.of(options.mamba_ssm_cache_dtype))
        form = Format.of(source.checkpoint, config) if source.checkpoint else Format.published(config)
        speculation = options.speculation()
        if speculation is not None and speculation.proposes:
            if not config.mtp:
                raise SetupError("--speculative-config: this checkpoint has no MTP head; use method ngram")
            form = dataclasses.replace(form, mtp=True, fp8_drafts=speculation.quantization == "fp8")
        return Qwen35(config.of_rank(rank, ranks), form, options)

    def gguf(self) -> "Mapping[str, GgufFormat]":
        """Files of dense models."""
        from openinfer.recipes.qwen3_5.gguf import FORMAT

        return {"qwen35": FORMAT}

    def published(self) -> Mapping[str, Mapping[str, Any]]:
        """The published sizes, in BF16 and FP8."""
        plain = {name: config_json(name) for name in (*SIZES, *SAME)}
        return plain | {f"{name}-FP8": config_json(name, fp8=True) for name in plain}


RECIPE = Qwen35Recipe()
