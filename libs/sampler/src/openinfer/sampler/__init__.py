"""openinfer.sampler: sampling parameters, and sampling from logits to token ids and logprobs."""

from openinfer.sampler.errors import (
    GrammarFailed,
    GrammarTimeout,
    InvalidGrammar,
    InvalidLogits,
    InvalidParams,
    MissingExtra,
    SamplerError,
)
from openinfer.sampler.noise import fresh_seed, gumbel, hash_u32, seed_words
from openinfer.sampler.params import MAX_LOGPROBS, SamplingParams
from openinfer.sampler.reference import Samples, sample, sample_arrays

__all__ = [
    "MAX_LOGPROBS",
    "GrammarFailed",
    "GrammarTimeout",
    "InvalidGrammar",
    "InvalidLogits",
    "InvalidParams",
    "MissingExtra",
    "SamplerError",
    "Samples",
    "SamplingParams",
    "fresh_seed",
    "gumbel",
    "hash_u32",
    "sample",
    "sample_arrays",
    "seed_words",
]
