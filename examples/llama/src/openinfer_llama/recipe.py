"""The recipe as the command line sees it. Importing this module imports no model code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from openinfer.recipes.engine import Options, Recipe, SetupError, Source

if TYPE_CHECKING:
    from openinfer.recipes.engine.gguf import GgufFormat
    from openinfer_llama.blueprint import Llama


class LlamaRecipe(Recipe[Options]):
    """Serves Llama 3.x, Mistral and Qwen2.5 checkpoints in bf16."""

    name, options = "llama", Options
    small: Mapping[str, Any] = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 1, "vocab_size": 1024, "max_position_embeddings": 8192,
    }  # fmt: skip

    def matches(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") in ("llama", "mistral", "qwen2")

    def blueprint(self, source: Source, options: Options, *, ranks: int = 1, rank: int = 0) -> Llama:
        from openinfer_llama.blueprint import Llama
        from openinfer_llama.config import Config

        if ranks != 1:
            raise SetupError(f"{ranks} ranks: llama runs on one GPU")
        return Llama(Config.parse(source.config, source.eos, source.checkpoint), options.block_size)

    def gguf(self) -> Mapping[str, GgufFormat]:
        from openinfer.recipes.engine.gguf import REST, WORDS, dense

        splits = {"llama-bpe": WORDS + r"|\p{N}{1,3}" + REST, "gpt-2": None, "smollm": None}
        return {
            "llama": dense({"model_type": "llama"}, splits, interleaved=True),
            "qwen2": dense(
                {"model_type": "qwen2", "attention_bias": True}, {"qwen2": WORDS + r"|\p{N}" + REST}
            ),
        }


RECIPE = LlamaRecipe()
