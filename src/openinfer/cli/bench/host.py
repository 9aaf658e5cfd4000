"""`openinfer bench host`: the host's work for a step and for a token. Needs no GPU.

Each recipe's engine runs with a device that answers at once. The HTTP frontend runs over an engine that makes tokens
up; the client of `bench serve` asks it for streams and for whole answers.
"""

import asyncio
import importlib.util
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from openinfer.cli.bench import fake, idle
from openinfer.cli.bench.client import Client, LoadRun, run_load
from openinfer.cli.bench.record import add_record_arguments, percentile, progress, record, write
from openinfer.cli.bench.server import NotReady, Server, cpu_seconds, free_port, running
from openinfer.frontend.flag_parser import FlagParser

CLIENTS, TOKENS_OUT = 256, 128
POOL_TOKENS, POOL_REPEATS = 16384, 20


def main(argv: list[str]) -> int:
    """Measure; returns 0, 1 if the frontend did not start or lost a request, 2 for wrong arguments."""
    parser = FlagParser("openinfer bench host", usage="openinfer bench host [flags]", description=__doc__)
    add_record_arguments(parser)
    args = parser.parse_args(argv)
    try:
        results = [*engine_results(), pool_result(), *frontend_results(rounds=4)]
    except (OSError, NotReady) as error:
        print(f"openinfer bench host: error: {error}", file=sys.stderr)
        return 1
    for result in results:
        print(_line(result))
    if args.json:
        write(args.json, record("host", args, results))
    return 1 if any(result.get("errors") for result in results) else 0


def engine_results(batches: tuple[int, ...] = (8, 256), steps: int = 2000) -> list[dict[str, Any]]:
    """Host work of decode steps, and of turns of two steps in which one sequence leaves and one joins; by recipe."""
    results = []
    for name, recipe in idle.recipes_that_can().items():
        for rows in batches:
            progress(f"{name}, steps of {rows} rows")
            times = idle.measure_idle(recipe, rows, steps=steps, changes=steps // 10)
            for what, us in (
                ("decode step, nobody joins or leaves", times["steady"]),
                ("trace and watch of such a step", times["watch"]),
                ("telling three other ranks of such a step", times["ranks"]),
                ("two steps, one leaves and one of 1,000 joins", times["change"]),
            ):
                results.append(_times(f"{name}: {what}", rows, us))
    return results


def _times(what: str, rows: int, us: list[float]) -> dict[str, Any]:
    return {
        "what": f"{what}, batch {rows}",
        "mean_us": statistics.fmean(us),
        "p50_us": percentile(us, 50),
        "p99_us": percentile(us, 99),
        "repeats": {"us": us[-200:]},
    }


def pool_result(tokens: int = POOL_TOKENS) -> dict[str, Any]:
    """A prompt that is wholly cached: matched, given its last page, and let go; hashes were made before."""
    from openinfer.kvpool import Group, Pool, hash_blocks

    progress(f"pool, prompt of {tokens} tokens")
    pool = Pool([Group("kv", 16, 2 * tokens // 16)])
    prompt = list(range(tokens))
    hashes = hash_blocks(prompt, 16)
    lease = pool.acquire(prompt, hashes=hashes)
    lease.reserve(tokens)
    lease.commit(prompt, tokens)
    lease.release()
    times = []
    for _ in range(POOL_REPEATS):
        start = time.perf_counter_ns()
        lease = pool.acquire(prompt, hashes=hashes)
        lease.reserve(tokens)
        lease.release()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return _times(f"match + allocate + free, {tokens} cached tokens", 1, times)


def frontend_results(rounds: int) -> list[dict[str, Any]]:
    """One process of the frontend, `rounds` requests from each of CLIENTS clients: streamed, then not."""
    progress(f"frontend, {CLIENTS} clients")
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        module = ["openinfer.cli.bench.fake", str(port), folder]
        with running(module, port, Path(folder) / "server.log") as server:
            return [asyncio.run(_frontend(server, rounds, stream=stream)) for stream in (True, False)]


async def _frontend(server: Server, rounds: int, *, stream: bool) -> dict[str, Any]:
    client = Client(server.url, "fake")
    message = client.message(fake.WORDS[:32], TOKENS_OUT, stream=stream)
    await run_load(client, [message] * CLIENTS, [0.0] * CLIENTS)
    used, count = cpu_seconds(server.process.pid), CLIENTS * rounds
    run: LoadRun = await run_load(client, [message] * count, [0.0] * count, CLIENTS)
    used = cpu_seconds(server.process.pid) - used
    client.close()
    good = [answer for answer in run.answers if not answer.error]
    tokens = sum(answer.output_tokens for answer in good)
    return {
        "what": f"frontend, {CLIENTS} clients, {TOKENS_OUT} tokens, {'streamed' if stream else 'not streamed'}",
        "requests_per_s": len(good) / run.seconds,
        "tokens_per_s": tokens / run.seconds,
        "cpu_us_a_token": used / max(1, tokens) * 1e6,
        "cpu_us_a_request": used / max(1, len(good)) * 1e6,
        "errors": count - len(good),
        "event_loop": "uvloop" if importlib.util.find_spec("uvloop") else "asyncio",
        "http_parser": "httptools" if importlib.util.find_spec("httptools") else "h11",
        "client_cpu_share": run.cpu_seconds / run.seconds,
    }


def _line(result: dict[str, Any]) -> str:
    figures = {name: value for name, value in result.items() if isinstance(value, float)}
    figures.pop("client_cpu_share", None)
    return f"{result['what']}\n    " + ", ".join(f"{name} {value:.1f}" for name, value in figures.items())
