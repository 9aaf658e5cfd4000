"""`--frontends N`, as processes: one port, one engine, totals from anyone, and what happens when one of them dies."""

import argparse
import asyncio
import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from openinfer.frontend import EngineSpec
from openinfer.frontend.frontends import Frontends
from openinfer.frontend.process_driver import ProcessDriver
from openinfer.frontend.restart import RestartingClient
from openinfer.frontend.serve import _web_options, build_parser

ENDLESS = {"prompt": [5], "max_tokens": 4000, "ignore_eos": True, "stream": True}


def until(condition: Callable[[], Any], timeout_s: float = 15.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(httpx.TransportError):
            if found := condition():
                return found
        assert time.monotonic() < deadline
        time.sleep(0.01)


def frontends(server: Any) -> list[int]:
    return server.children("frontend_process")


def engine(server: Any) -> int:
    (pid,) = server.children("engine_process")
    return pid


def sockets(pid: int) -> int:
    """Open sockets of a process."""
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(path))
    return sum(link.startswith("socket:") for link in links)


def connect_to_each(server: Any, stack: contextlib.ExitStack) -> dict[int, httpx.Client]:
    """A kept connection to every HTTP process: the kernel deals them out, so connect until all have one."""
    found: dict[int, httpx.Client] = {}
    for _ in range(200):
        before = {pid: sockets(pid) for pid in frontends(server)}
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=10))
        client.get("/version")
        grown = [pid for pid, count in before.items() if sockets(pid) > count]
        pid = grown[0] if len(grown) == 1 else 0  # one that has just started opens others
        if pid in found or not pid:
            client.close()
            time.sleep(0.01)
        else:
            found[pid] = client
        if len(found) == len(before):
            return found
    raise AssertionError(f"connections only to {list(found)}")


Connect = Callable[..., dict[int, httpx.Client]]
Launch = Callable[..., Any]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """connect(server): pid -> client, for each of its HTTP processes."""
    with contextlib.ExitStack() as stack:
        yield lambda server: connect_to_each(server, stack)


class Stream:
    """An endless completion, read in a thread."""

    def __init__(self, client: httpx.Client) -> None:
        self.lines: list[str] = []
        self.broken: Exception | None = None
        self._client = client
        self._leave = False
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        until(lambda: len(self.lines) > 3)

    def _read(self) -> None:
        try:
            with self._client.stream("POST", "/v1/completions", json=ENDLESS) as response:
                for line in response.iter_lines():
                    if line:
                        self.lines.append(line.removeprefix("data: "))
                    if self._leave:
                        return
        except httpx.TransportError as error:
            self.broken = error

    def leave(self) -> None:
        self._leave = True
        self.end()

    def end(self) -> list[str]:
        self._thread.join(15)
        assert not self._thread.is_alive()
        return self.lines

    def goes_on(self) -> bool:
        seen = len(self.lines)
        until(lambda: len(self.lines) > seen + 5)
        return True


def total(text: str, name: str) -> float:
    """The sum of a metric over its labels."""
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}\{{.*\}} (\S+)$", text, re.M))


@pytest.fixture
def launch(launch: Launch) -> Launch:
    """Without tokenizers and processes that render chats, because no test here sends a text, unless a flag names a
    template."""
    return lambda *args: launch(*args, *[] if "--chat-template" in args else ["--skip-tokenizer-init"])


def test_every_process_serves_and_shows_the_totals(model_dir: Path, launch: Launch, connect: Connect) -> None:
    server = launch(model_dir, "--frontends", 3, "--log-requests", "--api-key", "open sesame")
    assert server.lines[-1].endswith("(3 HTTP processes)")
    assert sum("engine started" in line for line in server.lines) == 1
    clients = connect(server)
    for count, client in enumerate(clients.values(), start=1):
        client.headers["authorization"] = "Bearer open sesame"
        for _ in range(count):
            body = {"prompt": [5] * count, "max_tokens": 3, "ignore_eos": True, "return_token_ids": True}
            answer = client.post("/v1/completions", json=body)
            assert answer.json()["choices"][0]["token_ids"] == [6, 7, 8]
    for client in clients.values():
        text = until(
            lambda client=client: (
                (text := client.get("/metrics").text)
                and total(text, "vllm:generation_tokens_total") == 18
                and text
            )
        )
        assert total(text, "vllm:prompt_tokens_total") == 1 + 2 * 2 + 3 * 3
        assert total(text, "vllm:request_success_total") == 6
        assert total(text, "vllm:time_to_first_token_seconds_count") == 6
        assert total(text, "vllm:request_prompt_tokens_sum") == 14
        assert total(text, "vllm:num_requests_running") == 0
        client.close()
    server.process.send_signal(signal.SIGTERM)
    code, rest = server.end()
    assert code == 0
    assert rest.count("ok: 1 sequences") == 6
    assert "Traceback" not in rest


def test_one_that_is_killed_costs_its_own_streams_only(
    model_dir: Path, launch: Launch, connect: Connect
) -> None:
    server = launch(model_dir, "--frontends", 2, "--step-delay", "0.01")
    clients = connect(server)
    for client in clients.values():
        client.post("/v1/completions", json={"prompt": [5], "max_tokens": 2})
    (victim, cut), (survivor, other) = ((pid, Stream(client)) for pid, client in clients.items())
    probe = connect(server)[survivor]
    until(lambda: probe.get("/state").json()["running"] == 2)
    os.kill(victim, signal.SIGKILL)
    cut.end()
    assert isinstance(cut.broken, httpx.TransportError)
    # Its request is aborted, its blocks are free; the other's goes on, and is the only one.
    until(lambda: probe.get("/state").json()["running"] == 1)
    assert other.goes_on()
    state = probe.get("/state").json()
    assert state["kv_used_tokens"] <= 1 + len(other.lines) + 200
    # Another takes its place, and goes on counting where it stopped.
    until(lambda: len(frontends(server)) == 2 and victim not in frontends(server))
    again = connect(server)
    for client in again.values():
        assert client.get("/health").status_code == 200
        text = client.get("/metrics").text
        assert (
            total(text, 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}')
            == 0
        )
        assert total(text, "vllm:request_success_total") == 2
    other.leave()
    until(lambda: probe.get("/state").json()["running"] == 0)
    server.process.send_signal(signal.SIGTERM)
    code, rest = server.end()
    assert code == 0
    assert "was killed by SIGKILL; its connections are lost, starting another" in rest


def test_one_that_hangs_is_replaced_and_the_others_go_on(
    model_dir: Path, launch: Launch, connect: Connect
) -> None:
    server = launch(model_dir, "--frontends", 2, "--step-delay", "0.01", "--frontend-silent", "3")
    clients = connect(server)
    (victim, cut), (survivor, other) = ((pid, Stream(client)) for pid, client in clients.items())
    probe = connect(server)[survivor]
    os.kill(victim, signal.SIGSTOP)
    cut.end()  # it is killed, and its request aborted
    until(lambda: probe.get("/state").json()["running"] == 1)
    until(lambda: len(found := frontends(server)) == 2 and victim not in found)
    assert survivor in frontends(server)
    assert other.goes_on()
    other.leave()
    for client in connect(server).values():
        assert client.get("/health").status_code == 200
    server.process.send_signal(signal.SIGTERM)
    code, rest = server.end()
    assert code == 0
    assert rest.count("hangs: no sign of life for 3 s") == 1


def test_a_client_that_leaves_one_process_ends_nothing_of_another(
    model_dir: Path, launch: Launch, connect: Connect
) -> None:
    server = launch(model_dir, "--frontends", 2, "--step-delay", "0.01")
    clients = connect(server)
    gone, stays = (Stream(client) for client in clients.values())
    gone.leave()
    next(iter(clients.values())).close()
    with httpx.Client(base_url=server.url) as probe:
        until(lambda: probe.get("/state").json()["running"] == 1)
    assert stays.goes_on()
    stays.leave()


@pytest.mark.slow
def test_too_many_deaths_end_the_server(model_dir: Path, launch: Launch) -> None:
    server = launch(model_dir, "--frontends", 2)
    for _ in range(4):
        pids = until(lambda: len(found := frontends(server)) == 2 and found)
        until(lambda: httpx.get(f"{server.url}/health").status_code == 200)
        os.kill(pids[0], signal.SIGKILL)
        until(lambda dead=pids[0]: server.process.poll() is not None or dead not in frontends(server))
    code, rest = server.end()
    assert code == 1
    assert "and is not started again" in rest
    assert "Traceback" not in rest


def test_a_killed_engine_ends_all_streams_and_the_server(
    model_dir: Path, launch: Launch, connect: Connect
) -> None:
    server = launch(model_dir, "--frontends", 2, "--step-delay", "0.01")
    streams = [Stream(client) for client in connect(server).values()]
    os.kill(engine(server), signal.SIGKILL)
    for stream in streams:
        *_, error, done = stream.end()
        assert "killed by SIGKILL" in error
        assert done == "[DONE]"
    code, rest = server.end()
    assert code == 1
    assert "Traceback" not in rest


def test_with_restart_engine_all_go_on_with_the_new_one(
    model_dir: Path, launch: Launch, connect: Connect
) -> None:
    server = launch(model_dir, "--frontends", 2, "--step-delay", "0.01", "--restart-engine")
    before = frontends(server)
    clients = connect(server)
    streams = [Stream(client) for client in clients.values()]
    os.kill(engine(server), signal.SIGKILL)
    for stream in streams:
        *_, error, done = stream.end()
        assert "killed by SIGKILL" in error
        assert done == "[DONE]"
    for client in clients.values():
        until(lambda client=client: client.get("/health").status_code == 200)
        answer = client.post("/v1/completions", json={"prompt": [5], "max_tokens": 2})
        assert answer.json()["usage"]["completion_tokens"] == 2
    assert frontends(server) == before
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0


@pytest.mark.attack
def test_processes_that_saw_different_commands_restore_one_state(
    model_dir: Path, launch: Launch, connect: Connect
) -> None:
    """The engine's own. What one of them saw would put a woken engine to sleep, or unload an adapter twice."""
    engine_flags = '{"max_adapters": 3, "adapters": ["gone", "kept"]}'
    flags = ("--frontends", 3, "--restart-engine", "--engine", engine_flags)
    server = launch(model_dir, *flags)
    before = frontends(server)

    def names(client: httpx.Client) -> list[str]:
        return [one["id"] for one in client.get("/v1/models").json()["data"] if one.get("parent")]

    def served(client: httpx.Client) -> bool:
        answer = client.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})
        return answer.status_code == 200

    for turn in range(2):  # the second engine is as good as the first
        first, second, third = connect(server).values()
        load = {"lora_name": "new", "lora_path": "/old", "load_inplace": True}
        for client, path, body in (
            (first, "/v1/load_lora_adapter", load),
            (second, "/v1/load_lora_adapter", load | {"lora_path": "/new"}),
            (third, "/v1/unload_lora_adapter", {"lora_name": "gone"}),
            (first, "/sleep", {}),
            (second, "/wake_up", {}),
        ):
            answer = client.post(path, json=body)
            assert answer.status_code == (404 if turn and "unload" in path else 200), answer.text
        old = engine(server)
        os.kill(old, signal.SIGKILL)
        until(lambda old=old: server.children("engine_process") not in ([], [old]))
        for client in (first, second, third):
            until(lambda client=client: served(client))
            until(
                lambda client=client: sorted(names(client)) == ["kept", "new"]
            )  # once its statistics are there
            assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    assert frontends(server) == before
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0


def test_a_hung_engine_is_seen_by_those_who_sent_it_nothing(
    model_dir: Path, launch: Launch, connect: Connect
) -> None:
    flags = ("--engine-hang-timeout", "0.5", "--shutdown-timeout", "0", "--step-delay", "0.01")
    server = launch(model_dir, "--frontends", 2, *flags, "--engine", '{"hang_at_step": 60}')
    clients = connect(server)
    first, other = clients.values()
    stream = Stream(first)
    assert other.get("/health").status_code == 200
    until(lambda: other.get("/health").status_code == 503)
    assert "the engine hangs: 1 requests" in other.get("/health").text
    server.process.send_signal(signal.SIGTERM)
    assert stream.end()[-1] == "[DONE]"
    assert server.end()[0] == 0


@pytest.mark.slow
def test_a_hung_engine_is_ended_and_started_anew(model_dir: Path, launch: Launch, connect: Connect) -> None:
    flags = ("--engine-hang-timeout", "0.5", "--restart-engine", "--step-delay", "0.01")
    server = launch(model_dir, "--frontends", 2, *flags, "--engine", '{"hang_at_step": 60}')
    clients = connect(server)
    stream = Stream(next(iter(clients.values())))
    assert "hangs" in stream.end()[-2]
    for client in clients.values():
        until(lambda client=client: client.get("/health").status_code == 200)
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0


def test_sigterm_drains_all_and_a_second_one_does_not_wait(
    model_dir: Path, launch: Launch, connect: Connect
) -> None:
    server = launch(model_dir, "--frontends", 2, "--step-delay", "0.005", "--shutdown-timeout", "60")
    clients = connect(server)
    probes = connect(server)
    streams = [Stream(client) for client in clients.values()]
    server.process.send_signal(signal.SIGTERM)
    for probe in probes.values():
        until(lambda probe=probe: probe.get("/ready").status_code == 503)
        assert probe.get("/health").status_code == 200
        assert probe.post("/v1/completions", json={"prompt": [5]}).status_code == 503
    assert all(stream.goes_on() for stream in streams)
    server.process.send_signal(signal.SIGTERM)
    for stream in streams:
        *_, error, done = stream.end()
        assert "shutting down" in error
        assert done == "[DONE]"
    assert server.end()[0] == 0


def test_signals_to_the_whole_group_count_once(model_dir: Path, launch: Launch, connect: Connect) -> None:
    server = launch(model_dir, "--frontends", 2, "--step-delay", "0.005", "--shutdown-timeout", "60")
    stream = Stream(next(iter(connect(server).values())))
    for pid in (*frontends(server), engine(server), server.process.pid):  # as Ctrl-C does
        os.kill(pid, signal.SIGINT)
    time.sleep(0.2)
    assert stream.goes_on()
    server.process.send_signal(signal.SIGINT)
    assert stream.end()[-1] == "[DONE]"
    assert server.end()[0] == 0


def test_nobody_outlives_a_killed_parent(
    model_dir: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = launch(model_dir, "--frontends", 2)
    pids = server.children()
    assert len(pids) == 3
    server.process.kill()
    server.process.wait()

    def ended(pid: int) -> bool:
        path = Path(f"/proc/{pid}/stat")
        return not path.exists() or path.read_text().rsplit(")", 1)[1].split()[0] == "Z"

    until(lambda: all(ended(pid) for pid in pids))
    until(lambda: not list(tmp_path.glob("openinfer-*")))


def test_what_does_not_start_is_one_line(
    model_dir: Path, launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, words in (
        (("--start-error", "tensor x has the wrong shape"), "error: tensor x has the wrong shape"),
        (("--chat-template", "/no/such/file"), "/no/such/file"),
        (("--driver", "thread"), "--frontends needs --driver process"),
    ):
        with pytest.raises(AssertionError) as caught:
            launch(model_dir, "--frontends", 2, *flags)
        lines = caught.value.args[0]
        assert words in lines[-1]
        assert "Traceback" not in "".join(lines)
    with pytest.raises(SystemExit):
        build_parser(NoFlags(), "test").parse_args([str(model_dir), "--frontends", "0"])
    assert "from 1 to 64" in capsys.readouterr().err.splitlines()[-1]


def test_a_port_in_use_is_said_though_sharing_is_open_to_all(model_dir: Path, launch: Launch) -> None:
    server = launch(model_dir, "--frontends", 2)
    port = server.url.rsplit(":", 1)[1]
    for count in (1, 2):
        with pytest.raises(AssertionError, match="Address already in use"):
            launch(model_dir, "--frontends", count, "--port", port)


class NoFlags:
    """A Recipe, as far as a parser is made with it."""

    name = "none"

    def matches(self, config: Mapping[str, object]) -> bool:
        return True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        pass

    def engine_spec(self, model_dir: Path, args: argparse.Namespace) -> EngineSpec:
        raise NotImplementedError

    def replica_specs(self, model_dir: Path, args: argparse.Namespace, count: int) -> list[EngineSpec]:
        raise NotImplementedError


@pytest.mark.parametrize(
    "fails",
    ["_spawn", *(pytest.param(one, marks=pytest.mark.slow) for one in ("_make_engine", "_begin"))],
)
def test_a_restart_that_fails_in_an_unforeseen_way_ends_the_server(
    model_dir: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> ProcessDriver:
        return ProcessDriver(EngineSpec("openinfer.frontend.testing:FakeEngine", {}), close_timeout_s=0.2)

    def odd(*_: object) -> None:
        raise RuntimeError("not foreseen")

    async def main() -> int:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            words = [str(model_dir), "--skip-tokenizer-init", "--restart-engine"]
            args = build_parser(NoFlags(), "test").parse_args(words)
            args.tool_call_parser, args.reasoning_parser, args.model_type = None, None, "fake"
            parent = Frontends(_web_options(args), make, [listener])
            ready = asyncio.Event()
            running = asyncio.create_task(parent.run(print, ready.set, print))
            await asyncio.wait_for(ready.wait(), 60)
            monkeypatch.setattr(RestartingClient if fails == "_begin" else parent, fails, odd)
            pid = parent._children[0].pid if fails == "_spawn" else parent._driver.pid
            os.kill(pid, signal.SIGKILL)
            return await asyncio.wait_for(running, 60)

    assert asyncio.run(main()) == 1
