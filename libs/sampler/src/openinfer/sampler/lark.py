"""Lark grammars made of parts: what a frontend needs to force an output with text around it.

Plain text making, without llguidance, in whose dialect the result is written; `grammar.Compiler` reads it.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from openinfer.sampler.form import JSON_OPTIONS, Grammar
from openinfer.sampler.json_rules import JsonRules, has_long_strings, pattern_of
from openinfer.sampler.schema import prepared

START, MOST = 1 << 30, 1 << 29
"""Of texts that are counted: the parameter at their greatest length, and the greatest length itself."""
RUN = 32


class Lark:
    """Collects rules. Every method gives an expression, to be put together with spaces, `|`, `*`, `?` and parentheses.

    `grammar(start)` is the whole. Text is escaped here; a schema is checked as `Grammar` does.
    """

    def __init__(self) -> None:
        self._rules: list[str] = []
        self._content: Grammar | None = None
        self._counters: dict[tuple[Any, ...], str] = {}
        self._terminals: dict[str, str] = {}
        self._forward = 0

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

        def leaf(schema: Mapping[str, Any]) -> str:
            return self._name("r", "%json " + json.dumps({**prepared(schema), "x-guidance": JSON_OPTIONS}))

        return JsonRules(self, schema, leaf).value(schema) if has_long_strings(schema) else leaf(schema)

    def forward(self) -> str:
        """The name of a rule that is defined later, by `define`."""
        self._forward += 1
        return f"f{self._forward}"

    def define(self, name: str, expression: str) -> None:
        """The rule of a name of `forward`."""
        self._rules.append(f"{name}: {expression}")

    def terminal(self, expression: str) -> str:
        """An expression of characters under a name; the same one has one name."""
        if expression not in self._terminals:
            self._terminals[expression] = self._name("T", expression)
        return self._terminals[expression]

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
        like = list(like)
        if (least, most) != (0, None) and not like:
            excluded = [text for text in (marker, never) if text and text != before + marker]
            return self._counted(before + marker, excluded, least, MOST if most is None else min(most, MOST))
        count = "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"
        end = f"{pattern_of(before)}{pattern_of(marker)}"
        bodies = [f"/(?:{expression}){end}/" for expression in like]
        if like and not any(marker[0] in expression for expression in like):
            # Expressions with a complement explode. This one is narrower: no text has the marker's first character.
            bodies.append(f"/[^{pattern_of(marker[0])}]{count}{end}/")
        else:
            bodies.append(f"/(?s:.{count}){end}/")
            # Exclude text that goes on behind a marker; without this, the text could run past the first marker.
            bodies += [
                f"~/(?s:.*){pattern_of(mark)}(?s:{'.+' if mark == marker else '.*'})/"
                for mark in (marker, never)
                if mark
            ]
        return self._name("T", " & ".join(bodies))

    def _counted(self, end: str, excluded: list[str], least: int, most: int) -> str:
        """Text of `least` to `most` characters, then `end`, without `excluded`.

        An expression with a count has a state for each number, times the states of the marker that is looked for. So
        the parser counts, in pieces of up to RUN characters, and its rules are the states: how much of `end` or of what
        is excluded came last. Their parameter is the count, from START - most on, so texts of all lengths share them.
        """
        key = (end, tuple(excluded), (least, most) if least else None)
        prefix = self._counters.get(key)
        if prefix is None:
            prefix = self._counters[key] = f"c{len(self._counters)}_"
            self._rules += _counting(prefix, end, excluded, START - most + least if least else 0)
        return self.rule(f"{prefix}0::{START - most}")

    def without(self, marker: str) -> str:
        """Any text that does not contain `marker`."""
        return self._name("T", f"/(?s:.*)/ & ~/(?s:.*){pattern_of(marker)}(?s:.*)/")

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


def _counting(prefix: str, end: str, excluded: list[str], least: int) -> list[str]:
    """The rules of Lark._counted, whose start is `prefix`0. least: the parameter that the text must have reached."""
    marks = [end, *excluded]
    states = sorted({mark[:size] for mark in marks for size in range(len(mark) + 1)}, key=len)
    names = {state: f"{prefix}{number}" for number, state in enumerate(states)}

    def after(text: str) -> str:
        """The state behind a text: its longest end that is the beginning of a mark."""
        return next(text[at:] for at in range(len(text) + 1) if text[at:] in names)

    def room(found: str, ahead: int) -> str:
        """The condition of a step by `ahead` characters to a state: the text before a beginning of `end` is not too
        long, and it is long enough, or there is room for that beginning to be text."""
        size = next(len(found) - at for at in range(len(found) + 1) if end.startswith(found[at:]))
        fits = f"le(_, {START + size - ahead})"
        if not least:
            return fits
        return f"and({fits}, or(ge(_, {least + size - ahead}), le(_, {START - ahead})))"

    big, heads = prefix.upper(), sorted({mark[0] for mark in marks})
    others = f"[^{''.join(map(pattern_of, heads))}]"
    rules = [f"{big}RUN: /{others}{{{RUN}}}/"]
    ways = [f"{big}RUN {names['']}::incr([{RUN.bit_length() - 1}:40]) %if le(_, {START - RUN})"]
    for which, head in enumerate(heads):
        for size in range(RUN):
            piece, add = f"{big}P{which}_{size}", f"{prefix}p{which}_"
            rules.append(f"{piece}: /{f'{others}{{{size}}}' if size else ''}{pattern_of(head)}/")
            ways.append(f"{piece} {add}{size + 1}::_ %if {room(head, size + 1)}")
            left = (size + 1) & size  # a parameter grows by powers of two
            onward = f"{add}{left}" if left else names[head]
            # The second way is never open. A rule with one way of one part is replaced by that part, without its count.
            onward = f"{onward}::incr([{(size + 1 - left).bit_length() - 1}:40]) | {piece} %if lt(_, 1)"
            rules.append(f"{add}{size + 1}::_ : {onward}")
    rules.append(f"{names['']}::_ : " + " | ".join(ways))
    for state in states[1:]:
        if any(mark in state for mark in marks):
            continue
        ways, taken = [], ""
        for letter in sorted({letter for mark in marks for letter in mark}):
            found = after(state + letter)
            taken += letter if found else ""
            if found == end:
                reached = f", ge(_, {least + len(end) - 1})" if least else ""
                ways.append(
                    f"{json.dumps(letter)} %if and(le(_, {START + len(end) - 1}){reached or ', true'})"
                )
            elif found and not any(mark in found for mark in marks):
                ways.append(f"{json.dumps(letter)} {names[found]}::incr(_) %if {room(found, 1)}")
        number = names[state].removeprefix(prefix)
        rules.append(f"{big}O{number}: /[^{''.join(map(pattern_of, taken))}]/")
        ways.append(f"{big}O{number} {names['']}::incr(_) %if lt(_, {START})")
        rules.append(f"{names[state]}::_ : " + " | ".join(ways))
    return rules
