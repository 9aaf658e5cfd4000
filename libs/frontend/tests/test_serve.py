"""The command line, as processes: start-up lines, errors in one line, signals."""

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

HERE = Path(__file__).parent
Launch = Callable[..., Any]
SCRIPT = [sys.executable, str(HERE / "fake_recipe.py")]


@pytest.mark.parametrize("driver", ["process", "thread"])
def test_start_serve_and_stop(model_dir: Path, launch: Launch, driver: str) -> None:
    server = launch(model_dir, "--driver", driver, "--served-model-name", "a", "b", "--log-requests")
    assert any(
        re.fullmatch(r"openinfer: tokenizer loaded in \S+ s, with chat template", x) for x in server.lines
    )
    assert any(re.match(r"openinfer: engine started in \S+ s: tiny, context 4096", x) for x in server.lines)
    assert re.fullmatch(r"openinfer: ready on http://127\.0\.0\.1:\d+ in \d+\.\d s", server.lines[-1])
    renders = server.children("render_process")
    assert server.children()[:1] == renders  # it starts first, beside the engine
    assert os.getpgid(server.process.pid) not in map(os.getpgid, server.children()), "Ctrl-C reaches a child"
    body = {"model": "b", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 3
    server.process.send_signal(signal.SIGTERM)
    code, rest = server.end()
    assert code == 0
    assert not any(runs(pid) for pid in renders)
    assert "ok: 1 sequences" in rest
    assert "Traceback" not in rest


def test_sigterm_drains_and_a_second_one_does_not_wait(model_dir: Path, launch: Launch) -> None:
    server = launch(model_dir, "--step-delay", "0.01", "--shutdown-timeout", "60")
    body = {"prompt": [5], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        while httpx.get(f"{server.url}/ready").status_code != 503:
            time.sleep(0.01)
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        *_, error, _, done, _ = list(lines)
    assert "shutting down" in error
    assert done == "data: [DONE]"
    assert server.end()[0] == 0


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_the_engine_process_does_not_outlive_a_killed_server(
    model_dir: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = launch(model_dir)
    assert len(list(tmp_path.glob("openinfer-*"))) == 1
    children = server.children()
    assert len(children) == 2
    server.process.kill()
    server.process.wait()
    deadline = time.monotonic() + 10
    while any(runs(pid) for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not list(tmp_path.glob("openinfer-*"))


def test_a_server_that_restarts_its_engine_stays(model_dir: Path, launch: Launch) -> None:
    server = launch(model_dir, "--restart-engine", "--step-delay", "0.002")
    body = {"prompt": [5], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(server.children("engine_process")[0], signal.SIGKILL)
        *_, error, _, done, _ = list(lines)
    assert "SIGKILL" in error
    assert done == "data: [DONE]"
    deadline = time.monotonic() + 10
    while httpx.get(f"{server.url}/health").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": [5], "max_tokens": 2})
    assert answer.json()["usage"]["completion_tokens"] == 2
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0


def test_a_killed_engine_ends_the_server_with_1(model_dir: Path, launch: Launch) -> None:
    server = launch(model_dir)
    os.kill(server.children("engine_process")[0], signal.SIGKILL)
    code, rest = server.end()
    assert code == 1
    assert "Traceback" not in rest


@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "closed", ["<&- >&- 2>&-", *(pytest.param(c, marks=pytest.mark.slow) for c in ("<&-", "<&- >&-"))]
)
def test_closed_standard_streams_are_no_reason_not_to_serve(
    model_dir: Path, tmp_path: Path, plain: bool, closed: str
) -> None:
    if plain:
        (tmp_path / "uvloop.py").write_text("raise ImportError")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" {closed}', "", *SCRIPT, model_dir, "--port", str(port)],
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        )
    answer = None
    while process.poll() is None and answer is None:
        with contextlib.suppress(httpx.ConnectError):
            answer = httpx.post(
                f"http://127.0.0.1:{port}/v1/completions", json={"prompt": [5], "max_tokens": 2}
            )
        time.sleep(0.05)
    process.terminate()
    assert process.wait(timeout=10) == 0
    assert answer is not None
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert "Traceback" not in log.read_text()


def run(*args: object) -> tuple[int, str]:
    done = subprocess.run([*SCRIPT, *map(str, args)], capture_output=True, text=True, timeout=20)
    return done.returncode, done.stderr + done.stdout


def test_start_up_errors_are_one_line(model_dir: Path) -> None:
    code, text = run(model_dir, "--port", "0", "--start-error", "tensor x has the wrong shape")
    assert code == 1
    assert text.splitlines()[-1] == "fake_recipe: error: tensor x has the wrong shape"
    assert "Traceback" not in text


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_starting_leaves_nothing_behind(
    model_dir: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [*SCRIPT, str(model_dir), "--port", "0", "--start-delay", "60"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    assert "tokenizer loaded" in process.stderr.readline()
    process.send_signal(number)
    _, rest = process.communicate(timeout=10)
    assert process.returncode == code
    assert "Traceback" not in rest
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_wrong_directories_and_flags(model_dir: Path) -> None:
    code, text = run(model_dir / "nope")
    assert (code, text.count("\n")) == (1, 1)
    assert "config.json does not exist" in text
    assert run(model_dir, "--max-model-len", "0")[1].endswith("it must be at least 1\n")
    assert run(model_dir, "--no-such-flag")[0] == 2
    code, text = run(model_dir, "--restart-engine", "--driver", "thread")
    assert (code, text.count("\n")) == (1, 1)
    assert "--driver process" in text
    assert run(model_dir, "--max-model", "5")[0] == 2
    (model_dir / "config.json").write_text('{"model_type": "other"}')
    assert "'other', which the recipe 'fake' does not serve" in run(model_dir)[1]


def test_a_missing_tokenizer_is_an_error_unless_skipped(model_dir: Path, launch: Launch) -> None:
    (model_dir / "tokenizer.json").unlink()
    code, text = run(model_dir, "--port", "0")
    assert code == 1
    assert "tokenizer.json does not exist" in text
    assert "Traceback" not in text
    server = launch(model_dir, "--skip-tokenizer-init")
    body = {"prompt": [5], "max_tokens": 2, "return_token_ids": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body).json()
    assert answer["choices"][0]["token_ids"] == [6, 7]


def test_a_port_in_use_is_said(model_dir: Path, launch: Launch) -> None:
    server = launch(model_dir)
    port = server.url.rsplit(":", 1)[1]
    code, text = run(model_dir, "--port", port)
    assert code == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; another program has the port" in text
    code, text = run(model_dir, "--host", "192.0.2.1")
    assert (code, "--host takes an address of this machine" in text) == (1, True)
    for name in ("no host", "..", "a" * 300):
        code, text = run(model_dir, "--host", name)
        assert (code, f"--host {name}: " in text, len(text.splitlines())) == (1, True, 1)


def test_help_is_fast() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code, text = run("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert code == 0
    assert "--help-engine" in text
    assert "--shutdown-timeout" in text
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_flags_that_would_serve_something_else_are_refused(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flags, words in (
        (["--api-key", ""], "not empty"),
        (["--api-key", " "], "not empty"),
        (["--api-key", "a\nb"], "printable"),
        (["--port", "70000"], "70000 is not a port from 0 to 65535"),
        (["--port", "-1"], "not a port"),
    ):
        code, text = run(model_dir, *flags)
        assert code == 2
        assert words in text.splitlines()[-1]
    monkeypatch.setenv("OPENINFER_API_KEY", "")
    code, text = run(model_dir, "--port", "0")
    assert code == 2
    assert "OPENINFER_API_KEY" in text
    assert "unset it" in text


@pytest.mark.parametrize("frontends", [1, 2])
def test_a_directory_that_is_too_long_for_sockets_is_one_line(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frontends: int
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    code, text = run(model_dir, "--port", "0", "--frontends", frontends)
    assert code == 1
    assert "Traceback" not in text
    assert "TMPDIR says where it lies" in text.splitlines()[-1]
    assert not list(long.iterdir())
