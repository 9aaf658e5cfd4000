"""The flags of a DeepSeek-V4 engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from openinfer.recipes.engine import Options, option


@dataclass(frozen=True, slots=True)
class DeepseekOptions(Options):
    """The options of every engine, and whether activations are rounded."""

    refused: ClassVar[dict[str, str]] = {
        "quantization": "its checkpoints are in FP8 and FP4",
        "block_size": "its pages have 128 tokens, as many as one heavily compressed entry covers",
        "enable_lora": "no op adds an adapter to its grouped and packed projections yet",
        "kv_cache_dtype": "it caches latents in the model's dtype, whose values are rounded to FP8 as published",
        "batch_invariant": "its kernels split their sums by the number of tokens",
    }

    draft_methods: ClassVar[tuple[str, ...]] = (*Options.draft_methods, "mtp")

    activation_quantization: str = option(
        "on",
        "on: round activations, the cache and the indexer to FP8 and FP4 where the published code does",
        choices=("on", "off"),
    )
