"""Values of arguments that a model wrote: their types by the tool's schema, and JSON that is safe to send on."""

import ast
import json
from collections.abc import Mapping
from typing import Any

MAX_HOPS = 8
MAX_LITERAL_CHARS = 1 << 16
"""Longer texts are not read as Python literals."""


class Malformed(Exception):
    """The text does not have the form of a value; caught where a call is parsed."""


def decode(text: str) -> Any:
    """JSON, forgiving raw line breaks in strings. Raises Malformed."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise Malformed from error


def encode(value: Any) -> str:
    """JSON text that is valid Unicode. Raises Malformed for a value that has no such text."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # half a surrogate pair decodes from JSON, but is no text
    except (ValueError, TypeError, RecursionError) as error:
        raise Malformed from error
    return text


def escaped(text: str) -> str:
    """The inside of a JSON string of this text."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def written_as(
    text: str, schema: Mapping[str, Any], root: Mapping[str, Any], *, says_json: bool = False
) -> str:
    """The JSON of a value written as bare text, read as the schema's type: JSON or a Python literal, else text.

    root: what the schema's references are resolved in. says_json: the format says that it is JSON."""
    try:
        return encode(_typed(text, schema, root, says_json))
    except Malformed:
        return json.dumps(text, ensure_ascii=False)


def _typed(text: str, schema: Mapping[str, Any], root: Mapping[str, Any], says_json: bool) -> Any:
    wanted = kinds(schema, root)
    if wanted <= {"string"}:
        value = read_value(text) if says_json else text
        return value if isinstance(value, str) or not wanted else text
    value = read_value(text.strip())
    if isinstance(value, str) and "string" not in wanted:
        value = read_value(value.strip())  # a number in quotes, JSON within JSON
    value = fitted(value, schema, root)
    return value if _kind(value) & wanted else text


def fitted(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int = 32) -> Any:
    """The value with whole numbers where the schema has integers (5.0 is 5), at any depth."""
    is_whole = isinstance(value, float) and value.is_integer()
    if is_whole and kinds(schema, root) & {"integer", "number"} == {"integer"}:
        return int(value)
    if depth and isinstance(value, dict):
        return {key: fitted(one, child(schema, key, root), root, depth - 1) for key, one in value.items()}
    if depth and isinstance(value, list):
        return [fitted(one, child(schema, None, root), root, depth - 1) for one in value]
    return value


def child(schema: Mapping[str, Any], key: str | None, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a property, or of a list's items (None); empty where the schema does not say."""
    schema = resolved(schema, root)
    found: Any = schema.get("items") if key is None else schema.get("properties")
    if key is not None and isinstance(found, Mapping):
        found = found.get(key)
    return found if isinstance(found, Mapping) else {}


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a local reference (`{"$ref": "#/..."}`) leads to, or `schema` itself if it has none."""
    for _ in range(MAX_HOPS):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found: Any = root
        for step in reference[2:].split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            break
        schema = {**found, **{name: value for name, value in schema.items() if name != "$ref"}}
    return schema


def kinds(schema: Mapping[str, Any], root: Mapping[str, Any], hops: int = MAX_HOPS) -> set[str]:
    """The JSON types a schema allows; empty when it does not say. root: as `typed` has it."""
    schema = resolved(schema, root)
    values = schema.get("enum")
    if not isinstance(values, list):
        values = [schema["const"]] if "const" in schema else []
    if values:
        return set().union(*(_kind(value) for value in values))
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {one for one in kind if isinstance(one, str)}
    found: set[str] = set()
    for name in ("anyOf", "oneOf", "allOf"):
        options = schema.get(name)
        for option in options if isinstance(options, list) and hops else ():
            if isinstance(option, Mapping):
                found |= kinds(option, root, hops - 1)
    return found


def read_value(text: str) -> Any:
    """JSON, else a word or literal of Python's, else the text."""
    word = {"true": True, "false": False, "null": None, "none": None}.get(text.lower(), text)
    if word is not text:
        return word
    try:
        return decode(text)
    except Malformed:
        pass
    if len(text) > MAX_LITERAL_CHARS or text[:1] not in tuple("[{('\"-+.0123456789"):
        return text
    try:
        return json.loads(encode(ast.literal_eval(text)))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, Malformed):
        return text


def _kind(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    names = {float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return {names[type(value)]}


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) < len(members):
        raise ValueError("a key stands twice: one of the values would be lost")
    return found


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
