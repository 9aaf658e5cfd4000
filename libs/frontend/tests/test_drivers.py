"""Both drivers, the same promises: columns come out as deltas, and exactly one terminal whatever happens."""

import asyncio
import os
import signal
import stat
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import zmq

from openinfer.frontend import EngineSpec
from openinfer.frontend import link as link_module
from openinfer.frontend.client import Driver, OutputDelta
from openinfer.frontend.contract import (
    Engine,
    Failed,
    Finished,
    Rejected,
    Request,
    ResetPrefixCache,
    StepOutputs,
)
from openinfer.frontend.errors import EngineDeadError, EngineStartError
from openinfer.frontend.link import EngineLink
from openinfer.frontend.process_driver import ProcessDriver
from openinfer.frontend.testing import FakeEngine
from openinfer.frontend.thread_driver import ThreadDriver
from openinfer.frontend.web import run_loop
from openinfer.frontend.wire import ControlDone, FromEngine
from openinfer.sampler import SamplingParams

KINDS = ["thread", "process"]


def make(
    kind: str, hang_timeout_s: float | None = 60.0, close_timeout_s: float = 5.0, **kwargs: object
) -> Driver:
    spec = EngineSpec("openinfer.frontend.testing:FakeEngine", kwargs)
    if kind == "thread":
        return ThreadDriver(
            spec.build, hang_timeout_s=hang_timeout_s, close_timeout_s=min(close_timeout_s, 0.2)
        )
    return ProcessDriver(spec, hang_timeout_s=hang_timeout_s, close_timeout_s=close_timeout_s)


def run(driver: Driver, use: Callable[[Driver], Awaitable[None]]) -> None:
    async def main() -> None:
        await driver.start()
        try:
            await asyncio.wait_for(use(driver), 10)
        finally:
            await driver.close()

    asyncio.run(main())


class Collector:
    """A sink that remembers everything and can be awaited for the terminal."""

    def __init__(self) -> None:
        self.deltas: list[OutputDelta] = []
        self.ended = asyncio.Event()

    def __call__(self, delta: OutputDelta) -> None:
        self.deltas.append(delta)
        if delta.terminal is not None:
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def terminals(self) -> list[object]:
        return [delta.terminal for delta in self.deltas if delta.terminal is not None]


def send(driver: Driver, prompt: list[int], max_tokens: int = 5, **sampling: object) -> tuple[int, Collector]:
    request = Request(
        id=driver.new_id(),
        prompt_token_ids=prompt,
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        max_tokens=max_tokens,
        arrival=time.monotonic(),
    )
    sink = Collector()
    driver.submit(request, sink)
    return request.id, sink


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_logprobs_and_one_terminal(kind: str) -> None:
    async def use(driver: Driver) -> None:
        assert driver.info.model == "fake"
        assert driver.health().ok
        first_id, first = send(driver, [10], 3)
        second_id, second = send(driver, [50], 2, logprobs=2)
        await asyncio.gather(first.ended.wait(), second.ended.wait())
        assert first.tokens == [11, 12, 13]
        assert first.terminals == [Finished(first_id, "length")]
        assert second.tokens == [51, 52]
        assert second.terminals == [Finished(second_id, "length")]
        logprobs = [entry for delta in second.deltas for entry in delta.logprobs or []]
        assert [entry.top_token_ids for entry in logprobs if entry] == [[51, 52], [52, 53]]
        assert first.deltas[0].scheduled is not None
        assert driver.stats().generation_tokens == 5
        assert driver.stats().running == 0

    run(make(kind), use)


def test_what_cannot_be_sent_leaves_no_sink_and_no_control(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(driver: Driver) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(driver, "_send", lambda message: msgspec.msgpack.encode(2**64))
            with pytest.raises(OverflowError):
                send(driver, [10])
            with pytest.raises(OverflowError):
                await driver.control(ResetPrefixCache())
        assert not driver._sinks
        assert not driver._controls
        await asyncio.sleep(0.05)
        assert driver.health().ok

    run(make("process", hang_timeout_s=0.01), use)


@pytest.mark.parametrize("kind", KINDS)
def test_abort_of_running_waiting_and_ended(kind: str) -> None:
    async def use(driver: Driver) -> None:
        running_id, running = send(driver, [10], 4000, ignore_eos=True)
        waiting_id, waiting = send(driver, [10], 4000)
        while not running.deltas:
            await asyncio.sleep(0.001)
        driver.abort(waiting_id)
        driver.abort(running_id)
        await asyncio.gather(running.ended.wait(), waiting.ended.wait())
        driver.abort(running_id)
        assert running.terminals == [Finished(running_id, "abort")]
        assert waiting.terminals == [Finished(waiting_id, "abort")]
        assert waiting.tokens == []
        assert driver.stats().kv_used_tokens == 0

    run(make(kind, max_running=1, step_delay_s=0.002), use)


@pytest.mark.parametrize("kind", KINDS)
def test_rejections_and_single_failures_leave_the_others_alone(kind: str) -> None:
    async def use(driver: Driver) -> None:
        _, too_long = send(driver, [1], 5000)
        _, failing = send(driver, [77])
        _, good = send(driver, [10])
        await asyncio.gather(too_long.ended.wait(), failing.ended.wait(), good.ended.wait())
        assert isinstance(too_long.terminals[0], Rejected)
        assert too_long.terminals[0].code == "too_long"
        assert isinstance(failing.terminals[0], Failed)
        assert good.tokens == [11, 12, 13, 14, 15]

    run(make(kind, fail_prompt=77), use)


@pytest.mark.parametrize("kind", KINDS)
def test_control_reaches_the_engine_even_when_idle(kind: str) -> None:
    async def use(driver: Driver) -> None:
        cached = []
        for _ in range(3):
            _, sink = send(driver, list(range(100, 140)), 1)
            await sink.ended.wait()
            assert sink.deltas[0].scheduled is not None
            cached.append(sink.deltas[0].scheduled.cached_tokens)
            if len(cached) == 2:
                await driver.control(ResetPrefixCache())
        assert cached == [0, 32, 0]

    run(make(kind), use)


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_raises_fails_every_request_once(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    async def use(driver: Driver) -> None:
        sinks = [send(driver, [10], 4000, ignore_eos=True) for _ in range(3)]
        assert "step failed, as asked" in await driver.died()
        await asyncio.sleep(0)
        for request_id, sink in sinks:
            assert sink.terminals == [Failed(request_id, "the engine failed: step failed, as asked")]
        assert driver.health() == (False, "the engine failed: step failed, as asked")
        with pytest.raises(EngineDeadError, match="step failed"):
            send(driver, [1])
        with pytest.raises(EngineDeadError, match="step failed"):
            await driver.control(ResetPrefixCache())

    run(make(kind, fail_at_step=5), use)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hung_engine_is_not_healthy_and_close_does_not_wait_for_it(kind: str) -> None:
    async def use(driver: Driver) -> None:
        _, sink = send(driver, [10], 4000, ignore_eos=True)
        while driver.health().ok:
            await asyncio.sleep(0.01)
        assert "the engine hangs: 1 requests but no step" in driver.health().detail
        assert not sink.terminals
        await asyncio.wait_for(driver.close(), 30)
        assert [type(terminal) for terminal in sink.terminals] == [Failed]

    run(make(kind, hang_timeout_s=0.1, close_timeout_s=0.1, hang_at_step=3), use)


def test_an_engine_says_itself_when_it_hangs_unless_the_server_is_told() -> None:
    async def use(driver: Driver) -> None:
        send(driver, [10], 4000, ignore_eos=True)
        await asyncio.sleep(0.3)
        assert driver.health().ok == (driver._hang_timeout_s == 60)

    for told in (None, 60):
        engine = FakeEngine(hang_timeout_s=0.1, hang_at_step=3)
        run(ThreadDriver(lambda engine=engine: engine, hang_timeout_s=told, close_timeout_s=0.1), use)


def test_the_reason_of_a_failed_start_may_come_after_the_end_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drain, rest, looks = EngineLink._drain, EngineLink.read_rest, list[EngineLink]()

    async def read_rest(link: EngineLink) -> None:
        looks.append(link)
        await rest(link)

    monkeypatch.setattr(EngineLink, "_drain", lambda link: drain(link) if looks else None)
    monkeypatch.setattr(EngineLink, "read_rest", read_rest)
    with pytest.raises(EngineStartError, match=r"^no such checkpoint: /x$"):
        run(make("process", start_error="no such checkpoint: /x"), lambda driver: asyncio.sleep(0))


def test_all_that_an_engine_has_sent_is_read_after_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ's thread may be behind, and a state that its keeper misses is not restored."""
    monkeypatch.setattr(link_module, "LAST_WORDS_S", 30.0)
    address, read = f"ipc://{tmp_path}/engine", list[FromEngine]()
    last = [ControlDone(serial, None) for serial in range(1000)]

    def speak_late(router: zmq.Socket[bytes], identity: bytes) -> None:
        time.sleep(0.05)
        for message in last:
            router.send_multipart([identity, msgspec.msgpack.encode(message)])
        router.close()

    async def main() -> None:
        with zmq.Context() as context:
            router = context.socket(zmq.ROUTER)
            router.bind(address)
            link = EngineLink(address, 0, read.extend, pytest.fail)
            identity, _ = router.recv_multipart()
            engine = threading.Thread(target=speak_late, args=(router, identity))
            engine.start()
            await link.read_rest()
            link.close()
            engine.join()

    asyncio.run(main())
    assert read == last


@pytest.mark.parametrize("kind", KINDS)
def test_start_error_is_one_line(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EngineStartError, match=r"^no such checkpoint: /x$"):
        run(make(kind, start_error="no such\ncheckpoint: /x"), lambda driver: asyncio.sleep(0))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_an_idle_engine_uses_no_processor(kind: str) -> None:
    async def use(driver: Driver) -> None:
        _, sink = send(driver, [10])
        await sink.ended.wait()
        pid = driver.pid if isinstance(driver, ProcessDriver) else os.getpid()
        await asyncio.sleep(0.1)  # the kernel accounts the start late
        before = _processor_s(pid)
        await asyncio.sleep(0.2)
        assert _processor_s(pid) - before <= 0.04

    run(make(kind), use)


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_kill_9_fails_open_requests_with_the_signal() -> None:
    async def use(driver: Driver) -> None:
        assert isinstance(driver, ProcessDriver)
        request_id, sink = send(driver, [10], 4000, ignore_eos=True)
        while not sink.deltas:
            await asyncio.sleep(0.001)
        os.kill(driver.pid, signal.SIGKILL)
        await sink.ended.wait()
        assert sink.terminals == [Failed(request_id, "the engine process was killed by SIGKILL")]
        assert not driver.health().ok

    run(make("process", step_delay_s=0.002), use)


def test_a_child_that_dies_while_starting_says_so(tmp_path: Path) -> None:
    driver = ProcessDriver(EngineSpec("os:_exit", {"status": 7}))
    with pytest.raises(EngineStartError, match="ended with exit code 7"):
        run(driver, lambda driver: asyncio.sleep(0))


def test_the_socket_lies_where_only_this_user_can_enter() -> None:
    async def use(driver: Driver) -> None:
        assert isinstance(driver, ProcessDriver)
        directory = Path(driver._directory or "")
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        await driver.close()
        assert not directory.exists()

    run(make("process"), use)


def test_the_child_ends_with_its_parent() -> None:
    async def use(driver: Driver) -> None:
        assert isinstance(driver, ProcessDriver)
        assert driver._process is not None
        assert driver._process.stdin is not None
        driver._process.stdin.close()  # what the kernel does when the parent dies
        assert await driver.died() == "the engine process ended with exit code 2"

    run(make("process"), use)


def test_signals_meant_for_the_parent_do_not_end_the_child() -> None:
    async def use(driver: Driver) -> None:
        assert isinstance(driver, ProcessDriver)
        os.kill(driver.pid, signal.SIGTERM)
        os.kill(driver.pid, signal.SIGINT)
        _, sink = send(driver, [10])
        await sink.ended.wait()
        assert len(sink.tokens) == 5

    run(make("process"), use)


def test_a_sink_that_raises_costs_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    async def use(driver: Driver) -> None:
        def broken(delta: OutputDelta) -> None:
            raise RuntimeError("sink bug")

        request = Request(
            id=driver.new_id(), prompt_token_ids=[5], sampling=SamplingParams(), max_tokens=2, arrival=0.0
        )
        driver.submit(request, broken)
        _, good = send(driver, [10])
        await good.ended.wait()
        assert len(good.tokens) == 5

    run(make("thread"), use)
    assert "sink bug" in caplog.text


def test_the_engine_is_built_and_driven_in_one_thread() -> None:
    seen = set()

    async def use(driver: Driver) -> None:
        _, sink = send(driver, [10])
        await sink.ended.wait()

    spec = EngineSpec("openinfer.frontend.testing:FakeEngine", {})

    def factory():  # type: ignore[no-untyped-def]
        engine = spec.build()
        seen.add(threading.get_ident())
        step = engine.step

        def spy(wait: float):  # type: ignore[no-untyped-def]
            seen.add(threading.get_ident())
            return step(wait)

        engine.step = spy  # type: ignore[method-assign]
        return engine

    run(ThreadDriver(factory), use)
    assert len(seen) == 1
    assert threading.get_ident() not in seen


class _Lawless(FakeEngine):
    """Breaks the contract in its outputs."""

    def step(self, wait: float) -> StepOutputs:
        return StepOutputs([1, 2], [3])


def lawless() -> Engine:
    return _Lawless()


def test_outputs_that_break_the_contract_end_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    async def use(driver: Driver) -> None:
        _, sink = send(driver, [10])
        assert "breaks its contract" in await driver.died()
        assert [type(terminal) for terminal in sink.terminals] == [Failed]

    run(ThreadDriver(lawless), use)


class _Silent(FakeEngine):
    """Its step() returns nothing."""

    def step(self, wait: float) -> StepOutputs:
        return None  # type: ignore[return-value]


def test_an_engine_whose_step_returns_something_else_is_told_so() -> None:
    async def use(driver: Driver) -> None:
        send(driver, [10])
        assert "_Silent.step() returned NoneType; it must return StepOutputs" in await driver.died()

    run(ThreadDriver(_Silent), use)


def test_frames_that_cannot_be_read_end_the_engine() -> None:
    async def use(driver: Driver) -> None:
        assert isinstance(driver, ProcessDriver)
        _, sink = send(driver, [10])
        assert driver._link is not None
        driver._link._decode = msgspec.msgpack.Decoder(int).decode  # type: ignore[assignment]
        assert "breaks its contract" in await driver.died()
        assert [type(terminal) for terminal in sink.terminals] == [Failed]

    run(make("process"), use)


def test_a_request_sent_to_a_child_that_has_just_died_fails() -> None:
    async def use(driver: Driver) -> None:
        assert isinstance(driver, ProcessDriver)
        os.kill(driver.pid, signal.SIGKILL)
        time.sleep(0.05)  # it is dead, and the event loop has had no turn to notice
        request_id, sink = send(driver, [10])
        driver.abort(request_id)
        await sink.ended.wait()
        assert sink.terminals == [Failed(request_id, "the engine process was killed by SIGKILL")]

    run(make("process"), use)


def test_closing_right_after_the_child_was_killed_does_not_raise() -> None:
    async def use(driver: Driver) -> None:
        assert isinstance(driver, ProcessDriver)
        _, sink = send(driver, [10], 4000, ignore_eos=True)
        os.kill(driver.pid, signal.SIGKILL)
        await driver.close()
        assert len(sink.terminals) == 1
        await driver.close()

    run(make("process", step_delay_s=0.001), use)


@pytest.mark.parametrize("steps", range(8))
def test_a_start_that_is_cancelled_leaves_no_process(steps: int, caplog: pytest.LogCaptureFixture) -> None:
    """Also where the process was just being made, on uvloop too."""

    async def main() -> int:
        driver = make("process")
        assert isinstance(driver, ProcessDriver)
        starting = asyncio.create_task(driver.start())
        for _ in range(steps):
            await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert driver._process is None or driver._process.returncode is not None
        return int(driver._process is not None)

    assert run_loop(main()) == (steps > 0)
    assert not caplog.records
