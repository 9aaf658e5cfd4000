"""SamplingParams: what a request asks of the sampler, in plain values that JSON and msgpack can carry."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from openinfer.sampler.errors import InvalidParams

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 16
MAX_LOGIT_BIASES = 300
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 32
GREEDY_TEMPERATURE = 1e-5
_MAX_I32 = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one sequence are chosen. Immutable, hashable, checked when made.

    First the logits are adjusted: allowed_token_ids, bad_words_token_ids, min_tokens, logit_bias, then the
    penalties (``openinfer.sampler.adjust`` has the exact rule; the order is vLLM's). The filters apply in the
    order min_p, top_k, top_p to ``logits / temperature``; ties at a threshold are kept
    (``openinfer.sampler.reference``).

    Attributes:
        temperature: in [0, 2]; below 1e-5 is greedy.
        top_k: how many of the most likely tokens are kept; 0 and -1 keep all (stored as 0); 1 is greedy.
        top_p: in (0, 1], the probability mass that is kept; 1 keeps all.
        min_p: in [0, 1], tokens less likely than min_p times the most likely one are dropped; 0 keeps all.
        frequency_penalty: in [-2, 2], taken from a token's logit for each time it is in the output.
        presence_penalty: in [-2, 2], taken once from the logit of a token that is in the output.
        repetition_penalty: in [0.01, 100]; the logit of a token that is in the prompt or the output is divided
            by it where above 0 and multiplied by it elsewhere; 1 changes nothing.
        logit_bias: at most 300 pairs (token id, number in [-100, 100]) to add to logits, no id twice.
        allowed_token_ids: if there are any (at most 4096), nothing else is drawn.
        bad_words_token_ids: at most 128 sequences of 1 to 32 ids, none of which the output is to contain: the
            last id of one is not drawn where the output ends in the ids before it.
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
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._normalise("temperature", _number, 0.0, 2.0)
        self._normalise("top_k", lambda name, given: max(_integer(name, given, -1, _MAX_I32), 0))
        self._normalise("top_p", _number, 0.0, 1.0, above=True)
        self._normalise("min_p", _number, 0.0, 1.0)
        self._normalise("frequency_penalty", _number, -2.0, 2.0)
        self._normalise("presence_penalty", _number, -2.0, 2.0)
        self._normalise("repetition_penalty", _number, 0.01, 100.0)
        self._normalise("logit_bias", _biases)
        self._normalise("allowed_token_ids", _token_ids, MAX_ALLOWED_TOKEN_IDS)
        self._normalise("bad_words_token_ids", _words)
        self._normalise("min_tokens", _integer, 0, _MAX_I32)
        self._normalise("stop_token_ids", _token_ids, MAX_STOP_TOKEN_IDS)
        if self.seed is not None:
            self._normalise("seed", _integer, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            self._normalise("logprobs", _integer, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidParams("ignore_eos", self.ignore_eos, "true or false")

    def _normalise(self, name: str, check: Callable[..., object], *limits: float, **more: bool) -> None:
        object.__setattr__(self, name, check(name, getattr(self, name), *limits, **more))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without a draw."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on which tokens the sequence has."""
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits are changed before a token is chosen (min_tokens aside)."""
        return bool(
            self.has_penalties or self.logit_bias or self.allowed_token_ids or self.bad_words_token_ids
        )

    @property
    def max_token_id(self) -> int:
        """The largest id that any field names, -1 without one: an engine refuses those past its vocabulary."""
        ids = (*self.stop_token_ids, *self.allowed_token_ids, *(token for token, _ in self.logit_bias))
        return max((*ids, *(token for word in self.bad_words_token_ids for token in word)), default=-1)

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
    number: Any = given if isinstance(given, Real) and not isinstance(given, bool) else math.nan
    if not low <= number <= high or (above and number == low):  # before an integer is too large for a float
        raise InvalidParams(param, given, f"a number in {'(' if above else '['}{low:g}, {high:g}]")
    return float(number)


def _integer(param: str, given: object, low: int, high: int) -> int:
    if not isinstance(given, Integral) or isinstance(given, bool) or not low <= int(given) <= high:
        raise InvalidParams(param, given, f"an integer from {low} to {high}")
    return int(given)


def _is_list(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str)


def _token_ids(param: str, given: Sequence[int], most: int, *, least: int = 0) -> tuple[int, ...]:
    if not _is_list(given) or not least <= len(given) <= most:
        allowed = f"at most {most}" if least == 0 else f"{least} to {most}"
        raise InvalidParams(param, given, f"a list of {allowed} token ids")
    return tuple(_integer(param, token, 0, _MAX_I32) for token in given)


def _words(param: str, given: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    if not _is_list(given) or len(given) > MAX_BAD_WORDS:
        raise InvalidParams(param, given, f"a list of at most {MAX_BAD_WORDS} lists of token ids")
    return tuple(_token_ids(param, word, MAX_BAD_WORD_LENGTH, least=1) for word in given)


def _biases(param: str, given: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    allowed = f"a list of at most {MAX_LOGIT_BIASES} pairs (token id, bias), no id twice"
    pairs = [pair for pair in given if _is_list(pair) and len(pair) == 2] if _is_list(given) else []
    if not _is_list(given) or len(given) > MAX_LOGIT_BIASES or len(pairs) < len(given):
        raise InvalidParams(param, given, allowed)
    biases = {
        _integer(param, token, 0, _MAX_I32): _number(param, bias, -100.0, 100.0) for token, bias in pairs
    }
    if len(biases) < len(pairs):
        raise InvalidParams(param, given, allowed)
    return tuple(biases.items())
