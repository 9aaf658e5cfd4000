"""`openinfer bench serve`: latencies and throughput of an OpenAI server under one or more loads.

The server is started from MODEL_DIR and stopped again, or runs elsewhere (--base-url; any OpenAI server). Prompts are
fresh random token ids, of another seed for every load, so nothing is served from a prefix cache.
"""

import argparse
import asyncio
import contextlib
import json
import math
import random
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openinfer.cli.api import Api, ApiError, add_api_key, api_key
from openinfer.cli.bench.client import Client, LoadRun, arrivals, run_load
from openinfer.cli.bench.record import add_record_arguments, percentile, progress, record, write
from openinfer.cli.bench.server import Server, serving
from openinfer.frontend.errors import FlagError, is_users_error, one_line
from openinfer.frontend.flag_parser import FlagParser
from openinfer.tensor import ProgressBar, format_bytes

PROG = "openinfer bench serve"
BUSY = 0.7
"""CPU seconds a second above which the client itself is in doubt."""
METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """One load: requests a second (math.inf: all at once), how many, at most how many at once (0: no limit), and
    tokens in and out of each."""

    request_rate: float
    num_prompts: int
    max_concurrency: int
    input_len: int
    output_len: int
    seed: int

    def __str__(self) -> str:
        rate = "all at once" if math.isinf(self.request_rate) else f"{self.request_rate:g} req/s"
        limit = f", {self.max_concurrency} at a time" if self.max_concurrency else ""
        return f"{rate}{limit}, {self.num_prompts} x {self.input_len} in / {self.output_len} out"


class Text:
    """Draws random text with a checkpoint's tokenizer. Raises FlagError without a tokenizer.json."""

    def __init__(self, model_dir: Path | None) -> None:
        path = None if model_dir is None else model_dir / "tokenizer.json"
        if path is None or not path.is_file():
            raise FlagError(f"--text needs MODEL_DIR with a tokenizer.json; found no such file at {path}")
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))
        self._vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=False)

    def draw(self, length: int, rng: random.Random) -> str:
        """Text of `length` tokens, or as near as ten tries come: text that is decoded from random ids may encode to
        other ids, so it is cut or prolonged."""
        ids: list[int] = []
        text = ""
        for _ in range(10):
            ids = ids[:length] + [rng.randrange(self._vocab_size) for _ in range(length - len(ids))]
            text = self._tokenizer.decode(ids)
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) == length:
                break
        return text


def main(argv: list[str]) -> int:
    """Run the loads; returns 0, 1 if nothing could be measured or a request failed, 2 for wrong arguments."""
    at = argv.index("--") if "--" in argv else len(argv)
    parser, server_flags = _parser(), argv[at + 1 :]
    args = parser.parse_args(argv[:at])
    if args.model_dir is None and args.base_url is None:
        parser.error("give MODEL_DIR, which is then served, or --base-url")
    if args.base_url is not None and server_flags:
        parser.error(f"flags after -- are the server's, and --base-url names one that runs: {server_flags}")
    try:
        loads, goodput = _loads(args), _goodput(args.goodput)
        with contextlib.ExitStack() as stack:
            server = None
            if args.base_url is None:
                progress(f"starting a server of {args.model_dir}")
                server = stack.enter_context(serving(args.model_dir, server_flags, args.server_log))
                progress(f"ready in {server.ready_s:.2f} s, {format_bytes(server.pss_bytes)} of host memory")
            results = _measure(args, loads, goodput, server)
    except Exception as error:
        if not is_users_error(error):
            raise
        print(f"{PROG}: error: {one_line(error)}", file=sys.stderr)
        return 1
    print(_table(results))
    if args.json:
        write(args.json, record("serve", args, results, server=server.as_dict() if server else None))
    return 1 if any(result["errors"] for result in results) else 0


def _rate(text: str) -> float:
    """Requests a second; inf is all at once. The type `float` of a FlagParser refuses inf."""
    return float(text)


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        PROG, usage=f"{PROG} (MODEL_DIR | --base-url URL) [flags] [-- SERVER FLAGS]", description=__doc__
    )
    add = parser.add_argument
    add("model_dir", type=Path, nargs="?", metavar="MODEL_DIR", help="checkpoint to serve")
    add("--base-url", metavar="URL", help="a running server: http://HOST:PORT")
    add_api_key(parser)
    add("--model", metavar="NAME", help="model name in the requests; default: the first of /v1/models")
    one = "one, or one for each rate"
    add("--request-rate", "--rates", type=_rate, nargs="+", default=[math.inf], metavar="R",
        help="loads in requests/s, Poisson arrivals; inf (default): all at once")  # fmt: skip
    add("--num-prompts", type=int, nargs="+", default=[200], metavar="N",
        help=f"requests ({one}); default: 200")  # fmt: skip
    add("--seconds", type=float, metavar="S", help="send at the rate for this time, instead of --num-prompts")
    add("--max-concurrency", type=int, nargs="+", default=[0], metavar="N",
        help=f"requests at once ({one}); 0 (default): no limit")  # fmt: skip
    add("--random-input-len", type=int, nargs="+", default=[1024], metavar="N", help=f"prompt tokens ({one})")
    add("--random-output-len", type=int, nargs="+", default=[128], metavar="N", help=f"tokens out ({one})")
    add("--text", action="store_true", help="send text of that many tokens (MODEL_DIR's tokenizer), not ids")
    add("--vocab-size", type=int, metavar="N", help="vocabulary of prompt ids; default: MODEL_DIR's or 32000")
    add("--seed", type=int, default=0, help="seed of the first load; each further load has one more")
    add("--num-warmups", type=int, default=8, metavar="N", help="requests before the first load; default: 8")
    add("--goodput", nargs="+", default=[], metavar="NAME:MS",
        help="objectives, as ttft:50 tpot:5 (also e2el): count the requests that meet all")  # fmt: skip
    add("--server-log", type=Path, metavar="FILE", help="keep the log of the started server in this file")
    add_record_arguments(parser)
    return parser


def _loads(args: argparse.Namespace) -> list[OfferedLoad]:
    count = len(args.request_rate)
    columns: list[Sequence[Any]] = [args.request_rate]
    for flag in ("num_prompts", "max_concurrency", "random_input_len", "random_output_len"):
        values = getattr(args, flag)
        if len(values) not in (1, count):
            name = "--" + flag.replace("_", "-")
            raise FlagError(f"{name} has {len(values)} values for {count} rates: give one, or one for each")
        columns.append(values * count if len(values) == 1 else values)
    if args.seconds is not None and (math.inf in args.request_rate or args.seconds <= 0):
        raise FlagError(f"--seconds {args.seconds:g}: it must be above 0, and needs finite rates")
    if args.seconds is not None:
        columns[1] = [max(1, round(rate * args.seconds)) for rate in args.request_rate]
    columns.append(range(args.seed, args.seed + count))
    loads = [OfferedLoad(*row) for row in zip(*columns, strict=True)]
    for load in loads:
        if not load.request_rate > 0 or min(load.num_prompts, load.input_len, load.output_len) < 1:
            raise FlagError(f"{load}: rate, requests and lengths must be above 0")
        if load.max_concurrency < 0:
            raise FlagError(f"--max-concurrency {load.max_concurrency}: 0 means no limit")
    return loads


def _goodput(pairs: Sequence[str]) -> dict[str, float]:
    found = {}
    for pair in pairs:
        name, _, limit = pair.partition(":")
        try:
            found[name] = float(limit)
        except ValueError:
            name = ""
        if name not in ("ttft", "tpot", "e2el"):
            raise FlagError(f"--goodput {pair}: it is ttft:MS, tpot:MS or e2el:MS")
    return found


def _measure(
    args: argparse.Namespace, loads: Sequence[OfferedLoad], goodput: dict[str, float], server: Server | None
) -> list[dict[str, Any]]:
    url = server.url if server else args.base_url.rstrip("/")
    key = api_key(args)
    api = Api(url, key)
    client = Client(url, args.model or api.first_model().id, key)
    prompts = Text(args.model_dir) if args.text else None
    vocab = args.vocab_size or _vocab_size(args.model_dir)

    def messages(load: OfferedLoad, count: int, rng: random.Random) -> Iterator[bytes]:
        for _ in range(count):
            if prompts is not None:
                yield client.message(prompts.draw(load.input_len, rng), load.output_len)
            else:
                yield client.message([rng.randrange(vocab) for _ in range(load.input_len)], load.output_len)

    async def measure() -> list[dict[str, Any]]:
        warm = list(messages(loads[0], args.num_warmups, random.Random(f"warm-up {args.seed}")))
        await run_load(client, warm, [0.0] * len(warm))
        results = []
        for load in loads:
            progress(str(load))
            rng, before = random.Random(load.seed), counters(api)
            times = arrivals(load.num_prompts, load.request_rate, rng)
            bar = ProgressBar("openinfer:", things="answers")
            asked = list(messages(load, load.num_prompts, rng))
            run = await run_load(client, asked, times, load.max_concurrency, bar)
            after = counters(api)
            change = {name: after[name] - before.get(name, 0.0) for name in after}
            results.append({**serve_summary(load, run, goodput), "counters": change})
        client.close()
        return results

    return asyncio.run(measure())


def counters(api: Api) -> dict[str, float]:
    """The server's /metrics counters of steps and of forbidden work in steps; empty for a server without them."""
    try:
        text = api.metrics()
    except ApiError:
        return {}
    found = re.findall(r"^openinfer:(steps|\w+_after_ready)_total(?:\{.*\})? (\S+)$", text, re.M)
    return {name: float(value) for name, value in found}


def _vocab_size(model_dir: Path | None) -> int:
    if model_dir is None:
        return 32000
    config = json.loads((model_dir / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])


def serve_summary(load: OfferedLoad, run: LoadRun, goodput: dict[str, float]) -> dict[str, Any]:
    """The figures of a load, in milliseconds where the name says so. Failed requests count in `errors` alone."""
    done = [answer for answer in run.answers if not answer.error]
    raw = {
        "ttft": [answer.ttft * 1e3 for answer in done],
        "tpot": [answer.tpot * 1e3 for answer in done if answer.output_tokens > 1],
        "itl": [gap * 1e3 for answer in done for gap in answer.gaps],
        "e2el": [answer.e2el * 1e3 for answer in done],
    }
    tokens = sum(answer.output_tokens for answer in done)
    prompt_tokens = sum(answer.prompt_tokens for answer in done)
    good = sum(all(getattr(one, name) * 1e3 <= limit for name, limit in goodput.items()) for one in done)
    lags = [(answer.sent - answer.due) * 1e3 for answer in run.answers]
    busy = run.cpu_seconds / run.seconds
    if busy > BUSY:
        progress(f"the client used {busy:.0%} of a CPU: it may be what limits these figures")
    rate = "inf" if math.isinf(load.request_rate) else load.request_rate
    return {
        **asdict(load),
        "request_rate": rate,
        "completed": len(done),
        "errors": dict(Counter(answer.error for answer in run.answers if answer.error)),
        "seconds": run.seconds,
        "requests_per_s": len(done) / run.seconds,
        "output_tokens_per_s": tokens / run.seconds,
        "total_tokens_per_s": (tokens + prompt_tokens) / run.seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": tokens,
        "tokens_per_chunk": tokens / max(1, sum(len(answer.gaps) + 1 for answer in done)),
        **({"goodput": {"limits_ms": goodput, "requests_per_s": good / run.seconds}} if goodput else {}),
        **{f"{name}_ms": _spread(raw[name]) for name in METRICS},
        "client": {"cpu_share": busy, "send_lag_ms": _spread(lags)},
        "repeats": {f"{name}_ms": [round(v, 3) for v in raw[name]] for name in ("ttft", "tpot", "e2el")},
    }


def _spread(values: list[float]) -> dict[str, float] | None:
    """Mean, median, 99th percentile and maximum; None without values."""
    if not values:
        return None
    found = {f"p{n}": percentile(values, n) for n in (50, 99)}
    return {"mean": sum(values) / len(values), **found, "max": max(values)}


def _table(results: Sequence[dict[str, Any]]) -> str:
    """At most 100 columns: a load has a line, and a second one for what the server counted."""
    head = f"{'load, p50/p99 in ms':>24} {'done':>6} {'req/s':>7} {'tok/s':>7}"
    lines = [head + "".join(f"{name:>13}" for name in METRICS)]
    for r in results:
        limit = f" x{r['max_concurrency']}" if r["max_concurrency"] else ""
        name = f"{r['request_rate']}{limit}, {r['input_len']}/{r['output_len']}"
        spreads = [r[f"{m}_ms"] or {"p50": math.nan, "p99": math.nan} for m in METRICS]
        columns = "".join(f"{_ms(s['p50']) + '/' + _ms(s['p99']):>13}" for s in spreads)
        rates = f"{r['requests_per_s']:7.2f} {r['output_tokens_per_s']:7.0f}"
        lines.append(f"{name:>24} {r['completed']:6} {rates}{columns}")
        lines += [f"    {count} x {error}" for error, count in r["errors"].items()]
        counted = [f"{name} +{value:g}" for name, value in r.get("counters", {}).items()]
        told = [f"client CPU {r['client']['cpu_share']:.0%}", *counted]
        lines.append(textwrap.fill(", ".join(told), 100, initial_indent="    ", subsequent_indent="    "))
    return "\n".join(lines)


def _ms(value: float) -> str:
    """Milliseconds in at most 6 characters, up to 1,000 s."""
    return f"{value:.{2 if value < 100 else 1 if value < 1000 else 0}f}"
