"""Calls that a grammar forces: arguments after a tool's schema, in formats that write them one by one.

A keyword that such a format cannot keep is refused by its name (InvalidGrammar), never left out.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from openinfer.frontend.chat.values import kinds, resolved
from openinfer.sampler import InvalidGrammar
from openinfer.sampler.lark import Lark
from openinfer.sampler.schema import FORMATS, whole_pattern

_ROOT = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_NOTES = {"description", "title", "default", "examples", "$schema", "$comment", "deprecated"}
_BARE = {"type", "enum", "const", "minLength", "maxLength", "pattern", "format"}
_DEFINITIONS = {"$defs", "definitions"}
HELD = (_BARE | {"anyOf", "oneOf"}) - {"type"}
"""The keywords that restrict a text further than its type."""


def checked(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The schema of a tool's arguments. A tool without `parameters` takes no arguments; arguments are an object."""
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if parameters.get("type", "object") != "object":
        raise InvalidGrammar(f"the parameters of a tool are of type object, not {parameters['type']!r}")
    return {"type": "object", **parameters}


@contextmanager
def of_tool(name: str) -> Iterator[None]:
    """A refusal within this context gets the tool's name."""
    try:
        yield
    except InvalidGrammar as error:
        raise InvalidGrammar(f"tool {name!r}: {error}") from error


def any_arguments(lark: Lark, name: str, parameters: Mapping[str, Any] | None) -> str:
    """All of the arguments of the tool as one JSON object."""
    with of_tool(name):
        return lark.json(checked(parameters))


def each_argument(
    lark: Lark,
    tool: str,
    parameters: Mapping[str, Any] | None,
    write: Callable[[str, Mapping[str, Any]], str],
) -> str:
    """The tool's arguments in the order of the schema, those not required perhaps left out. `write` gives the
    expression of one, from its name and its schema, which has no reference at its top."""
    with of_tool(tool):
        schema = checked(parameters)
        _only(schema, _ROOT | _NOTES, "the parameters of a tool")
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise InvalidGrammar("properties must be an object and required a list")
        if not all(isinstance(name, str) for name in required):
            raise InvalidGrammar("required must hold names")
        if unknown := [name for name in required if name not in properties]:
            raise InvalidGrammar(f"the required parameter {unknown[0]!r} has no schema among the properties")
        definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
        written = []
        for name, one in properties.items():
            if not isinstance(one, Mapping) or not name or any(char in name for char in '>"\n'):
                raise InvalidGrammar(f"the parameter {name!r} cannot be written in this model's calls")
            argument = lark.rule(write(name, {**definitions, **resolved(one, schema)}))
            written.append(argument if name in required else f"{argument}?")
        return " ".join(written) or lark.text("")


def bare_value(
    lark: Lark, schema: Mapping[str, Any], marker: str, closing: str, *, before: str = ""
) -> tuple[str | None, str | None]:
    """(expression of a bare string, expression of JSON); None where the value cannot be a string, or only a string.

    Each expression has `before` and `marker` at its end. A text never holds `closing`, which would end the call."""
    allowed = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    if allowed is not None:
        return _one_of(lark, schema, allowed, marker, closing, before)
    group = next((name for name in ("anyOf", "oneOf") if name in schema), None)
    if group is not None and not schema.keys() & (_BARE - {"type"}) and isinstance(schema[group], list):
        return _options(lark, schema, schema[group], marker, closing, before)
    types, end = kinds(schema, schema), lark.text(before + marker)
    if types and "string" not in types:
        return None, f"{lark.json(schema)} {end}"
    others = types - {"string"}
    _only(schema, _BARE | _NOTES | _DEFINITIONS, "a text")
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(least, int) or not isinstance(most, int | None) or least < 0 or (most or least) < least:
        raise InvalidGrammar(f"minLength {least!r} and maxLength {most!r} are no lengths")
    text = lark.until(marker, before=before, least=least, most=most, never=closing, like=_likes(schema))
    return text, f"{lark.json({'type': sorted(others)})} {end}" if others else None


def _one_of(
    lark: Lark, schema: Mapping[str, Any], allowed: Any, marker: str, closing: str, before: str
) -> tuple[str | None, str | None]:
    end = lark.text(before + marker)
    if not isinstance(allowed, list) or not allowed:
        raise InvalidGrammar("enum must be a list of values")
    if any(mark in one for one in allowed if isinstance(one, str) for mark in (marker, closing)):
        raise InvalidGrammar(f"a value of enum or const holds {marker!r} or {closing!r}, which end it")
    _only(schema, _BARE | _NOTES | _DEFINITIONS, "a parameter with enum or const")
    texts = [lark.text(one) for one in allowed if isinstance(one, str)]
    rest = [lark.text(json.dumps(one)) for one in allowed if not isinstance(one, str)]
    return (f"{lark.any_of(texts)} {end}" if texts else None, f"{lark.any_of(rest)} {end}" if rest else None)


def _options(
    lark: Lark, schema: Mapping[str, Any], options: list[Any], marker: str, closing: str, before: str
) -> tuple[str | None, str | None]:
    _only(schema, {"type", "anyOf", "oneOf"} | _NOTES | _DEFINITIONS, "a parameter with anyOf")
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    found: tuple[list[str], list[str]] = ([], [])
    for option in options:
        if not isinstance(option, Mapping):
            raise InvalidGrammar("anyOf must hold schemas")
        one = {**definitions, **resolved(option, schema)}
        expressions = bare_value(lark, one, marker, closing, before=before)
        for written, expression in zip(found, expressions, strict=True):
            if expression is not None:
                written.append(expression)
    texts, others = (lark.any_of(written) if written else None for written in found)
    return texts, others


def _likes(schema: Mapping[str, Any]) -> list[str]:
    """Expressions for a text, of its pattern and its format; one that is not known is an annotation."""
    pattern, form = schema.get("pattern"), schema.get("format")
    return [
        *([whole_pattern(pattern)] if isinstance(pattern, str) else []),
        *([whole_pattern(f"^(?:{FORMATS[form]})$")] if isinstance(form, str) and form in FORMATS else []),
    ]


def _only(schema: Mapping[str, Any], known: set[str], what: str) -> None:
    for keyword in schema:
        if keyword not in known:
            raise InvalidGrammar(f"{keyword!r} of {what} cannot be kept in this model's calls")
