"""Fixtures of the tests that cross libraries."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from openinfer import cli
from openinfer.cli import recipes
from openinfer.graph import Readback
from openinfer.kernels.authoring import CacheForm
from openinfer.kernels.lora.adapters import AdapterSizes
from openinfer.recipes.engine import Recipe, Source
from openinfer.recipes.engine.limits import CACHE_FORMS, Limits
from openinfer.recipes.engine.startup import build
from openinfer.recipes.engine.testing import Session
from openinfer.recipes.engine.verdict import Reference
from openinfer.tensor import Arena, Checkpoint, CudaError, Device, DriverNotFound, Stream, float32

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton; compile workers do without it

# To read the certificates of all authorities takes 20 ms, and each HTTP client here would do it for itself.
ssl.create_default_context = functools.cache(ssl.create_default_context)
# To read the entry points of all distributions takes 7 ms, and each engine here would do it for itself.
recipes.installed = functools.cache(recipes.installed)

GOLDENS = Path(__file__).parent / "goldens"


@dataclass
class Golden:
    """A golden checkpoint: `numbers` are the arrays of golden.safetensors, `facts` golden.json."""

    path: Path
    facts: dict[str, Any]
    numbers: dict[str, np.ndarray[Any, Any]]

    def prompt(self, index: int) -> list[int]:
        return [int(t) for t in self.numbers[f"p{index}.ids"]]

    def greedy(self, index: int) -> list[int]:
        return [int(t) for t in self.numbers[f"p{index}.greedy_ids"]]

    @property
    def num_prompts(self) -> int:
        return len(self.facts["prompts"])


def _load(name: str, tmp: Path) -> Golden:
    path = GOLDENS / name
    link = tmp / name
    link.mkdir()
    (link / "model.safetensors").symlink_to(path / "golden.safetensors")
    with Checkpoint(link) as checkpoint:
        numbers = {n: np.array(checkpoint.array(n)) for n in checkpoint.names}
    return Golden(path, json.loads((path / "golden.json").read_text()), numbers)


@pytest.fixture(scope="session", params=["qwen3-tiny", "qwen3-tiny-untied"])
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return _load(request.param, tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="session", params=["qwen3_5-tiny", "qwen3_5-moe-tiny"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return _load(request.param, tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return _load("deepseek_v4-tiny", tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return _load("qwen3-tiny", tmp_path_factory.mktemp("golden"))


Place = Callable[..., Any]


@pytest.fixture(scope="session")
def place() -> Place:
    """place(recipe, path, blocks, ...): a model laid out on the CPU with its weights, `blocks` of each group."""

    def make(
        recipe: Recipe[Any],
        path: Path,
        blocks: Sequence[int],
        *,
        max_rows: int = 4,
        max_tokens: int = 512,
        length: int = 1024,
        dtype: Any = float32,
        nbytes: int = 256 << 20,
        adapters: AdapterSizes | None = None,
        **flags: Any,
    ) -> Any:
        stream = Stream(Device("cpu"))
        with Checkpoint(path) as checkpoint:
            source = replace(Source.read(path), checkpoint=checkpoint)
            options = recipe.options(**flags)
            blueprint, speculation = recipe.blueprint(source, options), options.speculation()
            limits = Limits(
                length,
                max_rows,
                max_tokens,
                blueprint.page_size,
                np.dtype(dtype),
                CACHE_FORMS[options.kv_cache_dtype] or CacheForm(np.dtype(dtype)),
                adapters=adapters,
                max_drafts=speculation.num_speculative_tokens if speculation else 0,
                proposes=options.proposes,
            )
            model = blueprint.lay_out(Arena(Device("cpu"), nbytes), stream, limits, blocks)
            blueprint.load(model, checkpoint, stream, lambda done, total: None)
        return model

    return make


@pytest.fixture(scope="session")
def golden_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Golden]:
    """golden_of(name): a golden by the name of its folder."""
    return lambda name: _load(name, tmp_path_factory.mktemp("golden"))


def log_softmax(logits: Any) -> Any:
    wide = logits.astype(np.float64)
    wide = wide - wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


@pytest.fixture(scope="session")
def gpu() -> None:
    """Skips without one."""
    try:
        Device("cuda", 0).activate()
    except (DriverNotFound, CudaError) as e:
        pytest.skip(f"no usable CUDA device: {e}")


@pytest.fixture
def references() -> Callable[[Golden], list[Reference]]:
    """references(golden): the last positions of a golden's prompts as the accuracy gate reads references."""

    def read(golden: Golden) -> list[Reference]:
        found = []
        for index, count in {1: 6, 2: 8, 3: 8, 4: 8}.items():
            names = [f"p{index}.logits_{kind}" for kind in ("bf16", "fp32", "fp32_actq")]
            runs = [log_softmax(golden.numbers[name][-count:]) for name in names if name in golden.numbers]
            top = np.argsort(-runs[0], axis=1, kind="stable")[:, :32]
            taken = (np.take_along_axis(values, top, 1) for values in runs)
            found.append(Reference(golden.prompt(index), top, *taken))
        return found

    return read


@pytest.fixture
def session() -> Iterator[Callable[..., Session]]:
    """Build an engine on the CPU and a session on it; closed at the end, with the pool checked and empty."""
    engines = []

    def make(path: Path, **flags: Any) -> Session:
        defaults = {"device": "cpu", "max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20}
        engine = build(recipes.find(path), path, **{**defaults, **flags}).engine
        engine.runner.drafting.costs = None  # whether drafts pay on this machine must decide no test
        engines.append(engine)
        return Session(engine)

    yield make
    for engine in engines:
        for _ in range(20000):
            if engine.pool.num_free == engine.pool.num_total:
                break
            engine.step(0.0)
        engine.check()
        assert engine.pool.num_free == engine.pool.num_total, "blocks were not given back"
        engine.close()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that are not there at once, as on a GPU: so that steps are launched ahead."""
    rng, take = np.random.default_rng(0), Readback.take

    def take_later(self: Readback, *, wait: bool) -> Any:
        return take(self, wait=wait) if wait or rng.random() < 0.4 else None

    monkeypatch.setattr(Readback, "take", take_later)


class Server:
    """`openinfer serve` in a process of its own, on a free port; SIGTERM and exit code 0 at the end."""

    FLAGS = ("--device", "cpu", "--port", "0", "--kv-cache-memory-bytes", str(64 << 20))
    START_LIMIT_S = 60

    def __init__(self, model_dir: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "openinfer.cli", "serve", str(model_dir), *self.FLAGS, *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        if not self._ready.wait(self.START_LIMIT_S) or not self.url:
            self.stop()
            raise AssertionError("the server did not get ready:\n" + "".join(self.log))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if ready := re.search(r"ready on (http://\S+)", line):
                self.url = ready[1]
                self._ready.set()
        self._ready.set()

    def processor_s(self) -> float:
        """Seconds of processor that the server has taken, its processes included."""
        pid, total = self.process.pid, 0
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for one in (pid, *children):
            fields = Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    def settled(self) -> dict[str, float]:
        """Running, waiting and cache use, once all are zero or five seconds have passed: it takes a moment to notice
        who has left."""
        deadline = time.monotonic() + 5
        while True:
            text = httpx.get(f"{self.url}/metrics").text
            found = re.findall(
                r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)\{.*\} (\S+)$",
                text,
                re.M,
            )
            gauges = {name: float(value) for name, value in found}
            if not any(gauges.values()) or time.monotonic() > deadline:
                return gauges
            time.sleep(0.05)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@pytest.fixture
def server() -> Iterator[Callable[..., Server]]:
    """server(path, flags...): a server that a test may break; killed at the end if it still runs."""
    servers: list[Server] = []

    def make(model_dir: Path, *flags: str) -> Server:
        servers.append(Server(model_dir, *flags))
        return servers[-1]

    yield make
    for one in servers:
        one.process.kill()
        one.stop()


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Server]]:
    """Start servers, each kind once; all are stopped at the end."""
    servers: dict[tuple[Any, ...], Server] = {}

    def start(model_dir: Path, *flags: str) -> Server:
        key = (model_dir, *flags)
        if key not in servers:
            servers[key] = Server(model_dir, *flags)
        return servers[key]

    yield start
    assert [server.stop() for server in servers.values()] == [0] * len(servers)


@pytest.fixture
def main(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[int, str]]]:
    """main(words...): `openinfer` without a process of its own, whose start takes longest: exit code and stderr."""
    root = logging.getLogger()
    level = root.level
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")

    def run(*words: str) -> tuple[int, str]:
        try:
            code = cli.main(words)
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, capfd.readouterr().err

    yield run
    root.setLevel(level)
