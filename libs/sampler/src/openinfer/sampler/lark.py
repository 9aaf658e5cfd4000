"""Lark grammars made of parts: what a frontend needs to force an output with text around it.

Plain text making, without llguidance, in whose dialect the result is written; `grammar.Compiler` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from openinfer.sampler.grammar import JSON_OPTIONS, Grammar
from openinfer.sampler.schema import prepared


class Lark:
    """Collects rules. Every method gives an expression, to be put together with spaces, `|`, `*`, `?` and parentheses.

    `grammar(start)` is the whole. Text is escaped here; a schema is checked as `Grammar` does.
    """

    def __init__(self) -> None:
        self._rules: list[str] = []
        self._content: Grammar | None = None

    def text(self, text: str) -> str:
        """Exactly this text."""
        return json.dumps(text, ensure_ascii=False)

    def any_of(self, expressions: Iterable[str]) -> str:
        """One of them; at least one must be given."""
        return self.rule(" | ".join(expressions))

    def rule(self, expression: str) -> str:
        """The expression under a name, so that it can be repeated and is written once."""
        return self._name("r", expression)

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON after a schema, references within it from its own root. Raises InvalidGrammar."""
        Grammar.of_schema(schema)
        return self._name("r", "%json " + json.dumps({**prepared(schema), "x-guidance": JSON_OPTIONS}))

    def until(
        self,
        marker: str,
        *,
        before: str = "",
        least: int = 0,
        most: int | None = None,
        never: str = "",
        like: Iterable[str] = (),
    ) -> str:
        """Any text of `least` to `most` characters, `before`, and `marker`, which comes nowhere earlier; nor does
        `never` come anywhere, if it is given. like: expressions for the text, as `schema.whole_pattern` makes them."""
        count = "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"
        end = _pattern(marker)
        # Exclude text that goes on behind a marker; without this, the text could run past the first marker.
        body = f"/(?s:.{count}){_pattern(before)}{end}/ & ~/(?s:.*){end}(?s:.+)/"
        for expression in like:
            body += f" & /(?:{expression}){_pattern(before)}{end}/"
        if never:
            body += f" & ~/(?s:.*){_pattern(never)}(?s:.*)/"
        return self._name("T", body)

    def without(self, marker: str) -> str:
        """Any text that does not contain `marker`."""
        return self._name("T", f"/(?s:.*)/ & ~/(?s:.*){_pattern(marker)}(?s:.*)/")

    def content(self, grammar: Grammar) -> str:
        """Another grammar, whole; there can be one."""
        if self._content not in (None, grammar):
            raise ValueError("a Lark has one content")
        self._content = grammar
        return "@content"

    def grammar(self, start: str) -> Grammar:
        """The grammar of outputs that are `start`. Raises InvalidGrammar where it got too long."""
        return Grammar("parts", "\n".join([f"start: {start}", *self._rules]), self._content)

    def _name(self, prefix: str, body: str) -> str:
        name = f"{prefix}{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name


def _pattern(text: str) -> str:
    """A regular expression for exactly this text."""
    return "".join(
        char if char.isalnum() else "\\n" if char == "\n" else f"\\x{{{ord(char):X}}}" for char in text
    )
