"""--speculative-config: how a decode row gets drafts, with the keys of vLLM's flag."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import msgspec

from openinfer.graph import Buckets, StepCosts, StepPace
from openinfer.graph.runner import Drafting
from openinfer.recipes.engine.errors import SetupError
from openinfer.scheduler import Drafter, GuardedDrafters, NGram, Suffixes

MAX_DRAFTS = 8
MAX_LOOKUP = 1024
OF_LAYERS = ("mtp", "dspark", "eagle3")
"""Methods in which layers draft: the checkpoint's own, or those of another one."""
OF_BLOCKS = ("dspark",)
"""Methods whose layers were trained for a number of drafts, which num_speculative_tokens may leave to them."""
OF_MODEL = ("eagle3", "custom_class")
"""Methods with the key `model`."""


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value of the flag. A config of these keys means what it means to vLLM."""

    method: str
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_DRAFTS)] = 0
    model: str = ""
    quantization: str | None = None
    prompt_lookup_min: Annotated[int, msgspec.Meta(ge=1)] = 2
    prompt_lookup_max: Annotated[int, msgspec.Meta(ge=1, le=MAX_LOOKUP)] = 5
    suffix_decoding_max_tree_depth: Annotated[int, msgspec.Meta(ge=2, le=MAX_LOOKUP)] = 24
    suffix_decoding_max_spec_factor: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    suffix_decoding_min_token_prob: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    suffix_decoding_max_cached_requests: int = 0

    @classmethod
    def parse(cls, text: str, methods: Sequence[str]) -> "SpeculativeConfig":
        """methods: those of the model. Raises SetupError."""
        try:
            config = msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, RecursionError) as error:
            raise SetupError(
                f"--speculative-config {text[:200]}: {error}; it is a JSON object with the keys "
                f"{', '.join(cls.__struct_fields__)}"
            ) from None
        if problem := config._problem(methods):
            raise SetupError(f"--speculative-config: {problem}")
        return config

    def _problem(self, methods: Sequence[str]) -> str:
        method, shortest, longest = self.method, self.prompt_lookup_min, self.prompt_lookup_max
        if method not in methods:
            return f"method {method!r} is not possible with this model; possible: {', '.join(methods)}"
        if not self.num_speculative_tokens and method not in OF_BLOCKS:
            return f"method {method}: missing required field `num_speculative_tokens`"
        if shortest > longest:
            return f"prompt_lookup_min {shortest} is above prompt_lookup_max {longest}"
        if bool(self.model) != (method in OF_MODEL):
            return (
                f"the methods {' and '.join(OF_MODEL)} need the key model, the folder of the head or MODULE:CLASS of "
                "the drafter; other methods take none"
            )
        if self.quantization not in (None, "fp8") or (self.quantization and method != "mtp"):
            return f"quantization {self.quantization!r} with method {method}; give fp8 with method mtp, or leave it out"
        if self.suffix_decoding_max_cached_requests:
            return (
                "suffix_decoding_max_cached_requests must be 0 or left out: a request's drafts come from its own "
                "prompt and answer, never from another's"
            )
        return ""

    @property
    def proposes(self) -> bool:
        """Whether layers of the model draft."""
        return self.method in OF_LAYERS

    def drafting(self, buckets: Buckets, pace: StepPace, vocab_size: int) -> Drafting:
        """The choice of drafts, for steps of these shapes and times."""
        make = None if self.proposes else self._make_drafter(vocab_size)
        return Drafting(buckets, make, StepCosts(buckets, pace))

    def _make_drafter(self, vocab_size: int) -> Callable[[], Drafter]:
        if self.method == "custom_class":
            return GuardedDrafters.named(self.model, vocab_size)
        if self.method == "ngram":
            return partial(NGram, self.prompt_lookup_min, self.prompt_lookup_max)
        return partial(
            Suffixes,
            self.suffix_decoding_max_tree_depth,
            self.suffix_decoding_max_spec_factor,
            self.suffix_decoding_min_token_prob,
        )
