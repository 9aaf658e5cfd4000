"""How much a model may think: the efforts, switches and budgets of requests, as templates and grammars know them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from openinfer.frontend.chat.output import END_THINK, THINK
from openinfer.frontend.contract import EngineInfo
from openinfer.frontend.errors import APIError, NotSupported
from openinfer.frontend.http.body import Thinking
from openinfer.frontend.http.chat import Chat, warn
from openinfer.frontend.http.params import Plan, check_grammars
from openinfer.frontend.http.tokenizer import Tokenizer
from openinfer.sampler.budget import Budget
from openinfer.sampler.form import Grammar

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SWITCHES = frozenset({"enable_thinking", "thinking"})
"""Variables of templates, each of which says whether the model thinks."""
EFFORT_BUDGETS = {"minimal": 512, "low": 2048}
"""Tokens that the thoughts may have where the template knows no effort; higher efforts leave them to the model."""
Where = Literal["before", "within", "over"]
"""Where a prompt leaves the model: it may begin to think, is in the midst of it, or is through with it."""


def thinking_options(
    switches: Mapping[str, bool | Thinking | None], variables: frozenset[str], warnings: list[str]
) -> dict[str, bool]:
    """Options of the template for the first of the fields that is given; `variables` are those that it has. `warnings`
    gets a text where it has none for it."""
    field, value = next(((name, value) for name, value in switches.items() if value is not None), ("", None))
    if value is None:
        return {}
    known = variables & SWITCHES
    if not known:
        warn(warnings, f"{field} is ignored: this model's chat template has no switch for thoughts")
    return dict.fromkeys(known, value.type != "disabled" if isinstance(value, Thinking) else value)


def effort_options(effort: str, variables: frozenset[str]) -> dict[str, Any] | None:
    """Options of the template for an effort; None where it has none that says so."""
    if "reasoning_effort" in variables:
        return {"reasoning_effort": effort}
    known = variables & SWITCHES
    return dict.fromkeys(known, effort != "none") if known and effort in EFFORTS else None


def budgeted(
    chat: Chat,
    where: Where,
    grammar: Grammar | None,
    variables: frozenset[str],
    info: EngineInfo,
    tokenizer: Tokenizer,
) -> Grammar | None:
    """`grammar` with a budget for the thoughts, if the chat sets one or its effort does. Raises APIError (400) where
    one that the chat sets cannot be kept; that of an effort is left out."""
    tokens = chat.budget
    if tokens is None and "reasoning_effort" not in variables:
        tokens = EFFORT_BUDGETS.get(chat.effort or "")
    if tokens is None or where == "over":
        return grammar
    try:
        check_grammars(chat.budget_field, info, tokenizer)
        closing, opening = (tokenizer.token_id(marker) for marker in (END_THINK, THINK))
        if closing is None or opening is None:
            problem = "is not supported: this model's thoughts are not marked by single tokens"
            raise NotSupported(f"{chat.budget_field} {problem}", chat.budget_field)
    except APIError:
        if chat.budget is not None:
            raise
        return grammar
    budget = Budget(tokens, closing, opening if where == "before" else None)
    return dataclasses.replace(grammar or Grammar("any"), budget=budget)


def without_idle_budget(plan: Plan, limits: Sequence[int]) -> Plan:
    """The plan without a budget of thoughts that no answer of at most these numbers of tokens can go over."""
    grammar = plan.grammar
    if grammar is None or grammar.budget is None or grammar.budget.tokens < max(limits):
        return plan
    left = None if grammar.kind == "any" else dataclasses.replace(grammar, budget=None)
    return msgspec.structs.replace(plan, grammar=left)
