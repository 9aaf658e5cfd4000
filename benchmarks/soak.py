"""Whether a server's memory grows with the number of its requests.

    python benchmarks/soak.py [fake | MODEL_DIR] [--requests 100000] [--json FILE] [--plot FILE.png]

One server (fake: the frontend over an engine that makes tokens up; else `openinfer serve` of a checkpoint on the CPU)
answers a mix: whole and streamed answers, several choices, log-probabilities, refusals, clients that leave in the
middle, scrapes of the metrics. Every request has a tenant, a stop string, an id and a trace of its own: memory hides
in tables that are keyed by clients' data.

A hundred times, while no request is served, the private memory of the server's processes is read. A line is fitted over
the second half of the readings. Its noise is the standard error of the slopes of that half's quarters. The residuals
would promise too much, because neighbouring readings are not independent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

AT_ONCE = 16
READINGS = 100
QUARTERS = 4
PROMPTS = 997  # a prime, and few enough for the cache to have seen all of them soon


def request(number: int, rng: random.Random) -> tuple[bytes, str]:
    """The bytes of the number-th request, and how it goes on: whole, stream or leave."""
    kind = rng.choices(["whole", "stream", "leave", "refused", "wide", "metrics"], [40, 40, 9, 5, 5, 1])[0]
    if kind == "metrics":
        return b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", "whole"
    own = random.Random(number % PROMPTS)
    prompt = [own.randrange(300, 600) for _ in range(own.randint(1, 40))]
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": 4,
        "user": f"u{number}",
        "cache_salt": f"s{number % 7}",
    }
    if kind == "stream":
        body["stream"] = True
    elif kind == "leave":
        body |= {"max_tokens": 200, "ignore_eos": True, "stream": number % 2 == 0}
    elif kind == "refused":
        body |= rng.choice([{"temperature": 9}, {"model": f"m{number}"}, {"n": 0}, {"prompt": "\ud800"}])
    elif kind == "wide":
        body |= {"n": 3, "logprobs": 3, "stop": [f"stop{number}"]}
    raw = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\nX-Request-Id: r{number}\r\n"
        f"traceparent: 00-{number + 1:032x}-{number + 1:016x}-01\r\n\r\n"
    )
    return head.encode() + raw, kind if kind in ("stream", "leave") else "whole"


async def answer(reader: asyncio.StreamReader, kind: str) -> int:
    """Read one answer to its end; its status. Of one that is left only the beginning."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head.split(b" ", 2)[1])
    if kind == "leave":
        return status
    if b"content-length: " in head:
        await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r")[0]))
    else:
        await reader.readuntil(b"0\r\n\r\n")
    return status


async def ask(port: int, numbers: Iterator[int], seed: int, done: list[int]) -> None:
    """One client: a request after the other over a kept connection, a new one where it left."""
    rng = random.Random(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    for number in numbers:
        raw, kind = request(number, rng)
        writer.write(raw)
        # Half of the clients that leave must do so before the answer begins, so that both cases are tested.
        if kind == "leave" and number % 4 < 2:
            await asyncio.sleep(0.002)
        else:
            status = await asyncio.wait_for(answer(reader, kind), 120)
            if status not in (200, 400, 404):
                raise RuntimeError(f"request {number} was answered with {status}: {raw!r}")
        if kind == "leave":
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
        done.append(number)
    writer.close()


async def load(port: int, numbers: Iterator[int], round_number: int) -> None:
    """Requests with these numbers, some at once."""
    done: list[int] = []
    await asyncio.gather(*(ask(port, numbers, round_number * AT_ONCE + n, done) for n in range(AT_ONCE)))


def private_bytes(pids: Sequence[int]) -> list[int]:
    """Memory that is each process's alone."""
    found = []
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        found.append(sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_")))
    return found


def soak(port: int, pids: Sequence[int], requests: int, readings: int = READINGS) -> dict[str, Any]:
    """Send the requests; after each of `readings` equal parts the memory is read, when no request is served."""
    part = requests // readings
    counts, memory = [], []
    for index in range(readings):
        asyncio.run(load(port, iter(range(index * part, (index + 1) * part)), index))
        time.sleep(0.05)
        counts.append((index + 1) * part)
        memory.append(private_bytes(pids))
    return {"requests": counts, "private_bytes": [list(column) for column in zip(*memory, strict=True)]}


def slope(requests: Sequence[int], memory: Sequence[int]) -> tuple[float, float]:
    """Bytes a request over the second half, and the standard error of that figure."""
    x, y = np.asarray(requests, float), np.asarray(memory, float)
    x, y = x[len(x) // 2 :], y[len(y) // 2 :]
    whole = float(np.polyfit(x, y, 1)[0])
    parts = zip(np.array_split(x, QUARTERS), np.array_split(y, QUARTERS), strict=True)
    return whole, float(np.std([np.polyfit(a, b, 1)[0] for a, b in parts], ddof=1)) / QUARTERS**0.5


@contextlib.contextmanager
def served(
    what: str, folder: Path, fake: str = "openinfer.cli.bench.fake"
) -> Iterator[tuple[int, list[int]]]:
    """A server's port and processes: itself and its engine. fake: the module that serves a fake engine."""
    from openinfer.cli.bench.server import _family, free_port, running, serving

    port = free_port()
    if what == "fake":
        server = running([fake, str(port), str(folder)], port, folder / "log")
    else:
        server = serving(
            Path(what), ["--device", "cpu", "--kv-cache-memory-bytes", str(64 << 20)], folder / "log"
        )
    with server as running_server:
        yield int(running_server.url.rsplit(":", 1)[1]), _family(running_server.process.pid)


def plot(path: Path, data: dict[str, Any]) -> None:
    """Memory against requests, a line a process."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.4), dpi=90, layout="constrained")
    for result in data["results"]:
        megabytes = [value / 2**20 for value in result["private_bytes"]]
        label = f"{result['what']}: {result['bytes_a_request']:+.0f} ± {result['noise']:.0f} bytes a request"
        axes.plot(result["requests"], megabytes, label=label)
    axes.set(xlabel="requests answered", ylabel="private memory (MiB)", ylim=(0, None), title=data["title"])
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path)


def main() -> None:
    from openinfer.cli.bench.record import add_record_arguments, record, write

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="fake", help="fake, or a checkpoint's directory")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw a picture into this file; needs openinfer-cli[plot]"
    )
    add_record_arguments(parser)
    args = parser.parse_args()
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'openinfer-cli[plot]'")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, served(args.what, Path(folder)) as (port, pids):
        found = soak(port, pids, args.requests)
    name = "a fake engine" if args.what == "fake" else Path(args.what).name + " on the CPU"
    results = []
    for what, memory in zip(["server", "engine", "renderer"], found["private_bytes"], strict=False):
        grown, noise = slope(found["requests"], memory)
        print(f"{what}: {memory[-1] / 2**20:.1f} MiB, {grown:+.1f} ± {noise:.1f} bytes a request")
        row = {"what": what, "bytes_a_request": round(grown, 2), "noise": round(noise, 2)}
        results.append({**row, "requests": found["requests"], "private_bytes": memory})
    data = record("soak", args, results, title=f"{args.requests:,} requests to one server, {name}")
    data["command"] = f"python benchmarks/soak.py {args.what} --requests {args.requests}"
    data["seconds"] = round(time.monotonic() - began)
    if args.json:
        write(args.json, data)
    if args.plot:
        plot(args.plot, data)


if __name__ == "__main__":
    sys.exit(main())
