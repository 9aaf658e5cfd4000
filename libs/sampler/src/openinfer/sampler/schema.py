"""JSON schemas of SDKs, rewritten with the keywords that a compiler of grammars knows.

A format that is not known is an annotation, as in JSON schema. The classes of patterns are ASCII. A rule that no
grammar can keep at a reasonable size is a wish: `wishes` names it, and an output may break it.
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from openinfer.sampler.errors import InvalidGrammar

_DAY = "0[1-9]|1[0-9]|2[0-8]"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    f"(?:[0-9]{{4}}-(?:(?:0[13578]|1[02])-(?:{_DAY}|29|3[01])|(?:0[469]|11)-(?:{_DAY}|29|30)|02-(?:{_DAY}))"
    f"|{_LEAP}-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,8}}"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "time": _TIME,
    "duration": "P(?:[0-9]{1,9}W|(?:[0-9]{1,9}Y)?(?:[0-9]{1,9}M)?[0-9]{1,9}D(?:T[0-9]{1,9}[HMS])?|T[0-9]{1,9}[HMS])",
    "email": rf"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+){{0,4}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": "(?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}",
    "uri": r"[a-z][a-z0-9+.-]{0,15}:[A-Za-z0-9/?#@!$&'()*+,;=:._~%-]{1,2000}",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
"""Format -> expression for texts of it. Some say less than the format allows, none says more."""
MAX_DIVISOR = 100_000
"""Of multipleOf as a whole number of the last decimal place: every remainder is a state of the expression."""
MAX_UNIQUE = 4
"""Values of an enum whose lists without repetition are written out: 64 lists of 4."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONES = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains")
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": r" \t\n\r\f\v"}
_PIECE = re.compile(r"\\.|\[\^?\]?|\(\?<?[=!]|.", re.DOTALL)
"""Escapes, openings of classes with a bracket that they begin with, look-around, single characters."""

Schema = Mapping[str, Any]


def prepared(schema: Schema, root: Schema | None = None) -> dict[str, Any]:
    """The schema in what the compiler knows. root: what local references are resolved in, the schema itself by default.

    Raises InvalidGrammar for a pattern with look-around, and for what is no schema.
    """
    root = schema if root is None else root
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, Mapping):
            key: Callable[[str], str] = ascii_pattern if name == "patternProperties" else str
            found[name] = {key(word): _inner(one, root) for word, one in value.items()}
        elif name in _LISTS and isinstance(value, list):
            found[name] = [_inner(one, root) for one in value]
        elif name in _ONES:
            found[name] = (
                [_inner(one, root) for one in value] if isinstance(value, list) else _inner(value, root)
            )
        else:
            found[name] = value
    if isinstance(found.get("pattern"), str):
        found["pattern"] = ascii_pattern(found["pattern"])
    if not isinstance(found.get("format"), str) or found["format"] not in FORMATS:
        found.pop("format", None)
    if found.get("format") in ("date", "date-time") and "pattern" not in found:
        found["pattern"] = f"^(?:{FORMATS[found.pop('format')]})$"  # the compiler's own know no calendar
    _check_divisors(found)
    if "propertyNames" in found:
        found = _named(found, root)
    if found.pop("uniqueItems", False) and (lists := _unique_lists(found, root)) is not None:
        kept: dict[str, Any] = {name: found[name] for name in ("$defs", "definitions") if name in found}
        return {**kept, "anyOf": [_exactly(one) for one in lists]}
    return found


def wishes(schema: Any, root: Any = None) -> Iterator[str]:
    """The rules of the schema that are not kept, in words. Unknown formats are not among them."""
    root = schema if root is None else root
    if not isinstance(schema, Mapping):
        return
    if schema.get("uniqueItems") is True and _unique_lists(schema, root) is None:
        yield "uniqueItems"
    names = schema.get("propertyNames")
    if isinstance(names, Mapping) and "format" in names:
        yield "format of propertyNames"
    for name in _MAPS:
        inner = schema.get(name)
        for one in inner.values() if isinstance(inner, Mapping) else ():
            yield from wishes(one, root)
    for name in (*_LISTS, *_ONES):
        value = schema.get(name)
        for one in value if isinstance(value, list) else [value]:
            yield from wishes(one, root)


def ascii_pattern(pattern: str) -> str:
    """The expression with the classes of digits, letters and spaces in ASCII. Raises InvalidGrammar for look-around."""
    pieces = []
    for piece, in_class in _classed(_PIECE.findall(pattern)):
        if not in_class and (_LOOK_AROUND.match(piece) or piece in (r"\b", r"\B")):
            raise InvalidGrammar(f"pattern {pattern!r} looks around with {piece!r}, which cannot be kept")
        if piece[0] == "\\" and piece[1:].lower() in _CLASSES:
            members = _CLASSES[piece[1].lower()]
            piece = f"[^{members}]" if piece[1].isupper() else members if in_class else f"[{members}]"
        pieces.append(piece)
    return "".join(pieces)


def whole_pattern(pattern: str) -> str:
    """An expression for all of a text in which the pattern is found. Raises InvalidGrammar where it cannot be told."""
    options: list[list[str]] = [[]]
    depth = 0
    for piece, in_class in _classed(_PIECE.findall(ascii_pattern(pattern))):
        if not in_class and piece[0] in "()":
            depth += 1 if piece[0] == "(" else -1
        if piece == "|" and not in_class and depth == 0:
            options.append([])
        else:
            options[-1].append({"/": r"\x2F", "\n": r"\n"}.get(piece, piece))  # Lark has it between slashes
    return "|".join(_whole(option, pattern) for option in options)


def _classed(pieces: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """The pieces of an expression, and whether each is within a class of characters."""
    in_class = False
    for piece in pieces:
        in_class = (in_class or piece[0] == "[") and piece != "]"
        yield piece, in_class


def _whole(pieces: list[str], pattern: str) -> str:
    begins, ends = pieces[:1] == ["^"], pieces[-1:] == ["$"]
    body = pieces[begins : len(pieces) - ends]
    for piece, in_class in _classed(body):
        if not in_class and piece in ("^", "$"):
            raise InvalidGrammar(
                f"pattern {pattern!r} has {piece!r} within, which cannot be kept in this model's calls"
            )
    return f"{'' if begins else '(?s:.*)'}(?:{''.join(body)}){'' if ends else '(?s:.*)'}"


def _check_divisors(schema: Schema) -> None:
    parts = schema.get("allOf")
    schemas = [schema, *(parts if isinstance(parts, list) else ())]
    found = [one["multipleOf"] for one in schemas if isinstance(one, Mapping) and "multipleOf" in one]
    numbers = [Fraction(str(one)) for one in found if isinstance(one, int | float) and math.isfinite(one)]
    places = math.lcm(*(one.denominator for one in numbers))
    divisor = math.lcm(*(int(one * places) for one in numbers))
    if divisor > MAX_DIVISOR:
        raise InvalidGrammar(
            f"multipleOf {found[-1]!r} needs {divisor} states for the remainders, and {MAX_DIVISOR} are allowed"
        )


def _inner(schema: Any, root: Schema) -> Any:
    return prepared(schema, root) if isinstance(schema, Mapping) else schema


def _resolved(schema: Any, root: Schema) -> Any:
    """The schema that a local reference of one step leads to; any other schema unchanged."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if isinstance(reference, str) and re.fullmatch(r"#/(\$defs|definitions)/[^/]+", reference):
        _, group, name = reference.split("/")
        found = root.get(group)
        return found.get(name, schema) if isinstance(found, Mapping) else schema
    return schema


def _named(schema: dict[str, Any], root: Schema) -> dict[str, Any]:
    """propertyNames as patternProperties; with keywords that say more, it is left for the compiler to refuse."""
    names = _resolved(schema["propertyNames"], root)
    rest = {name: value for name, value in schema.items() if name != "propertyNames"}
    notes = {"type", "title", "description", "format"}
    if names is True or (isinstance(names, Mapping) and names.keys() <= notes):
        return rest
    if not isinstance(names, Mapping) or "patternProperties" in schema:
        return schema
    said = names.keys() - notes
    if said <= {"enum", "const"} and all(isinstance(one, str) for one in _values(names) or [None]):
        pattern = f"^(?:{'|'.join(re.escape(one) for one in _values(names) or ())})$"
    elif said == {"pattern"} and isinstance(names["pattern"], str):
        pattern = ascii_pattern(names["pattern"])
    elif said <= {"minLength", "maxLength"}:
        pattern = f"^(?s:.{{{names.get('minLength', 0)},{names.get('maxLength', '')}}})$"
    else:
        return schema
    others = rest.get("additionalProperties", True)
    if others is False:
        return rest
    return {**rest, "patternProperties": {pattern: others}, "additionalProperties": False}


def _values(schema: Any) -> list[Any] | None:
    """All that the schema allows, where it says so."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    return [False, True] if schema.get("type") == "boolean" else None


def _unique_lists(schema: Schema, root: Schema) -> list[tuple[Any, ...]] | None:
    """The lists that uniqueItems leaves; None where they are too many to be written out."""
    values = _values(_resolved(schema.get("items"), root))
    if values is None or len(values) > MAX_UNIQUE or schema.get("type") != "array" or "prefixItems" in schema:
        return None
    least, most = schema.get("minItems", 0), schema.get("maxItems", len(values))
    if not isinstance(least, int) or not isinstance(most, int):
        return None
    texts = {json.dumps(value): value for value in values}
    sizes = range(least, min(most, len(texts)) + 1)
    lists = [
        tuple(texts[one] for one in some) for size in sizes for some in itertools.permutations(texts, size)
    ]
    if not lists:
        raise InvalidGrammar(f"uniqueItems with minItems {least}: there are {len(texts)} values")
    return lists


def _exactly(values: tuple[Any, ...]) -> dict[str, Any]:
    count = len(values)
    exact = {"type": "array", "items": False, "minItems": count, "maxItems": count}
    return {**exact, "prefixItems": [{"const": value} for value in values]} if values else exact
