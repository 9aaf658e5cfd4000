"""Several engines behind one client: who gets a request, what a dead one costs, and the sums."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from openinfer.frontend import (
    EngineDeadError,
    EngineSpec,
    EngineStats,
    Failed,
    Finished,
    Request,
    Unsupported,
)
from openinfer.frontend.client import Health, OutputDelta
from openinfer.frontend.contract import (
    AdapterState,
    Command,
    EngineInfo,
    LoadAdapter,
    ResetPrefixCache,
    Sleep,
    SlowTraces,
    StepTimes,
    UnloadAdapter,
    UpdateWeights,
    WakeUp,
)
from openinfer.frontend.process_driver import ProcessDriver
from openinfer.frontend.replicas import SLACK, Prefixes, ReplicatedClient, summed
from openinfer.frontend.restart import RestartingClient
from openinfer.sampler import SamplingParams

INFO = EngineInfo(
    model="m", max_model_len=9, vocab_size=9, eos_token_ids=[], kv_capacity_tokens=100, block_size=16
)


class Replica:
    """A client that keeps what it is asked."""

    def __init__(self) -> None:
        self.info, self.up, self.sinks, self.aborted = INFO, True, {}, []  # type: ignore[var-annotated]
        self.answer: str | None = None
        self.asleep = False
        self.room, self.adapters = 2, {}  # type: ignore[var-annotated]
        self.refused: dict[object, Exception] = {}  # by command
        self.delays: list[float] = []  # of the next commands

    def submit(self, request: Request, sink: Any) -> None:
        self.sinks[request.id] = sink

    def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)

    def end(self) -> None:
        for number, sink in self.sinks.items():
            sink(OutputDelta([], terminal=Finished(number, "length")))
        self.sinks = {}

    def health(self) -> Health:
        return Health(self.up, "ok" if self.up else "gone")

    async def control(self, command: object) -> str | None:
        await asyncio.sleep(self.delays.pop(0) if self.delays else 0)
        if command in self.refused:
            raise self.refused[command]
        if isinstance(command, Sleep | WakeUp):
            if self.sinks:
                raise Unsupported("1 requests run or wait")
            if self.asleep != isinstance(command, WakeUp):
                raise Unsupported("the engine does not sleep, or sleeps already")
            self.asleep = not self.asleep
            return None
        if isinstance(command, LoadAdapter):
            if self.room == len(self.adapters):
                raise Unsupported("no place is free")
            self.adapters[command.name] = command.path
        if isinstance(command, UnloadAdapter):
            del self.adapters[command.name]
        return self.answer

    def stats(self) -> EngineStats:
        why = "the engine sleeps" if self.asleep else ""
        adapters = [AdapterState(name, path, 0, 0) for name, path in self.adapters.items()]
        return EngineStats(running=len(self.sinks), asleep=self.asleep, refusal=why, adapters=adapters)


def request(number: int, tokens: Sequence[int], **more: Any) -> Request:
    return Request(
        id=number, prompt_token_ids=list(tokens), sampling=SamplingParams(), max_tokens=1, arrival=0.0, **more
    )


class Group:
    def __init__(self, count: int) -> None:
        self.replicas = [Replica() for _ in range(count)]
        self.client = ReplicatedClient(self.replicas)  # type: ignore[arg-type]
        self.ended: list[int] = []

    def ask(self, tokens: Sequence[int], **more: Any) -> int:
        """The replica that got the request."""
        number = self.client.new_id()
        self.client.submit(request(number, tokens, **more), lambda delta: self.ended.append(number))
        return next(i for i, replica in enumerate(self.replicas) if number in replica.sinks)


def test_requests_that_begin_alike_go_to_one_replica_and_others_elsewhere() -> None:
    group = Group(3)
    first = [group.ask([topic] * 300) for topic in range(3)]
    assert sorted(first) == [0, 1, 2]
    for replica in group.replicas:
        replica.end()
    assert [group.ask([topic] * 290 + [7, 8, 9]) for topic in range(3)] == first
    assert [group.ask([topic] * 150) for topic in range(3)] == first


def test_a_salt_or_an_adapter_makes_another_prefix() -> None:
    names = [
        Prefixes().names(request(1, [1] * 128, **more))
        for more in ({}, {"cache_salt": "s"}, {"adapter": "a"}, {"cache_salt": "s", "adapter": "a"})
    ]
    assert len({name for (name,) in names}) == 4
    assert Prefixes().names(request(1, [1] * 127)) == []


def test_a_replica_that_is_much_busier_gives_its_prefix_away() -> None:
    group = Group(2)
    taken = [group.ask([1] * 200) for _ in range(SLACK + 1)]
    assert set(taken) == {taken[0]}
    moved = [group.ask([1] * 200) for _ in range(20)]
    assert set(moved) == {0, 1}
    loads = [len(replica.sinks) for replica in group.replicas]
    assert abs(loads[0] - loads[1]) <= SLACK + 1


def test_a_replica_that_is_a_little_busier_keeps_its_prefix() -> None:
    """Half as many requests again, and SLACK more, are what its prefixes are worth."""
    for loads, owner in (((100, 91), 0), ((136, 91), 0), ((137, 91), 1), ((9, 1), 0), ((10, 1), 1)):
        group = Group(2)
        group.client._prefixes.note(group.client._prefixes.names(request(1, [1] * 200)), 0)
        group.client._load[:] = loads
        assert group.ask([1] * 200) == owner, loads


def test_short_prompts_are_spread() -> None:
    group = Group(4)
    assert sorted(group.ask([1, 2]) for _ in range(8)) == [0, 0, 1, 1, 2, 2, 3, 3]
    for replica in group.replicas:
        replica.end()
    found = []
    for _ in range(8):  # one at a time
        found.append(group.ask([1, 2]))
        group.replicas[found[-1]].end()
    assert sorted(found) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_replica_that_is_down_gets_nothing_and_has_lost_its_prefixes() -> None:
    group = Group(2)
    home = group.ask([1] * 200)
    group.replicas[home].up = False
    assert group.ask([1] * 200) == 1 - home
    assert group.client.health() == Health(True, f"replica {home}: gone")
    group.replicas[home].up = True
    for replica in group.replicas:
        replica.end()
    assert group.ask([1] * 200) == 1 - home
    for replica in group.replicas:
        replica.up = False
    assert not group.client.health().ok
    with pytest.raises(EngineDeadError, match="replica 0: gone; replica 1: gone"):
        group.client.submit(request(99, [1]), lambda delta: None)


def test_an_abort_goes_where_its_request_is() -> None:
    group = Group(2)
    home = group.ask([1] * 200)
    group.client.abort(1)
    group.client.abort(77)
    assert [replica.aborted for replica in group.replicas] == [[1] if i == home else [] for i in range(2)]
    group.replicas[home].end()
    assert group.ended == [1]
    group.client.abort(1)
    assert group.replicas[home].aborted == [1]


def test_commands_go_to_all_or_none() -> None:
    group = Group(2)
    for index, replica in enumerate(group.replicas):
        replica.answer = f'{{"found": {index + 1}, "traces": [{index}]}}'
    answer = asyncio.run(group.client.control(SlowTraces()))
    assert msgspec.json.decode(answer or "") == {"found": 3, "traces": [0, 1]}
    with pytest.raises(Unsupported, match="a replica that is restarted would have other weights"):
        asyncio.run(group.client.control(UpdateWeights("p", "v")))
    group.replicas[1].up = False
    with pytest.raises(EngineDeadError, match="replica 1 is down, so none does this: gone; try again"):
        asyncio.run(group.client.control(ResetPrefixCache()))


def adapters_of(group: Group) -> list[dict[str, str]]:
    return [replica.adapters for replica in group.replicas]


def test_all_replicas_load_an_adapter_or_none() -> None:
    """Of one that is replaced in place, all go back to the former folder."""
    group = Group(3)
    asyncio.run(group.client.control(LoadAdapter("a", "p")))
    assert adapters_of(group) == [{"a": "p"}] * 3
    group.replicas[1].room = 1
    for command in (LoadAdapter("b", "p"), LoadAdapter("a", "q", in_place=True)):
        with pytest.raises(Unsupported) as refused:
            asyncio.run(group.client.control(command))
        assert str(refused.value) == "replica 1: no place is free"
        assert adapters_of(group) == [{"a": "p"}] * 3
    group.replicas[1].room = 2
    asyncio.run(group.client.control(LoadAdapter("a", "q", in_place=True)))
    assert adapters_of(group) == [{"a": "q"}] * 3


def test_refusals_that_are_alike_are_told_once() -> None:
    group = Group(3)
    bad = LoadAdapter("a", "bad")
    for replica, why in zip(group.replicas, ("no folder", "no\nmemory", "no folder"), strict=True):
        replica.refused[bad] = Unsupported(why)
    with pytest.raises(Unsupported) as refused:
        asyncio.run(group.client.control(bad))
    assert str(refused.value) == "replica 0, replica 2: no folder; replica 1: no memory"


def test_replicas_that_cannot_go_back_to_what_they_had_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Values that were read from the same folder before are nowhere any more."""
    group = Group(2)
    asyncio.run(group.client.control(LoadAdapter("a", "p")))
    new, again = LoadAdapter("a", "q", in_place=True), LoadAdapter("a", "p/", in_place=True)
    group.replicas[0].refused[LoadAdapter("a", "p", in_place=True)] = Unsupported("no folder")
    group.replicas[1].refused = {new: Unsupported("too large"), again: EngineDeadError("killed")}
    with pytest.raises(Unsupported) as refused:
        asyncio.run(group.client.control(new))
    assert str(refused.value) == "replica 1: too large; not undone: replica 0: no folder"
    assert f"no longer alike after {new}: {refused.value}" in caplog.text
    group.replicas[0].refused, group.replicas[0].adapters = {}, {"a": "p"}
    with pytest.raises(EngineDeadError) as dead:
        asyncio.run(group.client.control(again))
    assert str(dead.value) == "replica 1: killed; not undone: replica 0: it has the values that p has now"


def test_all_replicas_unload_an_adapter_or_none() -> None:
    """One that is restarted without the adapter is not asked."""
    group = Group(3)
    asyncio.run(group.client.control(LoadAdapter("a", "p")))
    group.replicas[1].refused[UnloadAdapter("a")] = EngineDeadError("killed")
    with pytest.raises(EngineDeadError, match=r"^replica 1: killed$"):
        asyncio.run(group.client.control(UnloadAdapter("a")))
    assert adapters_of(group) == [{"a": "p"}] * 3
    group.replicas[1].adapters = {}
    asyncio.run(group.client.control(UnloadAdapter("a")))
    assert adapters_of(group) == [{}] * 3


def test_commands_about_adapters_come_to_all_replicas_in_one_order() -> None:
    async def main(group: Group) -> None:
        commands = [LoadAdapter("a", "p"), LoadAdapter("a", "q", in_place=True)]
        await asyncio.gather(*(group.client.control(one) for one in commands))

    group = Group(2)
    group.replicas[1].delays = [0.05, 0.0]
    asyncio.run(main(group))
    assert adapters_of(group) == [{"a": "q"}] * 2


def test_requests_go_to_the_replicas_that_have_their_adapter() -> None:
    """One that was restarted may lack it. Other requests are spread over all."""
    group = Group(3)
    group.replicas[1].adapters = {"a": "p"}
    assert {group.ask([n] * 200, adapter="a") for n in range(SLACK)} == {1}
    assert {group.ask([n] * 200) for n in range(4)} == {0, 2}
    assert len({group.ask([n] * 200, adapter="unknown") for n in range(SLACK)}) > 1
    group.replicas[1].up = False
    assert group.ask([1], adapter="a") != 1


def test_all_replicas_sleep_or_none() -> None:
    group = Group(2)

    def control(command: Sleep | WakeUp) -> None:
        asyncio.run(group.client.control(command))

    control(Sleep())
    assert [replica.asleep for replica in group.replicas] == [True, True]
    assert (group.client.stats().asleep, group.client.stats().refusal) == (True, "the engine sleeps")
    with pytest.raises(Unsupported, match="sleeps already"):
        control(Sleep())
    group.replicas[1].asleep = False  # another client has woken it
    control(WakeUp())
    assert not group.client.stats().asleep
    group.replicas[1].submit(request(1, [1]), None)
    with pytest.raises(Unsupported, match="1 requests run"):
        control(Sleep())
    assert [replica.asleep for replica in group.replicas] == [False, False]
    with pytest.raises(Unsupported, match="would have other weights"):
        control(Sleep(2))


@pytest.mark.attack
@pytest.mark.parametrize("command", [Sleep(), ResetPrefixCache()])
def test_a_command_that_one_replica_refuses_costs_no_other_its_prefixes(command: Command) -> None:
    group, heard = Group(3), []
    for replica in group.replicas:
        replica.control = lambda command: heard.append(command)  # type: ignore[method-assign, assignment]
    group.ask([1] * 200)
    with pytest.raises(Unsupported, match="1 requests run or wait"):
        asyncio.run(group.client.control(command))
    assert heard == []


def test_sums() -> None:
    one = EngineStats(
        running=1, prefix_hit_tokens=2, offload_bytes={"host": 5}, accepted_by_position=[3],
        step_times=[StepTimes("a", 1, 1.0, 2.0)], adapters=[AdapterState("x", "p", 1, 0)],
    )  # fmt: skip
    other = EngineStats(
        running=4, prefix_hit_tokens=5, offload_bytes={"host": 1, "disk": 2}, accepted_by_position=[1, 1],
        step_times=[StepTimes("a", 1, 1.0, 2.0), StepTimes("b", 1, 1.0, 1.0)],
        adapters=[AdapterState("x", "p", 1, 2), AdapterState("y", "p", 0, 0)],
    )  # fmt: skip
    total = summed([one, other])
    assert (total.running, total.prefix_hit_tokens) == (5, 7)
    assert total.offload_bytes == {"host": 6, "disk": 2}
    assert total.accepted_by_position == [4, 1]
    assert total.step_times == [StepTimes("a", 2, 2.0, 4.0), StepTimes("b", 1, 1.0, 1.0)]
    assert total.adapters == [AdapterState("x", "p", 2, 2), AdapterState("y", "p", 0, 0)]
    every = EngineStats.__struct_fields__
    untouched = {"step_times", "adapters", "accepted_by_position", "weights_version", "refusal"}
    kinds = {name: type(getattr(one, name)) for name in every if name not in untouched}
    assert set(kinds.values()) == {int, dict, bool}, "summed() knows no other kind"


def run(use: Callable[[ReplicatedClient, list[ProcessDriver]], Awaitable[None]], count: int = 2) -> None:
    drivers: list[ProcessDriver] = []

    def make(index: int) -> ProcessDriver:
        spec = EngineSpec("openinfer.frontend.testing:FakeEngine", {"step_delay_s": 0.002})
        drivers.append(ProcessDriver(spec, close_timeout_s=0.2))
        return drivers[-1]

    async def main() -> None:
        client = ReplicatedClient([RestartingClient(partial(make, index)) for index in range(count)])
        await client.start()
        try:
            await use(client, drivers)
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_killed_replica_costs_its_own_requests_and_comes_back(generate: Any) -> None:
    async def use(client: ReplicatedClient, drivers: list[ProcessDriver]) -> None:
        assert client.info.kv_capacity_tokens == 2 * drivers[0].info.kv_capacity_tokens
        long = [asyncio.create_task(generate(client, 1500, [n + 1])) for n in range(6)]
        while client.stats().running < 6:
            await asyncio.sleep(0.01)
        os.kill(drivers[0].pid, signal.SIGKILL)
        ends = [deltas[-1].terminal for deltas in await asyncio.gather(*long)]
        assert sorted(type(end).__name__ for end in ends) == ["Failed"] * 3 + ["Finished"] * 3
        assert all("SIGKILL" in end.message for end in ends if isinstance(end, Failed))
        while len(drivers) < 3 or client.health().detail != "ok":
            assert isinstance((await generate(client))[-1].terminal, Finished)
        spread = await asyncio.gather(*(generate(client, 3, [n + 1]) for n in range(4)))
        assert all(isinstance(deltas[-1].terminal, Finished) for deltas in spread)

    run(use)


def test_a_replica_that_does_not_start_ends_the_start(tmp_path: Path) -> None:
    def make(error: str | None) -> ProcessDriver:
        return ProcessDriver(EngineSpec("openinfer.frontend.testing:FakeEngine", {"start_error": error}))

    async def main() -> None:
        client = ReplicatedClient([RestartingClient(partial(make, error)) for error in (None, "no GPU 1")])
        with pytest.raises(Exception, match="no GPU 1"):
            await client.start()

    asyncio.run(asyncio.wait_for(main(), 30))
