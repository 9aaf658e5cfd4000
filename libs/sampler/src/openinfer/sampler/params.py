"""SamplingParams: what a request asks of the sampler, in plain values that JSON and msgpack can carry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from openinfer.sampler.errors import InvalidParams

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 16
GREEDY_TEMPERATURE = 1e-5
_MAX_I32 = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one sequence are chosen. Immutable, hashable, checked when made.

    The filters apply in the order min_p, top_k, top_p to ``logits / temperature``; ties at a threshold are
    kept (``openinfer.sampler.reference`` has the exact rule).

    Attributes:
        temperature: in [0, 2]; below 1e-5 is greedy.
        top_k: how many of the most likely tokens are kept; 0 and -1 keep all (stored as 0); 1 is greedy.
        top_p: in (0, 1], the probability mass that is kept; 1 keeps all.
        min_p: in [0, 1], tokens less likely than min_p times the most likely one are dropped; 0 keeps all.
        seed: any int64, or None for the engine to choose one (``fresh_seed``).
        min_tokens: no token that would end the sequence is drawn before this many were generated.
        stop_token_ids: at most 16 ids that end the sequence, besides the model's EOS (a device holds them in
            rows of fixed width).
        ignore_eos: the model's EOS does not end the sequence.
        logprobs: None for none, 0 for the chosen token's, n in 1..20 for the n most likely tokens' as well.

    Raises:
        InvalidParams: a ValueError whose ``param`` names the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._normalise("temperature", _number("temperature", self.temperature, 0.0, 2.0))
        self._normalise("top_k", max(_integer("top_k", self.top_k, -1, _MAX_I32), 0))
        self._normalise("top_p", _number("top_p", self.top_p, 0.0, 1.0, above=True))
        self._normalise("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        self._normalise("min_tokens", _integer("min_tokens", self.min_tokens, 0, _MAX_I32))
        self._normalise("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.seed is not None:
            self._normalise("seed", _integer("seed", self.seed, -(2**63), 2**63 - 1))
        if self.logprobs is not None:
            self._normalise("logprobs", _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS))
        if not isinstance(self.ignore_eos, bool):
            raise InvalidParams("ignore_eos", self.ignore_eos, "true or false")

    def _normalise(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without a draw."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    def forbidden_ids(self, generated: int, eos_ids: Sequence[int]) -> tuple[int, ...]:
        """Ids that must not be drawn now: those that would end a sequence still below ``min_tokens``.

        Args:
            generated: tokens generated so far.
            eos_ids: the model's EOS ids; left out with ``ignore_eos``, as they would not end the sequence.
        """
        if generated >= self.min_tokens:
            return ()
        return self.stop_token_ids if self.ignore_eos else (*self.stop_token_ids, *eos_ids)


def _number(param: str, given: object, low: float, high: float, *, above: bool = False) -> float:
    """A finite float in [low, high], or in (low, high] with ``above``."""
    allowed = f"a number in {'(' if above else '['}{low:g}, {high:g}]"
    if not isinstance(given, Real) or isinstance(given, bool):
        raise InvalidParams(param, given, allowed)
    value = float(given)
    if not math.isfinite(value) or not low <= value <= high or (above and value == low):
        raise InvalidParams(param, given, allowed)
    return value


def _integer(param: str, given: object, low: int, high: int) -> int:
    allowed = f"an integer from {low} to {high}"
    if not isinstance(given, Integral) or isinstance(given, bool):
        raise InvalidParams(param, given, allowed)
    value = int(given)
    if not low <= value <= high:
        raise InvalidParams(param, given, allowed)
    return value


def _token_ids(param: str, given: Sequence[int]) -> tuple[int, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) > MAX_STOP_TOKEN_IDS:
        raise InvalidParams(param, given, f"a list of at most {MAX_STOP_TOKEN_IDS} token ids")
    return tuple(_integer(param, token, 0, _MAX_I32) for token in given)
