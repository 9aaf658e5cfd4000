"""--restart-engine: the server stays up while its engine dies, hangs and comes back."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from openinfer.frontend import EngineDeadError, EngineSpec, Finished, Request
from openinfer.frontend import restart as restart_module
from openinfer.frontend.contract import Command, LoadAdapter, Sleep, UnloadAdapter, WakeUp
from openinfer.frontend.errors import Unsupported
from openinfer.frontend.process_driver import AttachedDriver, ProcessDriver
from openinfer.frontend.restart import RestartingClient
from openinfer.sampler import SamplingParams


def run(use: Callable[[RestartingClient, list[ProcessDriver]], Awaitable[None]], **engine: Any) -> None:
    drivers: list[ProcessDriver] = []

    def make() -> ProcessDriver:
        spec = EngineSpec("openinfer.frontend.testing:FakeEngine", {"step_delay_s": 0.002, **engine})
        drivers.append(ProcessDriver(spec, hang_timeout_s=0.5, close_timeout_s=0.2))
        return drivers[-1]

    async def main() -> None:
        client = RestartingClient(make)
        assert not client.health().ok
        await client.start()
        try:
            await use(client, drivers)
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(main(), 30))


async def up(client: RestartingClient) -> None:
    while not client.health().ok:
        await asyncio.sleep(0.02)


def test_a_killed_engine_comes_back(generate: Any) -> None:
    async def use(client: RestartingClient, drivers: list[ProcessDriver]) -> None:
        long = asyncio.create_task(generate(client, 4000))
        while client.stats().running == 0:
            await asyncio.sleep(0.01)
        os.kill(drivers[0].pid, signal.SIGKILL)
        assert "SIGKILL" in getattr((await long)[-1].terminal, "message", "")
        while "restarting" not in client.health().detail:
            await asyncio.sleep(0.001)
        assert not client.health().ok
        with pytest.raises(EngineDeadError, match="restarting"):
            await generate(client, 1)
        await up(client)
        assert isinstance((await generate(client, 3))[-1].terminal, Finished)
        assert len(drivers) == 2
        assert client.info.model == "fake"

    run(use)


def test_an_engine_that_slept_sleeps_again() -> None:
    async def use(client: RestartingClient, drivers: list[ProcessDriver]) -> None:
        for command, asleep in ((Sleep(), True), (WakeUp(), False)):
            await client.control(command)
            os.kill(drivers[-1].pid, signal.SIGKILL)
            while client.health().ok:
                await asyncio.sleep(0.001)
            await up(client)
            assert client.stats().asleep == asleep

    run(use)


async def kill(client: RestartingClient, driver: ProcessDriver) -> None:
    """The engine dies, and another comes."""
    os.kill(driver.pid, signal.SIGKILL)
    while client.health().ok:
        await asyncio.sleep(0.001)
    await up(client)


@pytest.mark.attack
def test_the_next_engine_gets_the_state_of_the_last_one_whoever_changed_it() -> None:
    """Other processes send commands too: what this one sent does not say how the engine stands."""

    async def use(client: RestartingClient, drivers: list[ProcessDriver]) -> None:
        async def address() -> str:
            return drivers[-1].address

        other = AttachedDriver(address, 1)
        await other.start()
        for sender, command in (
            (client, LoadAdapter("mine", "/old")),
            (other, LoadAdapter("mine", "/new", in_place=True)),
            (other, LoadAdapter("flag", "/other", in_place=True)),
            (client, LoadAdapter("short", "/x")),
            (other, UnloadAdapter("short")),
            (other, UnloadAdapter("gone")),
            (client, Sleep()),
            (other, WakeUp()),
        ):
            await sender.control(command)
        await kill(client, drivers[-1])
        await other.close()
        stats = client.stats()
        assert {one.name: one.path for one in stats.adapters} == {"flag": "/other", "mine": "/new"}
        assert not stats.asleep
        other = AttachedDriver(address, 2)
        await other.start()
        await other.control(Sleep(2))
        await kill(client, drivers[-1])
        assert (client.stats().asleep, client.stats().weights_dropped) == (True, True)
        await other.close()

    run(use, max_adapters=4, adapters=["flag", "gone"])


@pytest.mark.attack
def test_a_replaced_adapter_that_cannot_come_back_leaves_no_other_in_its_place() -> None:
    """Answers of the adapter that the flag named would be wrong."""

    async def use(client: RestartingClient, drivers: list[ProcessDriver]) -> None:
        await client.control(LoadAdapter("flag", "/new", in_place=True))

        async def refuse(command: Command) -> None:
            if isinstance(command, LoadAdapter):
                raise Unsupported("the folder is gone")
            await ProcessDriver.control(drivers[-1], command)

        make = client._make_driver

        def refusing() -> ProcessDriver:
            driver = cast(ProcessDriver, make())
            driver.control = refuse  # type: ignore[method-assign, assignment]
            return driver

        client._make_driver = refusing
        await kill(client, drivers[-1])
        assert client.stats().adapters == []

    run(use, max_adapters=4, adapters=["flag"])


def test_a_hung_engine_is_ended_and_comes_back(generate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_module, "CHECK_S", 0.05)

    async def use(client: RestartingClient, drivers: list[ProcessDriver]) -> None:
        terminal = (await generate(client, 50))[-1].terminal
        assert "hangs" in getattr(terminal, "message", "")
        await up(client)
        assert isinstance((await generate(client, 3))[-1].terminal, Finished)
        assert len(drivers) == 2

    run(use, hang_at_step=10)


def test_an_engine_that_dies_again_and_again_is_given_up(
    generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_module, "CHECK_S", 0.05)

    async def use(client: RestartingClient, drivers: list[ProcessDriver]) -> None:
        died = asyncio.create_task(client.died())
        while not died.done():
            if client.health().ok:
                await generate(client, 5)
            await asyncio.sleep(0.02)
        assert "restarted 3 times already" in await died
        assert len(drivers) == 4

    run(use, die_at_step=2)


class Odd(Exception):
    """Nothing that anybody foresaw, such as zmq.ZMQError, which is no OSError."""


@pytest.mark.parametrize("fails", ["make_driver", "start"])
def test_a_restart_that_fails_in_an_unforeseen_way_is_final(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def odd(*_: object) -> None:
        raise Odd("not foreseen")

    async def use(client: RestartingClient, drivers: list[ProcessDriver]) -> None:
        if fails == "make_driver":
            monkeypatch.setattr(client, "_make_driver", odd)
        else:
            monkeypatch.setattr(ProcessDriver, "_launch", odd)
        os.kill(drivers[0].pid, signal.SIGKILL)
        why = await asyncio.wait_for(client.died(), 25)
        assert "cannot be restarted: not foreseen" in why
        assert client.health() == (False, why)
        with pytest.raises(EngineDeadError, match="not foreseen"):
            client.submit(
                Request(id=9, prompt_token_ids=[1], sampling=SamplingParams(), max_tokens=1, arrival=0.0),
                print,
            )
        monkeypatch.undo()

    run(use)
