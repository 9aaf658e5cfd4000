"""JSON schemas as rules of a grammar, where they have long strings.

A compiler of schemas writes a string with bounds as one expression, with some ten states for each character: 5,000
characters of an answer used up a request's states. Here the parser counts, in pieces of PIECE characters. So what
stands around a long string is written as rules too; all other parts of a schema are left to the compiler.
"""

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from openinfer.sampler.errors import InvalidGrammar

if TYPE_CHECKING:
    from openinfer.sampler.lark import Lark

LONG = 256
"""Strings with bounds beyond this are counted by the parser."""
PIECE = 64
_UNIT = r'(?:[^"\\\x00-\x1F\x7F]|\\["\\\/bfnrt]|\\u(?:[0-9a-cA-CefEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))'
_SPACE = r"/[ \n]{1,24}/?"
_NOTES = {"title", "description", "default", "examples", "deprecated", "$schema", "$comment", "$id"}
_DEFINITIONS = {"$defs", "definitions"}
_STRING = {"type", "minLength", "maxLength"} | _NOTES
_OBJECT = {"type", "properties", "required", "additionalProperties"} | _NOTES | _DEFINITIONS
_ARRAY = {"type", "items", "minItems", "maxItems"} | _NOTES | _DEFINITIONS
_ANY = {"anyOf"} | _NOTES | _DEFINITIONS
MAX_DEPTH = 32


def has_long_strings(schema: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether a part of the schema is a string with long bounds. Looks at every part, whether it is reached or not."""
    if isinstance(schema, list):
        return any(has_long_strings(one, depth) for one in schema)
    if not isinstance(schema, Mapping) or depth < 0:
        return False
    return _is_long(schema) or any(has_long_strings(one, depth - 1) for one in schema.values())


def _is_long(schema: Mapping[str, Any]) -> bool:
    bounds = [schema.get("minLength"), schema.get("maxLength")]
    return any(isinstance(bound, int) and bound > LONG for bound in bounds)


class JsonRules:
    """Writes one schema into `lark`. leaf: writes a part as the compiler of schemas has it, with its definitions."""

    def __init__(
        self, lark: "Lark", root: Mapping[str, Any], leaf: Callable[[Mapping[str, Any]], str]
    ) -> None:
        self._lark, self._root, self._leaf = lark, root, leaf
        self._references: dict[str, str] = {}

    def value(self, schema: Any, depth: int = MAX_DEPTH) -> str:
        """The expression of the schema's values."""
        if isinstance(schema, Mapping) and depth and self._reaches_long(schema, set()):
            written = self._written(schema, depth - 1)
            if written is not None:
                return self._lark.rule(written)
        if not isinstance(schema, Mapping):
            schema = {} if schema is True else {"enum": []}
        return self._leaf(
            {**{name: self._root[name] for name in _DEFINITIONS if name in self._root}, **schema}
        )

    def _reaches_long(self, schema: Any, seen: set[str]) -> bool:
        if isinstance(schema, list):
            return any(self._reaches_long(one, seen) for one in schema)
        if not isinstance(schema, Mapping):
            return False
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            if self._reaches_long(self._target(reference), seen):
                return True
        parts = (one for name, one in schema.items() if name not in _DEFINITIONS)
        return _is_long(schema) or any(self._reaches_long(one, seen) for one in parts)

    def _target(self, reference: str) -> Any:
        found: Any = self._root
        for step in reference.removeprefix("#/").split("/") if reference.startswith("#/") else ["\0"]:
            found = (
                found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
            )
        return found

    def _written(self, schema: Mapping[str, Any], depth: int) -> str | None:
        keys, kind = schema.keys(), schema.get("type")
        if "$ref" in keys and keys <= {"$ref"} | _NOTES | _DEFINITIONS:
            return self._reference(str(schema["$ref"]), depth)
        if keys <= _ANY and isinstance(schema["anyOf"], list):
            return " | ".join(self.value(one, depth) for one in schema["anyOf"])
        if isinstance(kind, list) and "string" in kind and keys <= _STRING:
            others = [self._leaf({"type": one}) for one in kind if one != "string"]
            return " | ".join([self._string(schema), *others])
        if kind == "string" and keys <= _STRING:
            return self._string(schema)
        if kind == "object" and keys <= _OBJECT:
            return self._object(schema, depth)
        if kind == "array" and keys <= _ARRAY:
            return self._array(schema, depth)
        return None

    def _reference(self, reference: str, depth: int) -> str | None:
        if reference not in self._references:
            target = self._target(reference)
            if not isinstance(target, Mapping):
                return None
            self._references[reference] = self._lark.forward()
            self._lark.define(self._references[reference], self.value(target, depth))
        return self._references[reference]

    def _string(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if (
            not isinstance(least, int)
            or not isinstance(most, int | None)
            or not 0 <= least <= (most or least)
        ):
            raise InvalidGrammar(f"minLength {least!r} and maxLength {most!r} are no lengths")
        piece = self._lark.terminal(f"/{_UNIT}{{{PIECE}}}/")

        def end(low: int, high: int | None) -> str:
            count = f"{{{low},{'' if high is None else high}}}"
            return self._lark.terminal(f'/{_UNIT if high != 0 else ""}{count if high != 0 else ""}"/')

        first, low = divmod(least, PIECE)
        whole = f"{piece}{{{first}}}" if first else ""
        if most is None:
            return f'"\\"" {whole} {end(low, None)}'
        last, high = divmod(most, PIECE)
        if first == last:
            return f'"\\"" {whole} {end(low, high)}'
        ways = [f"{whole} {end(low, PIECE - 1)}", f"{piece}{{{last}}} {end(0, high)}"]
        if first + 1 < last:
            ways.append(f"{piece}{{{first + 1},{last - 1}}} {end(0, PIECE - 1)}")
        return f'"\\"" ({" | ".join(ways)})'

    def _object(self, schema: Mapping[str, Any], depth: int) -> str | None:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            return None
        if not all(isinstance(name, str) and name in properties for name in required):
            return None
        more = schema.get("additionalProperties", True)
        member, others = f'{_SPACE} ":" {_SPACE}', ""
        if more is not False:
            keys = "|".join(pattern_of(json.dumps(name, ensure_ascii=False)) for name in properties)
            key = self._lark.terminal(f'/"{_UNIT}*"/' + (f" & ~/(?:{keys})/" if keys else ""))
            others = self._lark.rule(f"{key} {member} {self.value(more, depth)}")
        # Rules from the last member to the first: behind another one, a comma comes before it.
        after = self._lark.rule(f'({_SPACE} "," {_SPACE} {others})*' if others else '""')
        begun = self._lark.rule(f'{others} {after} | ""' if others else '""')
        for name, one in reversed(list(properties.items())):
            text = (
                f"{self._lark.text(json.dumps(name, ensure_ascii=False))} {member} {self.value(one, depth)}"
            )
            with_comma = f'{_SPACE} "," {_SPACE} {text} {after}'
            begun = self._lark.rule(f"{text} {after}" + ("" if name in required else f" | {begun}"))
            after = self._lark.rule(with_comma + ("" if name in required else f" | {after}"))
        return f'"{{" {_SPACE} {begun} {_SPACE} "}}"'

    def _array(self, schema: Mapping[str, Any], depth: int) -> str | None:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if (
            not isinstance(least, int)
            or not isinstance(most, int | None)
            or "items" not in schema
            or most == 0
        ):
            return None
        item = self.value(schema["items"], depth)
        count = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        more = self._lark.rule(f'{_SPACE} "," {_SPACE} {item}')
        items = item if most == 1 else f"{item} {more}{count}"
        return f'"[" {_SPACE} {items if least else f"({items})?"} {_SPACE} "]"'


def pattern_of(text: str) -> str:
    """The expression of exactly this text."""
    return "".join(
        char if char.isalnum() else "\\n" if char == "\n" else f"\\x{{{ord(char):X}}}" for char in text
    )
