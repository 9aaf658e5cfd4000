"""Calls that a grammar forces: arguments after a tool's schema, in formats that write them one by one.

What such a format cannot promise is refused by the keyword's name (InvalidGrammar), never left out.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from openinfer.frontend.chat.values import kinds, resolved
from openinfer.sampler import InvalidGrammar
from openinfer.sampler.lark import Lark

__all__ = ["any_arguments", "bare_value", "checked", "each_argument"]

_ROOT = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_NOTES = {"description", "title", "default", "examples", "$schema", "$comment", "deprecated"}
_BARE = {"type", "enum", "const", "minLength", "maxLength"}


def checked(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The schema of a tool's arguments: no `parameters` are no arguments, and arguments are an object."""
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if parameters.get("type", "object") != "object":
        raise InvalidGrammar(f"the parameters of a tool are of type object, not {parameters['type']!r}")
    return {"type": "object", **parameters}


def any_arguments(lark: Lark, parameters: Mapping[str, Any] | None) -> str:
    """All of the arguments as one JSON object."""
    return lark.json(checked(parameters))


def each_argument(
    lark: Lark, parameters: Mapping[str, Any] | None, write: Callable[[str, Mapping[str, Any]], str]
) -> str:
    """The arguments in the order of the schema, those not required perhaps left out. `write` gives the expression of
    one, from its name and its schema, which has no reference at its top."""
    schema = checked(parameters)
    _only(schema, _ROOT | _NOTES, "the parameters of a tool")
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise InvalidGrammar("properties must be an object and required a list")
    if not all(isinstance(name, str) for name in required):
        raise InvalidGrammar("required must hold names")
    unknown = [name for name in required if name not in properties]
    if unknown:
        raise InvalidGrammar(f"the required parameter {unknown[0]!r} has no schema among the properties")
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
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
    """Expressions of a value written as it is, where it can be a string, and as JSON, where it can be something else;
    each with `before` and `marker` at its end. A text never holds `closing`, which would end the call."""
    end = lark.text(before + marker)
    allowed = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    if allowed is not None:
        if not isinstance(allowed, list) or not allowed:
            raise InvalidGrammar("enum must be a list of values")
        if any(end in one for one in allowed if isinstance(one, str) for end in (marker, closing)):
            raise InvalidGrammar(f"a value of enum or const holds {marker!r} or {closing!r}, which end it")
        _only(schema, _BARE | _NOTES | {"$defs", "definitions"}, "a parameter with enum or const")
        texts = [lark.text(one) for one in allowed if isinstance(one, str)]
        rest = [lark.text(json.dumps(one)) for one in allowed if not isinstance(one, str)]
        return (
            f"{lark.any_of(texts)} {end}" if texts else None,
            f"{lark.any_of(rest)} {end}" if rest else None,
        )
    types = kinds(schema)
    if types and "string" not in types:
        return None, f"{lark.json(schema)} {end}"
    others = types - {"string"}
    _only(
        schema,
        _BARE | _NOTES | {"$defs", "definitions"} | ({"anyOf", "oneOf"} if others else set()),
        "a text",
    )
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(least, int) or not isinstance(most, int | None) or least < 0 or (most or least) < least:
        raise InvalidGrammar(f"minLength {least!r} and maxLength {most!r} are no lengths")
    if others and (least or most is not None or not _plain(schema)):
        raise InvalidGrammar(
            "a parameter that is a text or something else cannot be held to more than its types"
        )
    text = lark.until(marker, before=before, least=least, most=most, never=closing)
    return text, f"{lark.json({'type': sorted(others)})} {end}" if others else None


def _plain(schema: Mapping[str, Any]) -> bool:
    """Whether the options say nothing but their types."""
    groups = [schema[name] for name in ("anyOf", "oneOf") if name in schema]
    options = [option for group in groups for option in (group if isinstance(group, list) else [None])]
    return all(isinstance(option, Mapping) and option.keys() <= {"type"} | _NOTES for option in options)


def _only(schema: Mapping[str, Any], known: set[str], what: str) -> None:
    for keyword in schema:
        if keyword not in known:
            raise InvalidGrammar(f"{keyword!r} of {what} cannot be kept in this model's calls")
