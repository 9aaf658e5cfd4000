"""Several clients of one engine process: ids apart, each sees its own, and one that dies leaves nothing behind."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

from openinfer.frontend import EngineSpec
from openinfer.frontend.client import Driver, OutputDelta
from openinfer.frontend.contract import EngineStats, Failed, Request, ResetPrefixCache
from openinfer.frontend.process_driver import AttachedDriver, ProcessDriver
from openinfer.frontend.wire import Submit, owner
from openinfer.sampler import SamplingParams


class Collector:
    """A sink that remembers everything and can be awaited for the terminal."""

    def __init__(self) -> None:
        self.deltas: list[OutputDelta] = []
        self.tokens: list[int] = []
        self.terminals: list[object] = []
        self.ended = asyncio.Event()

    def __call__(self, delta: OutputDelta) -> None:
        self.deltas.append(delta)
        self.tokens += delta.token_ids
        if delta.terminal is not None:
            self.terminals.append(delta.terminal)
            self.ended.set()


def send(driver: Driver, prompt: list[int], max_tokens: int = 5, **sampling: object) -> tuple[int, Collector]:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    request = Request(
        id=driver.new_id(), prompt_token_ids=prompt, sampling=params, max_tokens=max_tokens, arrival=0.0
    )
    sink = Collector()
    driver.submit(request, sink)
    return request.id, sink


Use = Callable[[ProcessDriver, list[AttachedDriver]], Awaitable[None]]


def run(use: Use, clients: int = 2, hang_timeout_s: float = 60.0, **kwargs: object) -> None:
    async def main() -> None:
        spec = EngineSpec("openinfer.frontend.testing:FakeEngine", kwargs)
        parent = ProcessDriver(spec, close_timeout_s=0.5, hang_timeout_s=hang_timeout_s)
        await parent.start()

        async def address() -> str:
            return parent.address

        joined = [
            AttachedDriver(address, client + 1, hang_timeout_s=hang_timeout_s) for client in range(clients)
        ]
        try:
            await asyncio.gather(*(driver.start() for driver in joined))
            await asyncio.wait_for(use(parent, joined), 10)
        finally:
            await asyncio.gather(*(driver.close() for driver in joined))
            await parent.close()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def test_each_client_gets_its_own_tokens() -> None:
    async def use(parent: ProcessDriver, joined: list[AttachedDriver]) -> None:
        assert joined[0].info == joined[1].info == parent.info
        sent = [
            (driver, number, send(driver, [10 * number], 20, logprobs=number % 2, ignore_eos=True))
            for number in range(12)
            for driver in (parent, *joined)
        ]
        await asyncio.gather(*(sink.ended.wait() for _, _, (_, sink) in sent))
        ids = [request_id for _, _, (request_id, _) in sent]
        assert len(set(ids)) == len(ids)
        for driver, number, (request_id, sink) in sent:
            assert owner(request_id) == [parent, *joined].index(driver)
            assert sink.tokens == [10 * number + 1 + step for step in range(20)]
            assert len(sink.terminals) == 1
            entries = [entry for delta in sink.deltas for entry in delta.logprobs or ()]
            assert len(entries) == 20
            assert all(entry is not None for entry in entries)

    run(use)


def test_an_abort_touches_nobody_else() -> None:
    async def use(parent: ProcessDriver, joined: list[AttachedDriver]) -> None:
        (mine, gone), (theirs, stays) = (send(driver, [10], 4000, ignore_eos=True) for driver in joined)
        await until(lambda: bool(gone.tokens and stays.tokens))
        # Even an id that is not ours, sent past all checks of our own side, ends nothing.
        joined[0]._sinks[theirs] = lambda delta: None
        joined[0].abort(theirs)
        joined[0].abort(mine)
        await gone.ended.wait()
        seen = len(stays.tokens)
        await until(lambda: len(stays.tokens) > seen + 20)
        assert not stays.terminals
        joined[1].abort(theirs)
        await stays.ended.wait()

    run(use, step_delay_s=0.002)


def test_a_request_under_another_clients_id_fails_and_costs_nobody() -> None:
    async def use(parent: ProcessDriver, joined: list[AttachedDriver]) -> None:
        _, good = send(joined[1], [10], 50)
        foreign = Request(
            id=joined[1].new_id(), prompt_token_ids=[1], sampling=SamplingParams(), max_tokens=1, arrival=0.0
        )
        sink = Collector()
        joined[0]._sinks[foreign.id] = sink
        joined[0]._send(Submit(foreign))
        await sink.ended.wait()
        assert isinstance(sink.terminals[0], Failed)
        await good.ended.wait()
        assert len(good.tokens) == 50

    run(use, step_delay_s=0.001)


def test_a_client_that_died_leaves_no_request_behind() -> None:
    async def use(parent: ProcessDriver, joined: list[AttachedDriver]) -> None:
        dead, other = joined
        for _ in range(3):
            send(dead, [10], 4000, ignore_eos=True)
        _, stays = send(other, [10], 4000, ignore_eos=True)
        await until(lambda: other.stats().running == 4)
        assert dead._link is not None
        dead._link.close()  # as the kernel does
        parent.forget(1)
        await until(lambda: other.stats().running == 1)
        seen = len(stays.tokens)
        await until(lambda: len(stays.tokens) > seen + 20)
        assert other.stats().kv_used_tokens <= 1 + len(stays.tokens) + 2

    run(use, step_delay_s=0.002)


def test_what_a_dead_client_had_sent_is_not_run() -> None:
    async def use(parent: ProcessDriver, joined: list[AttachedDriver]) -> None:
        parent.forget(1)
        await parent.control(ResetPrefixCache())  # now the engine knows
        _, sink = send(joined[0], [10], 3)
        _, other = send(joined[1], [10], 30)
        await other.ended.wait()
        await until(lambda: joined[1].stats().running == 0)
        assert not sink.deltas
        assert joined[1].stats().generation_tokens == len(other.tokens) == 30

    run(use)


def test_all_clients_know_the_engines_state_and_that_it_hangs() -> None:
    async def use(parent: ProcessDriver, joined: list[AttachedDriver]) -> None:
        busy, idle = joined
        assert idle.stats() == EngineStats()
        send(busy, [10], 4000, ignore_eos=True)
        await until(lambda: idle.stats().running == 1)
        assert idle.health().ok
        await until(lambda: not idle.health().ok)
        assert idle.health().detail.startswith("the engine hangs: 1 requests")
        send(idle, [10])  # one more request does not make it look alive
        assert not idle.health().ok

    run(use, step_delay_s=0.01, hang_at_step=40, hang_timeout_s=0.4)


def test_an_engine_that_hangs_in_its_first_step_looks_so_to_those_who_sent_nothing() -> None:
    async def use(parent: ProcessDriver, joined: list[AttachedDriver]) -> None:
        send(joined[0], [10])
        await until(lambda: not joined[1].health().ok)
        await until(lambda: not parent.health().ok)

    run(use, hang_at_step=1, hang_timeout_s=0.1)


def test_an_idle_engine_is_known_to_be_idle() -> None:
    async def use(parent: ProcessDriver, joined: list[AttachedDriver]) -> None:
        _, sink = send(joined[0], [10], 30)
        await sink.ended.wait()
        await until(lambda: joined[1].stats().generation_tokens == 30)
        await asyncio.sleep(0.1)
        assert joined[1].health().ok
        assert parent.health().ok
        assert joined[1].stats().running == 0

    run(use, hang_timeout_s=0.05)


def test_an_engine_that_dies_ends_what_each_client_has_open() -> None:
    async def use(parent: ProcessDriver, joined: list[AttachedDriver]) -> None:
        sinks = [send(driver, [10], 4000, ignore_eos=True)[1] for driver in joined]
        await until(lambda: all(sink.tokens for sink in sinks))
        os.kill(parent.pid, signal.SIGKILL)
        reason = await parent.died()
        for driver in joined:
            driver.lose(reason)  # whoever watches the engine tells them
        assert [sink.terminals[0].message for sink in sinks] == [
            "the engine process was killed by SIGKILL"
        ] * 2  # type: ignore[attr-defined]

    run(use, step_delay_s=0.002)


def test_a_step_that_raises_is_told_to_all() -> None:
    async def use(parent: ProcessDriver, joined: list[AttachedDriver]) -> None:
        _, sink = send(joined[0], [10], 4000, ignore_eos=True)
        assert "step failed" in await joined[1].died()
        await sink.ended.wait()
        assert isinstance(sink.terminals[0], Failed)

    run(use, fail_at_step=3)
