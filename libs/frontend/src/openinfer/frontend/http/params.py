"""From a typed body to the parameters of a request: every bound is checked here, before a request is submitted."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from openinfer.frontend.chat import OutputParser
from openinfer.frontend.contract import INT64_MAX, INT64_MIN, EngineInfo, KVTransfer
from openinfer.frontend.errors import APIError, ModelFilesError, NotSupported, TooLong
from openinfer.frontend.http.body import MAX_LOGPROBS, MAX_N, MAX_SALT_CHARS, MAX_STOP_STRINGS, CommonBody
from openinfer.frontend.http.text.structured import grammar_of, unkept
from openinfer.frontend.http.tokenizer import Tokenizer
from openinfer.frontend.model_files import read_json
from openinfer.sampler import InvalidParams, SamplingParams
from openinfer.sampler.form import Grammar
from openinfer.sampler.params import MAX_STOP_TOKEN_IDS

MAX_SEQUENCES = 1024
"""Prompts times n of one HTTP request."""
MAX_STOP_CHARS = 1024
MAX_USER_CHARS = 1024
MAX_LOGPROB_ENTRIES = 8 << 20
"""The most log-probabilities of an answer: alternatives asked for, times tokens of all sequences."""
MAX_POOLS = 16
"""Tokens of one HTTP request's sequences, prompts and outputs at their longest, in units of the KV capacity."""
_KV = "kv_transfer_params"
_BAD_SALT = re.compile(r"[@/\\\0]")
_SAMPLING = (
    *("seed", "min_tokens", "ignore_eos", "temperature", "top_k", "top_p", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
"""Fields that go to the sampler unchanged."""
_FEATURES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "frequency_penalty": ("penalties", (None, 0)),
    "presence_penalty": ("penalties", (None, 0)),
    "repetition_penalty": ("penalties", (None, 1)),
    "logit_bias": ("logit_bias", (None, {})),
    "allowed_token_ids": ("allowed_token_ids", (None,)),
    "bad_words": ("bad_words", (None, [])),
}
"""Field -> the feature an engine must have for it, and the values that need no feature."""


class SamplingDefaults(msgspec.Struct, frozen=True):
    """The defaults of a request's sampling parameters; from generation_config.json with `auto`."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    """Ignored where the engine has no penalties."""
    description: str | None = None
    """What the model is, for the page and `openinfer chat`: a key of our own."""

    @classmethod
    def load(cls, model_dir: Path) -> "SamplingDefaults":
        """Read generation_config.json if there is one. Raises ModelFilesError for a malformed one."""
        path = model_dir / "generation_config.json"
        if not path.exists():
            return cls()
        config = read_json(path)
        given = {name: config[name] for name in cls.__struct_fields__ if config.get(name) is not None}
        given["description"] = str(given.get("description", ""))[:500] or None
        try:
            cls(**given).params()
        except InvalidParams as error:
            raise ModelFilesError(f"{path}: {error}") from error
        return cls(**given)

    def params(self) -> SamplingParams:
        """Those of a request that gives none."""
        given = msgspec.structs.asdict(self).items()
        return SamplingParams(**{k: v for k, v in given if v is not None and k != "description"})


class Plan(msgspec.Struct, frozen=True):
    """How to generate for one HTTP request; the same for each of its prompts."""

    sampling: SamplingParams
    n: int
    stop: list[str]
    include_stop: bool
    skip_special_tokens: bool
    return_token_ids: bool
    stream: bool
    include_usage: bool
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    grammar: Grammar | None = None
    """The grammar of the content. The text around it in a chat comes with the chat's format."""
    grammar_field: str = "tools"  # where it came from
    prompt_logprobs: int | None = None
    """Alternatives of the prompt's tokens in the answer's field of that name; None leaves it out."""
    echo: bool = False
    """The answer's text begins with the prompt, and its logprobs with the prompt's."""
    only_echo: bool = False
    """... and ends with it: the one token that is generated all the same is not shown."""
    continuous_usage: bool = False
    """Every event of the stream has the counts so far."""
    more_stop_ids: frozenset[int] = frozenset()
    """Stop ids beyond the number that an engine looks for."""
    adapter: str = ""
    kv_transfer: KVTransfer | None = None
    disable_spec_decode: bool = False
    tokens_as_ids: bool = False
    """Tokens of log-probabilities are named by their ids."""
    warnings: tuple[str, ...] = ()
    """Fields of the request that change nothing here, in words for the answer's headers."""
    new_parser: Callable[[], OutputParser] | None = None
    """Makes the readers of a chat's answers: stop strings are looked for in the content that they find."""
    model: str = ""
    """The model's name in the answer."""

    def sampling_of(self, index: int) -> SamplingParams:
        """The parameters of the index-th of n choices: seed + index, within 64 bits."""
        seed = self.sampling.seed
        if seed is None or index == 0:
            return self.sampling
        seed = (seed + index - INT64_MIN) % (INT64_MAX - INT64_MIN + 1) + INT64_MIN
        return dataclasses.replace(self.sampling, seed=seed)

    @property
    def wanted_of_prompt(self) -> int | None:
        """Request.prompt_logprobs."""
        asked = [self.prompt_logprobs, self.sampling.logprobs if self.echo else None]
        return max((count for count in asked if count is not None), default=None)


def make_plan(
    body: CommonBody,
    logprobs: int | None,
    defaults: SamplingDefaults,
    info: EngineInfo,
    tokenizer: Tokenizer | None,
    format_field: str = "response_format",
) -> Plan:
    """Check all fields but the prompts. format_field: the endpoint's name for response_format. Raises APIError (400)
    naming the field."""
    n = 1 if body.n is None else body.n
    _check(1 <= n <= MAX_N, "n", n, f"an integer from 1 to {MAX_N}")
    for name in ("seed", "priority"):
        value = getattr(body, name)
        fits = value is None or INT64_MIN <= value <= INT64_MAX
        _check(fits, name, value, "an integer of 64 bits with a sign")
    options = body.stream_options
    salt = body.cache_salt or ""
    if len(salt) > MAX_SALT_CHARS or _BAD_SALT.search(salt):
        raise APIError(
            f"cache_salt must have at most {MAX_SALT_CHARS} characters and no @ / \\ or NUL",
            param="cache_salt",
        )
    tenant = body.user or ""
    _check(len(tenant) <= MAX_USER_CHARS, "user", f"{len(tenant)} characters", f"at most {MAX_USER_CHARS}")
    field, grammar = grammar_of(body, format_field) or ("tools", None)
    if grammar is not None:
        check_grammars(field, info, tokenizer)
        field = field.split(".")[0]
    return Plan(
        sampling=_sampling(body, logprobs, defaults, info, tokenizer),
        n=n,
        stop=_stop_strings(body, tokenizer is not None),
        more_stop_ids=frozenset((body.stop_token_ids or ())[MAX_STOP_TOKEN_IDS:]),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        return_token_ids=tokenizer is None if body.return_token_ids is None else body.return_token_ids,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        priority=body.priority or 0,
        tenant=tenant,
        cache_salt=salt,
        grammar=grammar,
        grammar_field=field,
        prompt_logprobs=_prompt_logprobs(body, info),
        kv_transfer=_kv_transfer(body, n, info),
        disable_spec_decode=bool(body.disable_spec_decode),
        warnings=_warnings(body, grammar, field),
    )


def _warnings(body: CommonBody, grammar: Grammar | None, field: str) -> tuple[str, ...]:
    schemas = [json.loads(grammar.text)] if grammar is not None and grammar.kind == "json_schema" else []
    idle = body.stream_options is not None and not body.stream
    return (*unkept(field, schemas), *["stream_options is ignored without stream: true"] * idle)


def with_echo(plan: Plan, info: EngineInfo, tokenizer: Tokenizer | None, max_tokens: int | None) -> Plan:
    """The plan for echo: true. Raises APIError (400)."""
    if tokenizer is None:
        raise APIError("echo needs a tokenizer, and this server runs without", param="echo")
    if plan.sampling.logprobs is not None and "prompt_logprobs" not in info.features:
        raise NotSupported(
            "echo with logprobs is not supported by this engine; leave one of them out", "echo"
        )
    return msgspec.structs.replace(plan, echo=True, only_echo=max_tokens == 0)


def _prompt_logprobs(body: CommonBody, info: EngineInfo) -> int | None:
    asked = body.prompt_logprobs
    if asked is None:
        return None
    _check_feature("prompt_logprobs", "prompt_logprobs", info)
    _check(0 <= asked <= MAX_LOGPROBS, "prompt_logprobs", asked, f"0 to {MAX_LOGPROBS}")
    if body.stream:
        raise APIError("prompt_logprobs is not possible with stream: true", param="prompt_logprobs")
    return asked


def check_grammars(field: str, info: EngineInfo, tokenizer: Tokenizer | None) -> None:
    """Raise APIError (400) where an output cannot be forced into the form that `field` asks for."""
    if "grammar" not in info.features:
        why = "this engine has no grammars"
    elif tokenizer is None or not tokenizer.is_bytes:
        why = "it needs a byte-level tokenizer, and this server runs without"
    else:
        return
    raise NotSupported(f"{field} is not supported: {why}", field.split(".")[0])


def _sampling(
    body: CommonBody,
    logprobs: int | None,
    defaults: SamplingDefaults,
    info: EngineInfo,
    tokenizer: Tokenizer | None,
) -> SamplingParams:
    for name, (feature, nothing) in _FEATURES.items():
        if getattr(body, name) not in nothing:
            _check_feature(feature, name, info)
    if logprobs is not None:
        _check_feature("logprobs", "logprobs", info)
    given: dict[str, Any] = {}
    for name in _SAMPLING:
        value = getattr(body, name)
        if value is None and not (name in _FEATURES and _FEATURES[name][0] not in info.features):
            value = getattr(defaults, name, None)
        if value is not None:
            given[name] = value
    if body.logit_bias:
        given["logit_bias"] = tuple(_biases(body.logit_bias, info))
    if body.allowed_token_ids is not None:
        _check(bool(body.allowed_token_ids), "allowed_token_ids", "empty", "at least one id")
        given["allowed_token_ids"] = _known_ids(body.allowed_token_ids, "allowed_token_ids", info)
    if body.bad_words:
        given["bad_words_token_ids"] = _bad_words(body.bad_words, tokenizer)
    stop_ids = _known_ids(body.stop_token_ids or (), "stop_token_ids", info)
    given["stop_token_ids"] = stop_ids[:MAX_STOP_TOKEN_IDS]
    try:
        return SamplingParams(**given, logprobs=logprobs)
    except InvalidParams as error:
        raise APIError(str(error), param=error.param.replace("bad_words_token_ids", "bad_words")) from error


def _biases(biases: dict[str, float], info: EngineInfo) -> Iterator[tuple[int, float]]:
    for key, value in biases.items():
        good = key.isdecimal() and key.isascii() and len(key) < 12 and int(key) < info.vocab_size
        _check(good, "logit_bias", f"for token {key[:20]!r}", f"ids below {info.vocab_size}")
        yield int(key), value


def _known_ids(ids: Sequence[int], param: str, info: EngineInfo) -> tuple[int, ...]:
    for token_id in ids:
        _check(0 <= token_id < info.vocab_size, param, token_id, f"ids below {info.vocab_size}")
    return tuple(ids)


def _bad_words(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Each word as it begins a text and as it follows a space."""
    if tokenizer is None:
        raise APIError("bad_words needs a tokenizer, and this server runs without", param="bad_words")
    found = {
        tuple(tokenizer.encode_short(text)): None for word in words for text in (word, " " + word.lstrip())
    }
    return tuple(ids for ids in found if ids)


def _stop_strings(body: CommonBody, has_tokenizer: bool) -> list[str]:
    stop = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
    if len(stop) > MAX_STOP_STRINGS:
        raise APIError(f"stop has {len(stop)} strings, at most {MAX_STOP_STRINGS} are allowed", param="stop")
    for one in stop:
        _check(len(one) <= MAX_STOP_CHARS, "stop", f"{len(one)} characters", f"at most {MAX_STOP_CHARS}")
    if "" in stop:
        raise APIError("stop may not hold an empty string", param="stop")
    if stop and not has_tokenizer:
        raise APIError(
            "stop strings need a tokenizer, and this server runs without; use stop_token_ids", param="stop"
        )
    return stop


def max_tokens_for(
    prompt_tokens: int,
    asked: int | None,
    default: int | None,
    plan: Plan,
    info: EngineInfo,
    field: str,
    what: str,
) -> int:
    """The most tokens that one sequence may generate. default None: the rest of the context. field, what: where the
    number comes from, and the prompt. Raises TooLong where prompt and output do not fit."""
    room = info.max_model_len - prompt_tokens
    if asked is not None:
        _check(asked >= 1, field, asked, "an integer of at least 1")
    elif default is not None:
        asked = min(default, max(room, 1))
    if room < (asked or 1):
        raise TooLong(prompt_tokens, asked, info.max_model_len, what, field)
    result = asked or room
    if plan.sampling.min_tokens > result:
        raise APIError(
            f"min_tokens is {plan.sampling.min_tokens}, more than the {result} tokens to generate",
            param="min_tokens",
        )
    return result


def prompt_ids(ids: list[Any], info: EngineInfo, param: str = "prompt") -> list[int]:
    """Check a prompt given as token ids."""
    if not ids:
        raise APIError(f"{param} is empty: at least one token is needed", param=param)
    if len(ids) >= info.max_model_len:  # before we look at each of them
        raise TooLong(len(ids), None, info.max_model_len, param)
    if not all(type(token_id) is int for token_id in ids):
        raise APIError(f"{param} must hold token ids (integers) only", param=param)
    low, high = min(ids), max(ids)
    if low < 0 or high >= info.vocab_size:
        wrong = low if low < 0 else high
        raise APIError(
            f"{param} holds token id {wrong}, the model has 0 to {info.vocab_size - 1}", param=param
        )
    return ids


def check_size(prompts: Sequence[list[int]], limits: Sequence[int], plan: Plan, info: EngineInfo) -> None:
    """Check the size of the sequences together. limits: the most tokens to generate for each prompt. Raises APIError
    (400)."""
    if plan.kv_transfer is not None and len(prompts) > 1:
        raise NotSupported(f"{_KV} is of one prompt, and {len(prompts)} are given; send them one by one", _KV)
    total = plan.n * (sum(map(len, prompts)) + sum(limits))
    most = MAX_POOLS * max(info.kv_capacity_tokens, info.max_model_len)
    if total > most:
        raise APIError(
            f"{len(limits) * plan.n} sequences of this length come to {total} tokens, one request may have {most}: "
            "lower n or max_tokens",
            param="n" if plan.n > 1 else None,
            code="request_too_large",
        )
    entries = plan.n * sum(limits) * (1 + (plan.sampling.logprobs or 0))
    if plan.sampling.logprobs and entries > MAX_LOGPROB_ENTRIES:
        raise APIError(
            f"log-probabilities come to {entries} entries, one request may have {MAX_LOGPROB_ENTRIES}: lower n, "
            "max_tokens or the number of alternatives",
            param="logprobs",
            code="request_too_large",
        )
    entries = plan.n * sum(map(len, prompts)) * (1 + (plan.wanted_of_prompt or 0))
    if plan.wanted_of_prompt is not None and entries > MAX_LOGPROB_ENTRIES:
        raise APIError(
            f"log-probabilities of prompts come to {entries} entries, one request may have {MAX_LOGPROB_ENTRIES}: "
            "shorten the prompts, lower n or the number of alternatives",
            param="echo" if plan.prompt_logprobs is None else "prompt_logprobs",
            code="request_too_large",
        )


def _kv_transfer(body: CommonBody, n: int, info: EngineInfo) -> KVTransfer | None:
    given = body.kv_transfer_params
    if given is None or not (given.do_remote_decode or given.do_remote_prefill):
        return None
    problem = None
    if "kv_transfer" not in info.features:
        problem = f"{_KV} is not supported by this engine; start it with --kv-transfer-config"
    elif given.do_remote_decode and given.do_remote_prefill:
        problem = f"{_KV} has both do_remote_decode and do_remote_prefill; give one of them"
    elif given.do_remote_prefill and (not given.remote_host or not 0 < (given.remote_port or 0) < 65536):
        problem = f"{_KV} with do_remote_prefill needs remote_host and remote_port"
    elif given.do_remote_decode and body.stream:
        problem = "do_remote_decode is not possible with stream: true: a whole answer says where the KV is"
    elif given.do_remote_decode and n > 1:
        problem = f"do_remote_decode is not possible with n: {n}; the decode server makes the choices"
    elif body.prompt_logprobs is not None:
        problem = f"{_KV} is not possible with prompt_logprobs, which need the whole prompt computed"
    if problem is not None:
        raise NotSupported(problem, _KV)
    return given


def _check_feature(feature: str, field: str, info: EngineInfo) -> None:
    if feature not in info.features:
        raise NotSupported(f"{field} is not supported by this engine; leave it out", field)


def _check(good: bool, param: str, given: object, allowed: str) -> None:
    if not good:
        raise APIError(f"{param} is {given}, allowed is {allowed}", param=param)
