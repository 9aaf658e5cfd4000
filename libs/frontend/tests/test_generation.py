"""A choice does not depend on how the engine's steps cut its tokens."""

import json
import random
from typing import Any

import msgspec
import pytest

from openinfer.frontend.chat import OutputParser
from openinfer.frontend.client import OutputDelta
from openinfer.frontend.contract import Drafts, EngineInfo, EngineStats, Finished, Request, TokenLogprobs
from openinfer.frontend.http.admin.metrics import Metrics
from openinfer.frontend.http.generation import Choice, Usage
from openinfer.frontend.http.openai.chat_shape import ChatShape
from openinfer.frontend.http.openai.completions import usage_body
from openinfer.frontend.http.params import Plan
from openinfer.frontend.http.tokenizer import Tokenizer
from openinfer.sampler import SamplingParams


class NoClient:
    info = EngineInfo(
        model="m", max_model_len=1, vocab_size=1, eos_token_ids=[], kv_capacity_tokens=1, block_size=1
    )

    def stats(self) -> EngineStats:
        return EngineStats()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(NoClient(), None)  # type: ignore[arg-type]


def plan_of(**options: Any) -> Plan:
    sampling = SamplingParams(
        min_tokens=options.pop("min_tokens", 0), stop_token_ids=options.pop("stop_ids", ()), logprobs=0
    )
    plan = Plan(
        sampling=sampling,
        n=1,
        stop=options.pop("stop", []),
        include_stop=options.pop("include", False),
        skip_special_tokens=options.pop("skip", True),
        return_token_ids=False,
        stream=True,
        include_usage=False,
        new_parser=options.pop("parser", None),
    )
    assert not options
    return plan


def make(tokenizer: Tokenizer, metrics: Metrics, aborted: list[int], **options: Any) -> Choice:
    plan = plan_of(**options)
    sampling = plan.sampling
    request = Request(id=7, prompt_token_ids=[1], sampling=sampling, max_tokens=100, arrival=0.0)
    return Choice(0, request, plan, tokenizer, metrics, lambda: None, aborted.append)


def outcome(choice: Choice, ids: list[int], cuts: list[int], terminal: Finished) -> tuple[Any, ...]:
    """What comes out when the tokens arrive in pieces of these sizes, the last with the terminal."""
    text, seen, logprobs = "", [], 0
    rest = list(ids)
    while rest or not choice.done:
        size = cuts.pop() if cuts else len(rest)
        piece, rest = rest[:size], rest[size:]
        entries = [TokenLogprobs(-1.0, [], []) for _ in piece]
        choice.push(OutputDelta(piece, entries, terminal=None if rest else terminal))
        new_text, new_ids, new_logprobs = choice.take()
        text, seen, logprobs = text + new_text, [*seen, *new_ids], logprobs + len(new_logprobs)
    return text, seen, logprobs, choice.num_tokens, choice.finish_reason, choice.stop_reason


def test_any_cut_gives_the_same(tokenizer: Tokenizer, metrics: Metrics) -> None:
    rng = random.Random(11)
    words = tokenizer._core.encode("the end of the line is the end of it all 漢字 ").ids
    stopped = worded = 0
    for _ in range(400):
        ids = [rng.choice(words) for _ in range(rng.randrange(1, 40))]
        terminal = Finished(7, "length")
        options: dict[str, Any] = {
            "stop": rng.sample(["e", "he", "the end", " of", "l i", "漢", "of it"], rng.randrange(0, 4)),
            "include": rng.random() < 0.3,
            "min_tokens": rng.choice([0, 0, 5, 20]),
            "skip": rng.random() < 0.5,
        }
        if rng.random() < 0.5:
            ids.append(2)
            terminal = Finished(7, "stop", 2)
        results = []
        for _ in range(4):
            cuts = [rng.choice([1, 1, 2, 3, 9]) for _ in range(40)]
            results.append(outcome(make(tokenizer, metrics, [], **options), ids, cuts, terminal))
        assert all(result == results[0] for result in results)
        text, seen, logprobs, count, *_ = results[0]
        assert count == len(seen) == logprobs
        stopped += results[0][5] is not None
        worded += bool(text)
    assert stopped > 50
    assert worded > 300


def test_a_stop_string_aborts_once_and_drops_what_overshot(tokenizer: Tokenizer, metrics: Metrics) -> None:
    aborted: list[int] = []
    choice = make(tokenizer, metrics, aborted, stop=["end"])
    ids = tokenizer._core.encode("the end of it").ids
    choice.push(OutputDelta(ids[:-1]))
    choice.push(OutputDelta(ids[-1:]))
    choice.push(OutputDelta([], terminal=Finished(7, "abort")))
    text, seen, _ = choice.take()
    assert text == "the "
    assert tokenizer.decode(seen, True) == "the end"
    assert aborted == [7]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "end")


def test_stop_reason_is_the_id_only_if_it_was_asked_for(tokenizer: Tokenizer, metrics: Metrics) -> None:
    for stop_ids, expected in (((), None), ((2,), 2)):
        choice = make(tokenizer, metrics, [], stop_ids=stop_ids)
        choice.push(OutputDelta([47, 2], terminal=Finished(7, "stop", 2)))
        assert (choice.take()[0], choice.stop_reason) == ("H", expected)


def test_the_usage_counts_drafts_of_all_choices(tokenizer: Tokenizer, metrics: Metrics) -> None:
    choices = [make(tokenizer, metrics, []) for _ in range(3)]
    counted = Drafts(4, 8, [3, 1]), Drafts(2, 6, [2, 1, 1]), None
    for choice, drafts in zip(choices, counted, strict=True):
        choice.push(OutputDelta([47, 48], terminal=Finished(7, "length", drafts=drafts)))
    details = msgspec.to_builtins(usage_body(Usage(choices, 3)))["completion_tokens_details"]
    assert details == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 8,
        "rejected_prediction_tokens": 6,
        "accepted_per_position": [5, 2, 1],
    }
    without = msgspec.to_builtins(usage_body(Usage(choices[2:], 1)))["completion_tokens_details"]
    assert without == {"reasoning_tokens": 0}


def test_a_broken_end_is_shown(tokenizer: Tokenizer, metrics: Metrics) -> None:
    first = tokenizer._core.encode("漢").ids[0]
    choice = make(tokenizer, metrics, [])
    choice.push(OutputDelta([47, first]))
    assert choice.take()[0] == "H"
    choice.push(OutputDelta([], terminal=Finished(7, "length")))
    assert choice.take()[0] == "\ufffd"


@pytest.mark.parametrize("skip", [True, False])
def test_a_chunk_of_a_chat_has_the_log_probability_of_one_token_and_its_text(
    tokenizer: Tokenizer, metrics: Metrics, skip: bool
) -> None:
    """However many came at once: a client may take the text of several from their log-probabilities."""
    core = tokenizer._core
    ids = [*core.encode("<think>\nhm\n</think>\n\nfour it is, 漢字!", add_special_tokens=False).ids, 2]
    choice = make(tokenizer, metrics, [], skip=skip, parser=lambda: OutputParser(reasoning=True))
    shape = ChatShape(plan_of(skip=skip), tokenizer)
    sent = b""
    for at in (0, 9):  # the second time in the middle of the answer
        tokens = ids[at : at + 9] if not at else ids[at:]
        entries = [TokenLogprobs(-1.0, [], []) for _ in tokens]
        choice.push(OutputDelta(tokens, entries, terminal=Finished(7, "stop", 2) if at else None))
        sent += shape.events(choice)
    chunks = [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in sent.split(b"\n\n") if line]
    chunks = chunks[1:]  # the role
    said = [chunk["logprobs"]["content"] for chunk in chunks]
    assert [len(entries) for entries in said] == [1] * len(ids)
    assert [bytes(entry["bytes"]) for (entry,) in said] == [tokenizer.token_bytes(one) for one in ids]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "four it is, 漢字!"
    assert "".join(chunk["delta"].get("reasoning") or "" for chunk in chunks) == "hm"
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(ids) - 1) + ["stop"]
    shown = [chunk for chunk in chunks if chunk["delta"].get("content")]
    assert len(shown) > 5
    for chunk in shown:
        token = bytes(chunk["logprobs"]["content"][0]["bytes"])
        assert chunk["delta"]["content"].encode().strip().endswith(token.strip()), chunk
