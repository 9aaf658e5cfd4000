"""The recipe as the command line sees it. Importing this imports no model code."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from openinfer.recipes.engine import Options, Recipe, SetupError, Source, option
from openinfer.recipes.qwen3_5.published import MODEL_TYPES, SAME, SIZES, STATE_DTYPES, config_json

if TYPE_CHECKING:
    from openinfer.recipes.engine.gguf import GgufFormat
    from openinfer.recipes.qwen3_5.blueprint import Qwen35

CHUNK = 64
"""Tokens after which a state may be kept: ops.gated_delta_net.STATE_CHUNK, which importing it here would make slow."""


@dataclass(frozen=True, slots=True)
class HybridOptions(Options):
    """The options of every engine, and how often snapshots of recurrent states are kept."""

    refused: ClassVar[dict[str, str]] = {}
    draft_methods: ClassVar[tuple[str, ...]] = (*Options.draft_methods, "mtp")

    snapshot_interval: int = option(
        512,
        f"tokens between snapshots of a prompt's state, where a cached prefix can end: a multiple of {CHUNK}",
    )

    mamba_ssm_cache_dtype: str = option(
        "auto",
        "recurrent states between steps; bfloat16: half the memory, less exact; auto: as config.json says",
        choices=("auto", *STATE_DTYPES),
    )

    def check(self, recipe: str) -> None:
        Options.check(self, recipe)
        if self.snapshot_interval < CHUNK or self.snapshot_interval % CHUNK:
            raise SetupError(
                f"--snapshot-interval {self.snapshot_interval}: it must be a multiple of {CHUNK} tokens"
            )


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
        plain = {name: config_json(name) for name in (*SIZES, *SAME)}
        return plain | {f"{name}-FP8": config_json(name, fp8=True) for name in plain}


RECIPE = Qwen35Recipe()
