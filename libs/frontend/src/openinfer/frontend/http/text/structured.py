"""The required form of an output: the fields for it, under all their names, become one Grammar."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from openinfer.frontend.errors import APIError, NotSupported
from openinfer.frontend.http.body import CommonBody, JsonObjectFormat, JsonSchemaFormat, StructuredOutputs
from openinfer.frontend.http.elsewhere import instead
from openinfer.sampler import InvalidGrammar
from openinfer.sampler.form import Grammar
from openinfer.sampler.schema import wishes


def grammar_of(body: CommonBody, format_field: str) -> tuple[str, Grammar] | None:
    """The field that asks for a certain output, and the grammar of it; `format_field`: what the endpoint calls
    response_format. Raises APIError (400) naming the field, also where two fields ask for different ones."""
    found: dict[Grammar, str] = {}
    for field, kind, value in _wishes(body, format_field):
        try:
            if isinstance(value, dict):
                grammar = Grammar.of_schema(value)
            else:
                text = value if isinstance(value, str) else json.dumps(value)
                grammar = Grammar("gbnf" if kind == "lark" and "::=" in text else kind, text)
            found.setdefault(grammar, field)
        except InvalidGrammar as error:
            raise APIError(f"{field}: {error}", param=field.split(".")[0]) from error
    if len(found) > 1:
        raise APIError(
            f"{' and '.join(found.values())} ask for different outputs: give one", param=[*found.values()][1]
        )
    return next(((field, grammar) for grammar, field in found.items()), None)


def unkept(field: str, schemas: Iterable[Any]) -> tuple[str, ...]:
    """Warnings of what the schemas ask for and no grammar keeps; `field` is where they came from."""
    names = dict.fromkeys(name for schema in schemas for name in wishes(schema))
    return tuple(f"{name} in {field} is not kept: an answer may go against it" for name in names)


def _wishes(body: CommonBody, format_field: str) -> Iterator[tuple[str, Any, Any]]:
    match body.response_format:
        case JsonObjectFormat():
            yield format_field, "json_object", ""
        case JsonSchemaFormat(spec):
            yield format_field, "json_schema", spec.schema
    several = body.structured_outputs or StructuredOutputs()
    for name in (
        "structural_tag",
        "whitespace_pattern",
        "disable_any_whitespace",
        "disable_additional_properties",
    ):
        if getattr(several, name):
            field = f"structured_outputs.{name}"
            problem = f"{field} is not supported by this server: {instead(field)}"
            raise NotSupported(problem, "structured_outputs")
    kinds = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}
    for name, kind in kinds.items():
        if getattr(several, name) is not None:
            yield f"structured_outputs.{name}", kind, getattr(several, name)
        if getattr(body, f"guided_{name}") is not None:
            yield f"guided_{name}", kind, getattr(body, f"guided_{name}")
    if several.json_object:
        yield "structured_outputs.json_object", "json_object", ""
    if body.guided_json_object:
        yield "guided_json_object", "json_object", ""
    for name, kind in (("json_schema", "json_schema"), ("regex", "regex"), ("ebnf", "gbnf")):
        if getattr(body, name) is not None:
            yield name, kind, getattr(body, name)
