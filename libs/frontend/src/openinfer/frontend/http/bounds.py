"""Facts for the OpenAPI document that the bodies' types do not have: ranges of fields, names of models, examples.

params.py and the sampler check them; a test holds the two to each other.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from openinfer.frontend.http.params import MAX_LOGPROBS, MAX_N, MAX_SALT_CHARS, MAX_STOP_STRINGS

__all__ = ["BOUNDS", "EXAMPLES", "narrow"]

_AT_LEAST_ONE = {"minimum": 1}
_TWO_EACH_WAY = {"minimum": -2, "maximum": 2}
_STOP = {"minLength": 1, "maxItems": MAX_STOP_STRINGS, "items": {"type": "string", "minLength": 1}}
BOUNDS: Mapping[str, Mapping[str, Any]] = {
    "cache_salt": {"maxLength": MAX_SALT_CHARS},
    "frequency_penalty": _TWO_EACH_WAY,
    "logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "max_completion_tokens": _AT_LEAST_ONE,
    "max_output_tokens": _AT_LEAST_ONE,
    "max_tokens": _AT_LEAST_ONE,
    "messages": {"minItems": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "min_tokens": {"minimum": 0, "maximum": 2**31 - 1},
    "n": {"minimum": 1, "maximum": MAX_N},
    "presence_penalty": _TWO_EACH_WAY,
    "repetition_penalty": {"minimum": 0.01, "maximum": 100},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "stop": _STOP,
    "stop_sequences": _STOP,
    "temperature": {"minimum": 0, "maximum": 2},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
}
"""Field -> keywords of JSON schema, each for the types that know it."""

_CHAT = [{"role": "user", "content": "Hello"}]
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "ChatBody": {"messages": _CHAT, "max_tokens": 16},
    "CompletionBody": {"prompt": "Hello", "max_tokens": 16},
    "DetokenizeBody": {"tokens": [5, 6]},
    "LoadBody": {"lora_name": "sql", "lora_path": "/adapters/sql"},
    "MessagesBody": {"messages": _CHAT, "max_tokens": 16},
    "ResponsesBody": {"input": "Hello", "max_output_tokens": 16},
    "SleepBody": {"level": 1},
    "TokenizeBody": {"prompt": "Hello"},
    "UnloadBody": {"lora_name": "sql"},
    "UpdateBody": {"path": "/checkpoints/step-7", "version": "step 7"},
    "WakeBody": {},
}
"""Name of a body -> one that every server answers."""

_KNOWN_BY = {
    "integer": ("minimum", "maximum", "exclusiveMinimum"),
    "number": ("minimum", "maximum", "exclusiveMinimum"),
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems", "items"),
}


def narrow(properties: dict[str, Any], models: Sequence[str]) -> None:
    """Write the bounds into a body's properties. models: the names that requests may give."""
    for name in properties.keys() & BOUNDS.keys():
        for option in properties[name].get("anyOf", [properties[name]]):
            known = _KNOWN_BY.get(option.get("type"), ())
            option |= {word: value for word, value in BOUNDS[name].items() if word in known}
    if "model" in properties:
        properties["model"] = {"enum": [*models, None], "default": None}
