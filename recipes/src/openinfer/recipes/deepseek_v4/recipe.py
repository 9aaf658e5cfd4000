"""The recipe as the command line sees it. Importing this imports no model code."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from openinfer.recipes.deepseek_v4.published import RELEASES, SIZES, config_json
from openinfer.recipes.engine import Options, Recipe, SetupError, Source, option

if TYPE_CHECKING:
    from openinfer.recipes.deepseek_v4.blueprint import DeepseekV4

SMALL = {
    "hidden_size": 128, "num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_attention_heads": 2,
    "head_dim": 128, "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 64, "index_n_heads": 16, "index_head_dim": 64,
    "index_topk": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "num_hash_layers": 1, "vocab_size": 1024, "max_position_embeddings": 8192,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeepseekOptions(Options):
    """The options of every engine, and whether activations are rounded."""

    refused: ClassVar[dict[str, str]] = {
        "quantization": "its checkpoints are in FP8 and FP4",
        "block_size": "its pages have 128 tokens, as many as one heavily compressed entry covers",
        "enable_lora": "no op adds an adapter to its grouped and packed projections yet",
        "kv_cache_dtype": "it caches latents in the model's dtype, whose values are rounded to FP8 as published",
    }
    draft_methods: ClassVar[tuple[str, ...]] = (*Options.draft_methods, "mtp", "dspark")

    activation_quantization: str = option(
        "on",
        "on: round activations, the cache and the indexer to FP8 and FP4 where the published code does",
        choices=("on", "off"),
    )


LAYERS = {
    "": "no layers that draft",
    "mtp": "an MTP layer",
    "dspark": "a DSpark drafter (dspark_block_size, dspark_target_layer_ids)",
}
"""What a checkpoint has, by the method that needs it."""


class DeepseekV4Recipe(Recipe[DeepseekOptions]):
    """Serves DeepSeek-V4 checkpoints."""

    name, options = "deepseek_v4", DeepseekOptions
    small: Mapping[str, Any] = {**config_json("Flash", layers=3), **SMALL}

    def matches(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == "deepseek_v4"

    def blueprint(
        self, source: Source, options: DeepseekOptions, *, ranks: int = 1, rank: int = 0
    ) -> "DeepseekV4":
        """The model of a source. Without a checkpoint its experts are in FP4, as the published ones are."""
        from openinfer.recipes.deepseek_v4.blueprint import DeepseekV4
        from openinfer.recipes.deepseek_v4.config import Config, Dspark
        from openinfer.recipes.deepseek_v4.weights import Format

        whole, deals = Config.parse(source.config, source.eos), not options.batch_invariant
        config = whole.of_rank(rank, ranks, deals=deals)
        form = Format.of(source.checkpoint) if source.checkpoint else Format(fp4_experts=True)
        speculation = options.speculation()
        if speculation is not None and speculation.proposes:
            if speculation.quantization is not None:
                raise SetupError("--speculative-config: quantization is for Qwen3.5's MTP head; leave it out")
            wanted, has = speculation.method, "mtp" if config.mtp else "dspark" if config.dspark else ""
            if wanted != has:
                raise SetupError(
                    f"--speculative-config: this checkpoint has {LAYERS[has]} by its config.json, and method {wanted} "
                    f"needs {LAYERS[wanted]}; use method {has or 'ngram'}"
                )
            drafter = Dspark.parse(source.config, config, source.checkpoint) if config.dspark else None
            if drafter is not None and (drafts := speculation.num_speculative_tokens) > drafter.block:
                raise SetupError(
                    f"--speculative-config: num_speculative_tokens is {drafts}; this drafter makes {drafter.block}"
                )
            form = dataclasses.replace(form, mtp=config.mtp, dspark=drafter)
        return DeepseekV4(config, form, options)

    def published(self) -> Mapping[str, Mapping[str, Any]]:
        return {name: config_json(name) for name in (*SIZES, *RELEASES)}


RECIPE = DeepseekV4Recipe()
