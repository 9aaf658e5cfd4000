"""The recipe as the command line sees it. Importing this imports no model code."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from openinfer.recipes.deepseek_v3.published import MODEL_TYPES, SAME, SIZES, SMALL, config_json
from openinfer.recipes.engine import Options, Recipe, SetupError, Source

if TYPE_CHECKING:
    from openinfer.recipes.deepseek_v3.blueprint import DeepseekV3


@dataclass(frozen=True, slots=True)
class LatentOptions(Options):
    refused: ClassVar[dict[str, str]] = {
        "enable_lora": "no op adds an adapter to its absorbed projections yet",
        "kv_cache_dtype": "it caches latents in the model's dtype; an FP8 form of them is not written yet",
    }
    draft_methods: ClassVar[tuple[str, ...]] = (*Options.draft_methods, "mtp")


class DeepseekV3Recipe(Recipe[LatentOptions]):
    """Serves DeepSeek-V3 (V3-0324, V3.1, R1), V3.2, Kimi-K2 and GLM-5 checkpoints."""

    name, options = "deepseek_v3", LatentOptions
    small: Mapping[str, Any] = {**config_json("DeepSeek-V3"), **SMALL}

    def matches(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") in MODEL_TYPES

    def blueprint(
        self, source: Source, options: LatentOptions, *, ranks: int = 1, rank: int = 0
    ) -> "DeepseekV3":
        from openinfer.recipes.deepseek_v3.blueprint import DeepseekV3
        from openinfer.recipes.deepseek_v3.config import Config

        coded = options.activation_quantization == "on"
        config = Config.parse(source.config, source.eos, options.quantization, coded, source.checkpoint)
        speculation = options.speculation()
        drafts = options.proposes
        found, name = source.checkpoint, f"model.layers.{config.num_layers}.eh_proj.weight"
        if drafts and (not config.mtp or (found is not None and name not in found)):
            raise SetupError("--speculative-config: this checkpoint has no MTP layer; use method ngram")
        if speculation is not None and speculation.quantization is not None:
            raise SetupError("--speculative-config: quantization is for Qwen3.5's MTP head; leave it out")
        return DeepseekV3(config.of_rank(rank, ranks), options.block_size, drafts)

    def published(self) -> Mapping[str, Mapping[str, Any]]:
        return {name: config_json(SAME.get(name, name)) for name in (*SIZES, *SAME)}


RECIPE = DeepseekV3Recipe()
