"""Messages survive the wire; specs name what they build."""

import msgspec
import pytest

from openinfer.frontend import (
    EngineSpec,
    EngineSpecError,
    EngineStats,
    Failed,
    Finished,
    InvalidRequest,
    Rejected,
    Request,
    ResetPrefixCache,
    Scheduled,
    StepOutputs,
    TokenLogprobs,
)
from openinfer.frontend.contract import Engine
from openinfer.frontend.testing import FakeEngine
from openinfer.frontend.wire import ControlFrame, FromEngine, Gone, Hello, Stepped, Submit, ToEngine
from openinfer.sampler import SamplingParams
from openinfer.sampler.budget import Budget
from openinfer.sampler.form import Grammar


def test_messages_survive_msgpack() -> None:
    request = Request(
        id=2**53 + 1,
        prompt_token_ids=[1, 2],
        sampling=SamplingParams(temperature=0.5, stop_token_ids=(3, 4), seed=-1, logprobs=2),
        max_tokens=5,
        arrival=1.5,
        priority=-1,
        tenant="a",
        cache_salt="b",
        trace_parent="c",
        grammar=Grammar("any", budget=Budget(5, 639, 638)),
    )
    outputs = StepOutputs(
        [1, 1, 2],
        [7, 8, 9],
        [None, TokenLogprobs(-0.5, [8], [-0.5]), None],
        [Scheduled(1, 16, 2.0), Finished(1, "stop", 8), Rejected(2, "no", "queue_full"), Failed(3, "x")],
    )
    for message in (Hello(), Submit(request), ControlFrame(1, ResetPrefixCache()), Gone(3)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToEngine) == message
    stepped = Stepped(outputs, EngineStats(running=1, steps=2), 3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stepped), type=FromEngine) == stepped


def test_bad_parameters_do_not_pass_the_wire() -> None:
    request = Request(id=1, prompt_token_ids=[1], sampling=SamplingParams(), max_tokens=1, arrival=0.0)
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(request))
    fields[2]["temperature"] = 5.0
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        msgspec.convert(fields, Request)


def test_a_spec_builds_what_it_names() -> None:
    engine = EngineSpec("openinfer.frontend.testing:FakeEngine", {"model": "x"}).build()
    assert isinstance(engine, Engine)
    assert engine.info.model == "x"
    with pytest.raises(EngineSpecError, match=r"'package\.module:function'"):
        EngineSpec("nothing").build()
    with pytest.raises(EngineSpecError, match="has no 'nope'"):
        EngineSpec("openinfer.frontend.testing:nope").build()
    with pytest.raises(ModuleNotFoundError):
        EngineSpec("no_such_module:f").build()


def test_the_fake_engine_keeps_the_contract() -> None:
    engine = FakeEngine(max_running=2, max_waiting=2)
    for request_id in range(1, 6):
        engine.submit(
            Request(
                id=request_id,
                prompt_token_ids=[10 * request_id],
                sampling=SamplingParams(),
                max_tokens=request_id,
                arrival=0.0,
            )
        )
    terminals: dict[int, list[object]] = {}
    tokens: dict[int, list[int]] = {}
    for _ in range(20):
        outputs = engine.step(0.0)
        for request_id, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
            assert request_id not in terminals
            tokens.setdefault(request_id, []).append(token)
        for update in outputs.updates:
            if not isinstance(update, Scheduled):
                terminals.setdefault(update.id, []).append(update)
    assert terminals[1] == [Finished(1, "length")]
    assert tokens[2] == [21, 22]
    assert sorted(terminals) == [1, 2, 3, 4, 5]
    assert all(len(found) == 1 for found in terminals.values())
    assert [type(terminals[request_id][0]) for request_id in (3, 4, 5)] == [Rejected] * 3
    assert engine.stats().kv_used_tokens == 0


@pytest.mark.parametrize("field", ["id", "max_tokens", "priority", "prompt_logprobs"])
@pytest.mark.parametrize("value", [2**63, 2**64, -(2**63) - 1, 10**400])
def test_integers_beyond_64_bits_are_no_request(field: str, value: int) -> None:
    fields = {"id": 1, "prompt_token_ids": [1], "sampling": SamplingParams(), "max_tokens": 1, "arrival": 0.0}
    with pytest.raises(InvalidRequest, match=field):
        Request(**(fields | {field: value}))
