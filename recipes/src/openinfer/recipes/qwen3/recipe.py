"""The recipe as the command line sees it. Importing this imports no model code."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from openinfer.recipes.engine import Options, Recipe, Source
from openinfer.recipes.qwen3.published import IN_AWQ, MIXTURES, MODEL_TYPES, SIZES, config_json

if TYPE_CHECKING:
    from openinfer.recipes.engine.gguf import GgufFormat
    from openinfer.recipes.qwen3.blueprint import Qwen3


@dataclass(frozen=True, slots=True)
class Qwen3Options(Options):
    refused: ClassVar[Mapping[str, str]] = {}
    draft_methods: ClassVar[tuple[str, ...]] = (*Options.draft_methods, "eagle3")


class Qwen3Recipe(Recipe[Qwen3Options]):
    """Serves Qwen3 checkpoints, dense and mixtures of experts."""

    name, options = "qwen3", Qwen3Options
    small: Mapping[str, Any] = {
        "model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 16, "vocab_size": 1024,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    }  # fmt: skip

    def matches(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") in MODEL_TYPES

    def blueprint(self, source: Source, options: Qwen3Options, *, ranks: int = 1, rank: int = 0) -> "Qwen3":
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
