"""The form that an output must have, as plain data."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from openinfer.sampler.budget import Budget
from openinfer.sampler.errors import InvalidGrammar
from openinfer.sampler.schema import prepared

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark", "gbnf", "parts", "any"]
MAX_GRAMMAR_CHARS, MAX_PARTS_CHARS = 1 << 16, 1 << 20
MAX_NESTING = 64

# Whitespace in JSON is optional and bounded: a model that likes it could go on forever.
JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \n]{1,24}", "lenient": False}


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that an output must have. Immutable, hashable, checked for size and shape when made.

    Attributes:
        kind: "json_schema"; "json_object": any JSON object; "regex": in Rust's syntax, for the whole output; "choice":
            one of some strings; "lark": llguidance's dialect; "gbnf": llama.cpp's, as in `root ::= "a" | "b"`;
            "parts": Lark that `openinfer.sampler.lark` put together; or "any": any output, for a budget alone.
        text: the schema as JSON, nothing, the expression, the strings as a JSON list, the grammar. At most 65,536
            characters (1,048,576 of parts), JSON at most 64 levels deep.
        content: a grammar that a Lark text calls as `@content`, so that one grammar can be set into another.
        budget: of the thought that the output begins with. `text` must then describe the thought and its markers too.

    Raises:
        InvalidGrammar: a ValueError. Problems that only a compiler can see are raised by the Compiler, later.
    """

    kind: Kind
    text: str = ""
    content: "Grammar | None" = None
    budget: Budget | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InvalidGrammar(
                f"the kind of a grammar is one of {', '.join(get_args(Kind))}, not {self.kind!r}"
            )
        most = MAX_PARTS_CHARS if self.kind == "parts" else MAX_GRAMMAR_CHARS
        if not isinstance(self.text, str) or len(self.text) > most or "\0" in self.text:
            raise InvalidGrammar(f"a grammar is a text of at most {most} characters, none of them NUL")
        if bool(self.text.strip()) != (self.kind not in ("json_object", "any")):
            raise InvalidGrammar(f"{self.kind} {'takes no text' if self.text.strip() else 'is empty'}")
        if self.kind in ("lark", "parts") and self.text.lstrip().startswith("{"):
            raise InvalidGrammar("a lark grammar begins with a rule, not with a brace")
        if self.content is not None and (self.kind != "parts" or self.content.content is not None):
            raise InvalidGrammar("only a grammar of parts has a content, and that has none of its own")
        if self.kind in ("json_schema", "choice"):
            self._check_json()

    @classmethod
    def of_schema(cls, schema: Mapping[str, Any]) -> "Grammar":
        """A json_schema grammar from the schema as an object."""
        try:
            return cls("json_schema", json.dumps(schema))
        except RecursionError as error:
            raise InvalidGrammar(f"json_schema is nested more than {MAX_NESTING} levels deep") from error

    def _check_json(self) -> None:
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise InvalidGrammar(f"{self.kind} is not JSON: {error}") from error
        if _depth(value) > MAX_NESTING:
            raise InvalidGrammar(f"{self.kind} is nested more than {MAX_NESTING} levels deep")
        if self.kind == "json_schema" and not isinstance(value, dict):
            raise InvalidGrammar("json_schema must be a JSON object")
        if self.kind == "json_schema":
            prepared(value)
        if self.kind == "choice" and not (
            isinstance(value, list) and value and all(isinstance(text, str) and text for text in value)
        ):
            raise InvalidGrammar("choice must be a JSON list of strings, at least one and none empty")


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level := [
        child
        for node in level
        if isinstance(node, dict | list)
        for child in (*(node.values() if isinstance(node, dict) else node), None)
    ]:
        depth += 1
    return depth
