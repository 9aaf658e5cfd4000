"""Adapters over HTTP: they are loaded and forgotten, requests name them, and all of an engine's clients know them."""

import asyncio
import contextlib
import os
import signal
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from openinfer.frontend.contract import Command, EngineSpec, Finished, LoadAdapter, Rejected, UnloadAdapter
from openinfer.frontend.errors import FlagError, Unsupported
from openinfer.frontend.http import create_app
from openinfer.frontend.process_driver import ProcessDriver
from openinfer.frontend.replicas import ReplicatedClient
from openinfer.frontend.restart import RestartingClient
from openinfer.frontend.testing import FakeEngine
from openinfer.frontend.thread_driver import ThreadDriver


@pytest.fixture
def live(start: Any) -> Any:
    return start(engine={"max_adapters": 2}, app={"model_names": ["base", "other"]})


def load(live: Any, name: str, path: str = "/adapters/x", **more: Any) -> Any:
    return live.post("/v1/load_lora_adapter", lora_name=name, lora_path=path, **more)


def ask(live: Any, model: str) -> Any:
    return live.post("/v1/completions", model=model, prompt=[5], max_tokens=2)


def test_an_adapter_is_a_model_while_it_is_loaded(live: Any) -> None:
    assert ask(live, "sql").status_code == 404
    answer = load(live, "sql")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    models = {one["id"]: one for one in live.http.get("/v1/models").json()["data"]}
    assert list(models) == ["base", "other", "sql"]
    assert (models["sql"]["parent"], models["sql"]["root"]) == ("base", "/adapters/x")
    assert (models["base"]["parent"], models["base"]["root"]) == (None, "fake")
    assert live.http.get("/v1/models/sql").json() == models["sql"]
    assert ask(live, "sql").json()["model"] == "sql"
    assert ask(live, "other").json()["model"] == "other"
    chat = [{"role": "user", "content": "x"}]
    assert live.post("/v1/chat/completions", model="sql", messages=chat, max_tokens=1).status_code == 200
    enum = live.http.get("/openapi.json").json()["components"]["schemas"]["ChatBody"]["properties"]["model"]
    assert "sql" in enum["enum"]
    answer = live.post("/v1/unload_lora_adapter", lora_name="sql")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert ask(live, "sql").status_code == 404


def test_what_is_refused(live: Any) -> None:
    answer = load(live, "sql", "/adapters/bad")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "adapter /adapters/bad: is bad, as asked"
    assert load(live, "base").json()["error"]["param"] == "lora_name"
    for name, path in (("", "/x"), ("x" * 257, "/x"), ("a", ""), ("a\nb", "/x"), (" ", "/x"), ("a\0", "/x")):
        answer = load(live, name, path)
        assert answer.status_code == 400
        assert "lora_name must have 1 to 256 characters, all printable" in answer.json()["error"]["message"]
    assert live.post("/v1/load_lora_adapter", lora_name="a").status_code == 400
    answer = live.post("/v1/unload_lora_adapter", lora_name="sql")
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "lora_name")
    assert [one["id"] for one in live.http.get("/v1/models").json()["data"]] == ["base", "other"]


def test_an_engine_without_adapters_says_so(start: Any) -> None:
    live = start()
    for answer in (load(live, "sql"), live.post("/v1/unload_lora_adapter", lora_name="sql")):
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "this engine has no adapters")
    assert "lora_requests_info" not in live.http.get("/metrics").text


def test_the_metric_has_the_adapters_as_labels(live: Any) -> None:
    load(live, "sql")
    (line,) = (
        one
        for one in live.http.get("/metrics").text.splitlines()
        if one.startswith("vllm:lora_requests_info{")
    )
    assert line.startswith(
        'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""} '
    )


def test_a_command_that_takes_long_holds_up_no_step_and_no_other_command(generate: Any) -> None:
    """The engine begins it and goes on; the answer comes when its future is done, though no request is live."""

    async def main() -> None:
        futures: list[Any] = []

        class Slow(FakeEngine):
            def control(self, command: Any) -> Any:
                if isinstance(command, LoadAdapter) and command.name == "slow":
                    futures.append(Future())
                    return futures[0]
                return super().control(command)

        driver = ThreadDriver(lambda: Slow(max_adapters=2))
        await driver.start()
        slow = asyncio.create_task(driver.control(LoadAdapter("slow", "/x")))
        await driver.control(LoadAdapter("quick", "/x"))
        assert isinstance((await generate(driver))[-1].terminal, Finished)
        assert not slow.done()
        futures[0].set_exception(RuntimeError("a bug"))
        with pytest.raises(Unsupported, match="the engine failed at it: "):
            await slow
        assert isinstance((await generate(driver, adapter="quick"))[-1].terminal, Finished)
        await driver.close()

    asyncio.run(main())


def test_a_restarted_engine_gets_its_adapters_back(generate: Any) -> None:
    async def main() -> None:
        spec = EngineSpec("openinfer.frontend.testing:FakeEngine", {"max_adapters": 2, "die_at_step": 3})
        client = RestartingClient(lambda: ProcessDriver(spec, close_timeout_s=0.5))
        await client.start()
        for name in ("one", "two", "three"):
            await client.control(LoadAdapter(name, "/x"))
        await client.control(UnloadAdapter("two"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(generate(client, 40, adapter="one"), 5)
        while not client.health().ok:
            await asyncio.sleep(0.02)
        assert [one.name for one in client.stats().adapters] == ["one", "three"]
        assert isinstance((await generate(client, 1, adapter="two"))[-1].terminal, Rejected)
        await client.close()

    asyncio.run(main())


def test_an_adapter_that_cannot_be_restored_is_lost_alone(generate: Any, caplog: Any) -> None:
    """So is one of the flags that was unloaded."""

    class Forgetful(ProcessDriver):
        async def control(self, command: Any) -> Any:
            if isinstance(command, LoadAdapter) and command.name == "one":
                raise Unsupported("there is no folder any more")
            return await super().control(command)

    async def main() -> None:
        spec = EngineSpec(
            "openinfer.frontend.testing:FakeEngine",
            {"max_adapters": 2, "die_at_step": 3, "adapters": ["flag", "stays"]},
        )
        kinds = iter([ProcessDriver, Forgetful])
        client = RestartingClient(lambda: next(kinds)(spec, close_timeout_s=0.5))
        await client.start()
        for name in ("one", "two"):
            await client.control(LoadAdapter(name, "/x"))
        await client.control(UnloadAdapter("flag"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(generate(client, 40, adapter="one"), 5)
        while not client.health().ok:
            await asyncio.sleep(0.02)
        assert [one.name for one in client.stats().adapters] == ["stays", "two"]
        await client.close()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert "the adapter 'one' is lost: there is no folder any more" in caplog.text


def test_an_engine_that_dies_of_an_adapter_comes_back_without_it(caplog: Any) -> None:
    """It had not got the others back yet; they are not lost."""

    class Deadly(ProcessDriver):
        async def control(self, command: Any) -> Any:
            if isinstance(command, LoadAdapter) and command.name == "one":
                os.kill(self.pid, signal.SIGKILL)
            return await super().control(command)

    async def main() -> None:
        spec = EngineSpec("openinfer.frontend.testing:FakeEngine", {"max_adapters": 2, "adapters": ["flag"]})
        drivers = [kind(spec, close_timeout_s=0.5) for kind in (ProcessDriver, Deadly, Deadly)]
        client = RestartingClient(iter(drivers).__next__)
        await client.start()
        for name in ("zero", "one", "two"):
            await client.control(LoadAdapter(name, "/x"))
        os.kill(drivers[0].pid, signal.SIGKILL)
        while client.health().ok:
            await asyncio.sleep(0.001)
        while not client.health().ok:
            await asyncio.sleep(0.02)
        assert [one.name for one in client.stats().adapters] == ["flag", "zero", "two"]
        await client.close()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert "the adapter 'one' is lost: the engine process was killed by SIGKILL" in caplog.text


class Picky(FakeEngine):
    """Refuses a folder that the others take."""

    def control(self, command: Command) -> Future[None] | None:
        if isinstance(command, LoadAdapter) and command.path == "/picky":
            raise Unsupported("out of\nhost memory")
        return super().control(command)


def test_an_engine_that_refuses_alone_is_named_in_the_answer(start: Any) -> None:
    """Requests have the adapter as it was, before and after."""
    drivers = [ThreadDriver(partial(kind, max_adapters=2)) for kind in (FakeEngine, Picky)]
    live = start(driver=ReplicatedClient(drivers), app={"model_names": ["base"]})

    def load(path: str, **more: Any) -> Any:
        return live.post("/v1/load_lora_adapter", lora_name="sql", lora_path=path, **more)

    def ask() -> set[int]:
        return {
            live.post("/v1/completions", model="sql", prompt=[n], max_tokens=1).status_code for n in range(9)
        }

    answer = load("/picky")
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "replica 1: out of host memory")
    assert ask() == {404}
    assert load("/a").status_code == 200
    assert load("/picky", load_inplace=True).json()["error"]["message"] == "replica 1: out of host memory"
    assert [[one.path for one in driver.stats().adapters] for driver in drivers] == [["/a"], ["/a"]]
    assert ask() == {200}
    assert load("/bad").json()["error"]["message"] == "replica 0, replica 1: adapter /bad: is bad, as asked"
    assert live.post("/v1/unload_lora_adapter", lora_name="sql").status_code == 200
    assert [driver.stats().adapters for driver in drivers] == [[], []]


def test_an_adapter_with_a_name_of_the_model_is_refused() -> None:
    """Requests could not tell them apart."""
    client = ThreadDriver(lambda: FakeEngine(max_adapters=2, adapters=["base"]))

    async def main() -> None:
        await client.start()
        try:
            with pytest.raises(FlagError, match="'base' is a name of the model and of an adapter"):
                await create_app(client, model_names=["other", "base"]).state.service.prepare()
        finally:
            await client.close()

    asyncio.run(main())
