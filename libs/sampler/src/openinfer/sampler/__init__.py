"""openinfer.sampler: sampling parameters, and sampling from logits to token ids and logprobs.

Names that need numpy are imported when they are used, because processes that serve HTTP need none of them.
"""

import importlib
from typing import TYPE_CHECKING

from openinfer.sampler.errors import (
    GrammarFailed,
    InvalidGrammar,
    InvalidLogits,
    InvalidParams,
    MissingExtra,
    SamplerError,
)
from openinfer.sampler.params import MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from openinfer.sampler.noise import fresh_seed, gumbel, hash_u32, seed_words
    from openinfer.sampler.reference import Samples, sample, sample_arrays

__all__ = [
    "MAX_LOGPROBS", "GrammarFailed", "InvalidGrammar", "InvalidLogits", "InvalidParams", "MissingExtra",
    "SamplerError", "Samples", "SamplingParams", "fresh_seed", "gumbel", "hash_u32", "sample",
    "sample_arrays", "seed_words",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name in __all__:
        for module in ("noise", "reference"):
            found = getattr(importlib.import_module(f"openinfer.sampler.{module}"), name, None)
            if found is not None:
                globals()[name] = found
                return found
    raise AttributeError(f"module 'openinfer.sampler' has no attribute {name!r}")
