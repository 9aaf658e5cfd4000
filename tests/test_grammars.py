"""Grammars in the Qwen3 engine: what comes out fits, whatever runs beside it, and nothing else is changed by it."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest

from openinfer.frontend.contract import Failed, Finished, Rejected, TokenTable
from openinfer.frontend.errors import Unsupported
from openinfer.frontend.http import Tokenizer
from openinfer.graph.runner import Runner
from openinfer.graph.runner.masking import Masking
from openinfer.recipes.engine.testing import Planted
from openinfer.sampler.budget import Budget
from openinfer.sampler.grammar import Compiler, Grammar

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = Grammar("json_schema", json.dumps(PERSON))
REGEX = Grammar("regex", "[a-e]{3,12}!")
CHOICE = Grammar("choice", '["yes", "perhaps", "日本"]')


@pytest.fixture
def tokenizer(tiny: Any) -> Tokenizer:
    return Tokenizer.load(tiny.path)


@pytest.fixture
def constrained(session: Callable[..., Any], tiny: Any, tokenizer: Tokenizer) -> Callable[..., Any]:
    """A session on an engine that has its TokenTable."""

    def make(**flags: Any) -> Any:
        made = session(tiny.path, max_model_len=256, **flags)
        table = tokenizer.token_table("<think></think><tool_call></tool_call>")
        assert table is not None
        made.engine.control(table)
        return made

    return make


def fits(grammar: Grammar, text: str) -> bool:
    match grammar.kind:
        case "json_schema":
            jsonschema.validate(json.loads(text), json.loads(grammar.text))
            return True
        case "regex":
            return re.fullmatch(grammar.text, text) is not None
    return text in json.loads(grammar.text)


def text_of(tokenizer: Tokenizer, outcome: Any) -> str:
    """The text of a request that ended by EOS, which the grammar allowed."""
    (end,) = outcome.terminals
    assert isinstance(end, Finished), end
    assert end.reason == "stop"
    assert outcome.tokens[-1] == end.stop_token_id
    return tokenizer.decode(outcome.tokens[:-1], False)


def mixed(session: Any, count: int = 12) -> dict[int, Grammar | None]:
    """Requests with and without grammars, with different parameters and prompts that share a beginning."""
    asked: dict[int, Grammar | None] = {}
    for n in range(count):
        grammar = (JSON, None, REGEX, CHOICE)[n % 4]
        prompt = [*range(20, 60), *range(100 + n, 100 + 5 * n)]
        options: dict[str, Any] = {"temperature": 1.0, "seed": n}
        if n % 3 == 1:
            options |= {"repetition_penalty": 1.2, "logprobs": 3, "top_p": 0.9}
        if n == 11:
            options |= {"min_tokens": 100, "logit_bias": ((470, 3.0),)}
        max_tokens = 30 if grammar is None else 160
        asked[session.submit(prompt, max_tokens, grammar=grammar, **options)] = grammar
    return asked


def test_outputs_fit_and_neither_batch_nor_preemption_nor_launching_ahead_changes_a_token(
    constrained: Callable[..., Any], tokenizer: Tokenizer, request: pytest.FixtureRequest
) -> None:
    together: list[list[int]] = []
    for tight in (False, True):
        if tight:
            request.getfixturevalue("late")
        session = constrained(max_num_seqs=8, kv_cache_memory_bytes=(20 if tight else 2000) * 16 * 4096)
        asked = mixed(session)
        session.finish()
        for request_id, grammar in asked.items():
            outcome = session.outcomes[request_id]
            if grammar is None:
                assert len(outcome.tokens) == 30 or outcome.terminals[0].reason == "stop"
            else:
                text = text_of(tokenizer, outcome)
                assert fits(grammar, text), text
            given = [entry is not None for entry in outcome.logprobs]
            assert given == [request_id % 3 == 1] * len(outcome.tokens)
        assert (session.engine.stats().preemptions > 0) == tight
        tokens = [outcome.tokens for outcome in session.outcomes.values()]
        assert tokens == (together or tokens)
        together = tokens
    alone = constrained(max_num_seqs=1)
    mixed(alone, 4)
    alone.finish()
    assert [outcome.tokens for outcome in alone.outcomes.values()] == together[:4]


def test_drafts_change_no_token_of_a_grammar(
    constrained: Callable[..., Any], tokenizer: Tokenizer, late: None
) -> None:
    """Right and wrong drafts, with preemption and steps that are launched ahead."""
    plain = constrained(max_num_seqs=8)
    asked = mixed(plain)
    plain.finish()
    wanted = [outcome.tokens for outcome in plain.outcomes.values()]
    config = '{"method": "ngram", "num_speculative_tokens": 3}'
    drafted = constrained(max_num_seqs=8, kv_cache_memory_bytes=20 * 16 * 4096, speculative_config=config)
    answers = [[*range(20, 60), *range(100 + n, 100 + 5 * n), *tokens] for n, tokens in enumerate(wanted)]
    drafted.engine.runner.drafting.make_drafter = lambda: Planted(answers)
    mixed(drafted)
    drafted.finish()
    assert [outcome.tokens for outcome in drafted.outcomes.values()] == wanted
    assert drafted.engine.stats().preemptions > 0
    ends = [drafted.outcomes[n].terminals[0] for n, grammar in asked.items() if grammar is not None]
    drafts = [end.drafts for end in ends if end.drafts is not None]
    assert 10 < sum(sum(one.accepted) for one in drafts) < sum(one.tokens for one in drafts)


ONLY_80 = {"allowed_token_ids": (80,), "temperature": 0.0}


@pytest.mark.attack
@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({**ONLY_80, "stop_token_ids": (80,), "min_tokens": 3}, ("allowed_token_ids", "min_tokens")),
        ({**ONLY_80, "bad_words_token_ids": ((80,),)}, ("allowed_token_ids", "bad_words")),
    ],
)
def test_settings_that_leave_no_token_are_refused(
    constrained: Callable[..., Any], settings: dict[str, Any], names: tuple[str, ...]
) -> None:
    (found,) = constrained().outcomes_of([([5, 6, 7], 5, settings)])
    (end,) = found.terminals
    assert isinstance(end, Rejected)
    assert end.code == "invalid"
    assert all(name in end.reason for name in names)


@pytest.mark.attack
@pytest.mark.parametrize("settings", ["grammar", "words", "stops"])
def test_settings_that_leave_no_token_on_the_way_name_themselves(
    constrained: Callable[..., Any], tokenizer: Tokenizer, settings: str
) -> None:
    """They do not blame the model; and the tokens before are the same with drafts."""
    tokens = tokenizer.token_table("").tokens
    with_z = tuple((at,) for at, text in enumerate(tokens) if text.startswith(b"z"))
    chosen = {
        "grammar": {"grammar": Grammar("choice", '["xqjvqkxz"]'), "bad_words_token_ids": with_z[:128]},
        "words": {**ONLY_80, "bad_words_token_ids": ((80, 80, 80, 80),)},
        "stops": {**ONLY_80, "grammar": Grammar("regex", "a{3}"), "allowed_token_ids": ()},
    }[settings]
    if settings == "stops":
        (a,) = (at for at, text in enumerate(tokens) if text == b"a")
        chosen |= {"stop_token_ids": (a,), "min_tokens": 9}
    config = '{"method": "ngram", "num_speculative_tokens": 4}'
    plain, drafted = constrained(), constrained(speculative_config=config)
    drafted.engine.runner.drafting.worth.choose = lambda available, rows, cost: 4 if available else 0
    (want,), (found,) = (one.outcomes_of([([80, 80, 80], 20, chosen)]) for one in (plain, drafted))
    assert found.tokens == want.tokens
    for end in (*want.terminals, *found.terminals):
        assert isinstance(end, Failed)
        assert end.code == "invalid"
        assert f"after {len(want.tokens)} tokens" in end.message
        assert ("the grammar" in end.message) == (settings != "words")
        assert ("bad_words" in end.message) == (settings != "stops")


def test_tokens_that_a_grammar_forces_are_drafts(constrained: Callable[..., Any]) -> None:
    """A look-up that finds nothing has no part in them."""
    config = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 30,
        "prompt_lookup_max": 30,
    }
    sessions = [constrained(speculative_config=one) for one in (None, json.dumps(config))]
    steps, tokens = [], []
    for session in sessions:
        one = session.submit(range(20, 60), 160, grammar=JSON, temperature=1.0, seed=3)
        session.finish()
        outcome = session.outcomes[one]
        steps.append(session.engine.stats().steps)
        tokens.append(outcome.tokens)
    assert tokens[0] == tokens[1]
    drafts = outcome.terminals[0].drafts
    assert sum(drafts.accepted) == drafts.tokens > 5  # forced tokens are never rejected
    assert steps[1] <= steps[0] - drafts.tokens


END_THINK = 399
"""Of the golden checkpoints' tokenizer."""


@pytest.mark.parametrize("kind", ["any", "regex"])
def test_a_budget_of_thoughts_is_kept_over_a_preemption(
    constrained: Callable[..., Any], tokenizer: Tokenizer, kind: str
) -> None:
    """Rows are sent back while they think, so what a thought has spent has to outlive that."""
    text = {"any": "", "regex": r"(?s:[^<]*)</think>[a-e]{3,12}!"}[kind]
    found: list[list[list[int]]] = []
    for tight in (False, True):
        session = constrained(max_num_seqs=6, kv_cache_memory_bytes=(17 if tight else 2000) * 16 * 4096)
        budgets = {}
        for n in range(6):
            grammar = Grammar(kind, text, budget=Budget(24 + 4 * n, END_THINK))  # type: ignore[arg-type]
            prompt = [*range(20, 60), *range(100 + n, 110 + n)]
            options: dict[str, Any] = {"temperature": 1.0, "seed": n, "ignore_eos": kind == "any"}
            budgets[session.submit(prompt, 60, grammar=grammar, **options)] = grammar.budget
        while not any(END_THINK in outcome.tokens for outcome in session.outcomes.values()):
            session.step()
        assert (session.engine.stats().preemptions > 0) == tight
        session.finish()
        found.append([session.outcomes[request_id].tokens for request_id in budgets])
        for tokens, budget in zip(found[-1], budgets.values(), strict=True):
            assert budget is not None
            assert 0 <= tokens.index(END_THINK) + 1 - budget.tokens <= 3  # noise cuts characters
    assert found[0] == found[1]


def test_without_masks_the_outputs_do_not_fit(
    constrained: Callable[..., Any], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: it is the masks that make them fit."""

    def allow_all(self: Masking, constrained: Any, *_: Any) -> None:
        for _, seq, _ in constrained:
            words = self.rows["allowed_masks"].shape[1]
            self.rows.write("allowed_masks", seq.slot, np.full(words, -1, np.int32))

    monkeypatch.setattr(Masking, "write", allow_all)
    session = constrained()
    session.submit(list(range(20, 60)), 40, grammar=CHOICE, temperature=1.0, seed=1)
    session.finish()
    assert not fits(CHOICE, tokenizer.decode(session.outcomes[0].tokens[:-1], False))


@pytest.mark.usefixtures("late")
def test_only_steps_with_a_grammar_wait_for_the_host(
    constrained: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, launch = constrained(), Runner.launch
    seen: set[tuple[bool, bool, bool]] = set()

    def watch(self: Runner, step: Any) -> None:
        ahead = bool(self._launched)
        launch(self, step)
        grammars = any(row.seq.owner.constraint is not None for row in step.rows if row.emits)
        seen.add((ahead, grammars, self._waiting is not None))

    monkeypatch.setattr(Runner, "launch", watch)
    session.submit([30, 31, 32], 60, seed=1)
    session.submit([30, 31, 33], 60, grammar=REGEX, temperature=1.0, seed=1)
    session.finish()
    assert {(True, False, False), (True, True, True)} <= seen
    assert seen <= {
        (ahead, grammars, ahead and grammars) for ahead in (False, True) for grammars in (False, True)
    }


def test_limits_and_ends(constrained: Callable[..., Any], tokenizer: Tokenizer) -> None:
    session = constrained()
    a, b = (tokenizer.encode_short(letter)[0] for letter in "ab")
    asked: dict[str, tuple[Grammar, int, dict[str, Any]]] = {
        "cut": (JSON, 4, {}),
        "short": (Grammar("regex", "a"), 50, {"min_tokens": 30}),
        "on": (Grammar("regex", "a"), 6, {"ignore_eos": True}),
        "ids": (Grammar("regex", "[a-z]{5}"), 50, {"allowed_token_ids": (a, b, 0, 2)}),
        "stop": (Grammar("regex", "a{3}b{3}"), 50, {"stop_token_ids": (b,), "allowed_token_ids": (a, b)}),
        "dead": (Grammar("regex", "[c-z]{5}"), 50, {"allowed_token_ids": (a, b)}),
        "banned": (Grammar("regex", "a"), 50, {"bad_words_token_ids": ((a,),)}),
    }
    ids = {
        name: session.submit([40, 41], most, grammar=grammar, **{"temperature": 1.0, "seed": 5, **options})
        for name, (grammar, most, options) in asked.items()
    }
    session.finish()
    found = {name: session.outcomes[request_id] for name, request_id in ids.items()}
    assert [len(found["cut"].tokens), found["cut"].terminals[0].reason] == [4, "length"]
    assert found["short"].tokens[0] == a
    assert found["short"].terminals[0].reason == "stop"
    assert len(found["short"].tokens) == 2
    assert found["on"].tokens[0] == a
    assert set(found["on"].tokens[1:]) <= {0, 2}
    assert [len(found["on"].tokens), found["on"].terminals[0].reason] == [6, "length"]
    assert set(found["ids"].tokens[:-1]) <= {a, b}
    assert len(text_of(tokenizer, found["ids"])) == 5
    assert found["stop"].tokens == [a, a, a, b]
    assert found["stop"].terminals[0].stop_token_id == b
    for name in ("dead", "banned"):
        (end,) = found[name].terminals
        assert isinstance(end, Failed)
        assert found[name].tokens == []
    assert found["dead"].terminals[0].message == "no token that may be drawn fits the grammar"


def test_what_is_no_grammar_is_rejected_by_name(constrained: Callable[..., Any]) -> None:
    session = constrained()
    refused = session.submit([1], 5, grammar=Grammar("json_schema", '{"not": {"type": "string"}}'))
    broken = session.submit([1], 5, grammar=Grammar("regex", "(a"))
    fine = session.submit([1], 50, grammar=CHOICE)
    session.finish()
    (end,) = session.outcomes[refused].terminals
    assert isinstance(end, Rejected)
    assert "not" in end.reason
    assert isinstance(session.outcomes[broken].terminals[0], Rejected)
    assert session.outcomes[fine].terminals[0].reason == "stop"


def test_grammars_need_a_token_table_and_one_only(session: Callable[..., Any], tiny: Any) -> None:
    bare = session(tiny.path)
    assert "grammar" in bare.engine.info.features
    bare.submit([1], 5, grammar=CHOICE)
    bare.finish()
    (end,) = bare.outcomes[0].terminals
    assert isinstance(end, Rejected)
    assert (end.code, "TokenTable" in end.reason) == ("unsupported", True)
    table = TokenTable([bytes([i]) for i in range(256)], [])
    bare.engine.control(table)
    bare.engine.control(TokenTable(list(table.tokens), []))
    with pytest.raises(Unsupported, match="TokenTable"):
        bare.engine.control(TokenTable([b"a"], []))


def test_a_slow_compiler_holds_up_nobody_and_its_queue_is_bounded(
    constrained: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, release, compile_now = Grammar("regex", "slow"), threading.Event(), Compiler._compile

    def compile_slowly(self: Compiler, grammar: Grammar) -> Any:
        if grammar == slow:
            release.wait(30)
        return compile_now(self, grammar)

    monkeypatch.setattr(Compiler, "_compile", compile_slowly)
    session = constrained(max_num_queued_reqs=2)
    session.engine._grammars._pending._compiler._workers._max_workers = 3  # two of them will be held
    first, second = (session.submit([1, 2], 9, grammar=slow) for _ in range(2))
    full = session.submit([1, 2], 9, grammar=slow)
    session.step()
    assert session.outcomes[full].terminals[0].code == "queue_full"
    assert session.engine.stats().waiting == 2
    session.engine.abort(first)
    other = session.submit([1, 2], 50, grammar=CHOICE)
    deadline = time.monotonic() + 20  # a compiler on a busy machine; the slow one is held for longer
    while not session.outcomes[other].terminals and time.monotonic() < deadline:
        session.step()
    assert session.outcomes[other].terminals[0].reason == "stop"
    assert session.outcomes[first].terminals[0].reason == "abort"
    assert session.outcomes[second].terminals == []
    release.set()
    session.finish(max_steps=200_000)
    assert session.outcomes[second].terminals[0].reason == "stop"


@pytest.mark.usefixtures("late")
def test_aborts_at_any_moment_leave_nothing_behind(constrained: Callable[..., Any]) -> None:
    """The fixture checks the pool at the end."""
    session, rng = constrained(max_num_seqs=4), np.random.default_rng(3)
    for n in range(40):
        grammar = (JSON, None, REGEX)[n % 3]
        session.submit([50 + n, 51, 52], 60, grammar=grammar, temperature=1.0, seed=n)
        for _ in range(int(rng.integers(0, 6))):
            session.step()
        if session.open and rng.random() < 0.6:
            session.engine.abort(int(rng.choice(session.open)))
    session.finish()
    reasons = {outcome.terminals[0].reason for outcome in session.outcomes.values()}
    assert {"abort", "stop"} <= reasons
