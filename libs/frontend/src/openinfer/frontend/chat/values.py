"""Parsing argument values that a model wrote, and writing JSON that is safe to send on."""

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["Malformed", "decode", "encode", "kinds", "resolved", "typed"]

MAX_HOPS = 8


class Malformed(Exception):
    """The text does not have the form of a value; caught where a call is parsed."""


def decode(text: str) -> Any:
    """JSON, forgiving raw line breaks in strings. Raises Malformed."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Malformed from error


def encode(value: Any) -> str:
    """JSON text that is valid Unicode. Raises Malformed for a value that has no such text."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # half a surrogate pair decodes from JSON, but is no text
    except (ValueError, RecursionError) as error:
        raise Malformed from error
    return text


def typed(text: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """A value written as bare text, read as the schema's type; text where it is not of that type. root: what the
    schema's references are resolved in."""
    wanted = kinds(schema, root)
    if not wanted or wanted == {"string"}:
        return text
    word = text.strip()
    if "boolean" in wanted and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if "null" in wanted and word.lower() in ("null", "none"):
        return None
    try:
        value = decode(word)
    except Malformed:
        return text
    return value if _kind(value) & wanted else text


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a local reference (`{"$ref": "#/..."}`) leads to; the schema itself without one, or where it
    leads nowhere."""
    for _ in range(MAX_HOPS):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found: Any = root
        for step in reference[2:].split("/"):
            found = (
                found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
            )
        if not isinstance(found, Mapping):
            break
        schema = {**found, **{name: value for name, value in schema.items() if name != "$ref"}}
    return schema


def kinds(schema: Mapping[str, Any], root: Mapping[str, Any], hops: int = MAX_HOPS) -> set[str]:
    """The JSON types a schema allows; empty when it does not say. root: as `typed` has it."""
    schema = resolved(schema, root)
    values = (
        schema["enum"]
        if isinstance(schema.get("enum"), list)
        else [schema[k] for k in ("const",) if k in schema]
    )
    if values:
        return set().union(*(_kind(value) for value in values))
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {one for one in kind if isinstance(one, str)}
    found: set[str] = set()
    for name in ("anyOf", "oneOf"):
        options = schema.get(name)
        for option in options if isinstance(options, list) and hops else ():
            if isinstance(option, Mapping):
                found |= kinds(option, root, hops - 1)
    return found


def _kind(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    names = {float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return {names[type(value)]}


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
