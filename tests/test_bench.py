"""The yardsticks `openinfer bench ...` and `openinfer explain`, on the CPU with the tiny checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import math
import random
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from module_files import module_at

from openinfer.cli import bench, explain
from openinfer.cli.bench import client as bench_client
from openinfer.cli.bench import fake as bench_fake
from openinfer.cli.bench import host as bench_host
from openinfer.cli.bench import idle as bench_idle
from openinfer.cli.bench import ops as bench_ops
from openinfer.cli.bench import serve as bench_serve
from openinfer.cli.bench import server as bench_server
from openinfer.cli.bench import step as bench_gaps
from openinfer.cli.bench import step as bench_step
from openinfer.cli.bench.client import Client, LoadRun, StreamedAnswer, arrivals, run_load
from openinfer.cli.bench.record import percentile
from openinfer.cli.bench.serve import OfferedLoad, serve_summary
from openinfer.cli.explain.ledger import CallRecorder, Machine, grouped, ledger_key, recorded_calls
from openinfer.cli.explain.segments import SERVED, Outline
from openinfer.graph.runner import Leader, LoneLeader, Writer
from openinfer.kernels import H200, Cost, NullPack, Workload, attention_sublayer
from openinfer.recipes.deepseek_v4 import published as deepseek_v4
from openinfer.recipes.engine import Source
from openinfer.recipes.qwen3 import RECIPE
from openinfer.recipes.qwen3 import published as qwen3
from openinfer.recipes.qwen3_5 import published as qwen3_5
from openinfer.tensor import Checkpoint

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = Path(__file__).parent / "goldens" / "qwen3-tiny"
SMALL = ["--device", "cpu", "--max-num-seqs", "3", "--max-num-batched-tokens", "32",
         "--kv-cache-memory-bytes", "8000000"]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def heap() -> Iterator[None]:
    """The yardsticks collect garbage before they measure, but not among all that the tests before have left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


# -- the client --


@contextlib.asynccontextmanager
async def scripted(reply: Callable[[bytes], list[bytes]]) -> AsyncIterator[str]:
    """An HTTP server that answers each request with the pieces that `reply` gives, 10 ms between two."""

    open_connections = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_connections.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                for n, piece in enumerate(reply(body)):
                    if n:
                        await asyncio.sleep(0.01)
                    if not piece:
                        raise ConnectionError
                    writer.write(piece)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.gather(*open_connections)


def ask(reply: Callable[[bytes], list[bytes]], count: int = 1, limit: int = 1) -> list[StreamedAnswer]:
    async def run() -> list[StreamedAnswer]:
        async with scripted(reply) as url:
            client = Client(url, "m")
            done = await run_load(client, [client.message([1, 2], 3)] * count, [0.0] * count, limit)
            client.close()
            return done.answers

    return asyncio.run(run())


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 4}}\n\n'
END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def test_a_stream_is_timed_by_its_chunks_and_counted_by_its_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that ticks when it is read: once for the bytes that come together."""
    seen, ticks = [], itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)), process_time=lambda: 0.0)
    monkeypatch.setattr(bench_client, "time", clock)

    def reply(body: bytes) -> list[bytes]:
        seen.append(json.loads(body))
        return [HEAD, chunk(TOKEN), chunk(TOKEN) + chunk(TOKEN), chunk(USAGE) + END]

    first, second = ask(reply, count=2)
    for answer in (first, second):
        assert answer.error == ""
        assert (answer.prompt_tokens, answer.output_tokens) == (2, 4)
        assert len(answer.gaps) == 2  # three chunks with choices; the one with usage is none
        assert answer.gaps[0] >= 1
        assert answer.gaps[1] == 0.0  # two in one read
        assert 1 <= answer.ttft < answer.e2el
        assert math.isclose(answer.tpot, (answer.e2el - answer.ttft) / 3)
    assert seen[0] == seen[1] == {
        "model": "m", "prompt": [1, 2], "max_tokens": 3, "temperature": 0.0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


@pytest.mark.parametrize("cut", [1, 7, 30, 51, 60, 83, 90, 120])
def test_where_the_network_cuts_does_not_matter(cut: int) -> None:
    whole = HEAD + chunk(TOKEN) + chunk(TOKEN[:9]) + chunk(TOKEN[9:] + USAGE) + END
    (answer,) = ask(lambda body: [whole[:cut], whole[cut:]])
    assert answer.error == ""
    assert (len(answer.gaps), answer.output_tokens) == (1, 4)


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nfull"], "HTTP status 503: full"),
        ([HEAD, chunk(TOKEN), chunk(b'data: {"error": {"message": "oh"}}\n\n') + END], "the server said:"),
        ([HEAD, chunk(TOKEN), b""], "the server closed the connection"),
        ([HEAD, chunk(TOKEN) + END], "an answer without usage"),
        ([HEAD, chunk(USAGE) + END], "an answer without tokens"),
        ([HEAD, b"zz\r\n"], "the answer cannot be read"),
        ([HEAD, chunk(b"data: {\n\n")], "the answer cannot be read"),
    ],
)
def test_what_goes_wrong_is_an_error_of_that_request(pieces: list[bytes], error: str) -> None:
    (answer,) = ask(lambda body: pieces)
    assert answer.error.startswith(error)


def test_a_server_that_is_not_there_is_an_error() -> None:
    async def run() -> LoadRun:
        client = Client("http://127.0.0.1:9", "m")
        return await run_load(client, [client.message([1], 1)], [0.0])

    (answer,) = asyncio.run(run()).answers
    assert answer.error.startswith("no connection")


def test_concurrency_is_limited_and_arrivals_are_kept() -> None:
    whole = [HEAD, chunk(TOKEN) + chunk(USAGE) + END]
    one_by_one = sorted(ask(lambda body: whole, count=4, limit=1), key=lambda a: a.sent)
    assert all(a.last <= b.sent for a, b in itertools.pairwise(one_by_one))
    together = ask(lambda body: whole, count=4, limit=4)
    assert max(a.sent for a in together) < min(a.last for a in together)

    async def spread() -> LoadRun:
        async with scripted(lambda body: whole) as url:
            client = Client(url, "m")
            run = await run_load(client, [client.message([1], 1)] * 3, [0.0, 0.03, 0.06])
            client.close()
            return run

    run = asyncio.run(spread())
    sent = sorted(answer.sent for answer in run.answers)
    assert sent[2] - sent[0] >= 0.03  # the first may be late by what a new connection takes
    assert all(0 <= a.sent - a.due < 0.5 for a in run.answers)
    assert run.seconds >= 0.07
    assert run.cpu_seconds > 0


def test_arrivals_are_poisson_and_offer_the_rate() -> None:
    times = arrivals(2000, 50.0, random.Random(1))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert math.isclose(times[-1], 1999 / 50)
    mean = sum(gaps) / len(gaps)
    variance = sum((g - mean) ** 2 for g in gaps) / len(gaps)
    assert math.isclose(variance, mean**2, rel_tol=0.15)  # exponential
    assert times != arrivals(2000, 50.0, random.Random(2))
    assert arrivals(3, math.inf, random.Random(1)) == [0.0] * 3


def answer(ttft: float, tpot: float, tokens: int = 11, error: str = "") -> StreamedAnswer:
    gaps = [tpot] * (tokens - 1)
    return StreamedAnswer(0.0, 1.0, 1.0 + ttft, 1.0 + ttft + sum(gaps), gaps, 5, tokens, error)


def test_the_summary_of_a_load() -> None:
    answers = [answer(0.1, 0.01), answer(0.2, 0.02), answer(0.3, 0.03), answer(9.0, 9.0, error="lost")]
    load = OfferedLoad(4.0, 4, 0, 5, 11, 0)
    found = serve_summary(load, LoadRun(answers, 2.0, 0.1), {"ttft": 250.0, "tpot": 15.0})
    assert (found["completed"], found["errors"]) == (3, {"lost": 1})
    assert found["requests_per_s"] == 1.5
    assert found["output_tokens_per_s"] == 16.5
    assert found["goodput"]["requests_per_s"] == 0.5
    assert math.isclose(found["ttft_ms"]["p50"], 200)
    assert math.isclose(found["ttft_ms"]["p99"], 298)
    assert math.isclose(found["tpot_ms"]["mean"], 20)
    assert math.isclose(found["itl_ms"]["max"], 30)
    assert math.isclose(found["e2el_ms"]["p50"], 400)
    assert len(found["repeats"]["ttft_ms"]) == 3
    json.dumps(found, allow_nan=False)
    nothing = serve_summary(load, LoadRun([answer(1, 1, error="lost")], 2.0, 0.1), {})
    assert nothing["ttft_ms"] is None
    json.dumps(nothing, allow_nan=False)
    assert "lost" in bench_serve._table([found, nothing])


def test_percentiles_interpolate() -> None:
    assert percentile([3, 1, 2], 50) == 2
    assert percentile([0, 10], 99) == pytest.approx(9.9)
    assert math.isnan(percentile([], 50))


# -- the commands --


def test_bench_serve_starts_a_server_measures_several_loads_and_stops_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serve.json"
    code = bench_serve.main(
        [str(TINY), "--rates", "inf", "50", "--num-prompts", "3", "2", "--max-concurrency", "1", "0",
         "--random-input-len", "20", "--random-output-len", "4", "5", "--num-warmups", "1", "--json", str(path),
         "--goodput", "ttft:60000", "--commit", "abc", "--", *SMALL]
    )  # fmt: skip
    assert code == 0
    data = json.loads(path.read_text())
    assert (data["bench"], data["commit"]) == ("serve", "abc")
    assert data["server"]["ready_s"] > 0
    assert data["server"]["pss_bytes"] > 20e6
    first, second = data["results"]
    assert (first["request_rate"], second["request_rate"]) == ("inf", 50)
    assert (first["completed"], second["completed"]) == (3, 2)
    assert (first["output_tokens"], second["output_tokens"]) == (12, 10)
    assert first["prompt_tokens"] == 60
    assert first["seed"] != second["seed"]
    assert first["goodput"]["requests_per_s"] == first["requests_per_s"]
    said = capsys.readouterr()
    assert "inf x1, 20/4" in said.out
    assert all(len(line) <= 100 for line in said.out.splitlines())
    assert f"openinfer: starting a server of {TINY}" in said.err
    assert "openinfer:  2/2 answers  100 %" in said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [str(TINY), "--rates", "1", "2", "--num-prompts", "1", "2", "3"],
            "--num-prompts has 3 values for 2",
        ),
        ([str(TINY), "--rates", "0"], "must be above 0"),
        ([str(TINY), "--goodput", "speed:1"], "--goodput speed:1: it is ttft:MS"),
        (["--base-url", "ftp://x", "--model", "m"], "is not http://HOST"),
        (["--base-url", "http://127.0.0.1:9"], "Connection refused"),
        ([str(TINY), "--", "--no-such-flag"], "the server is not ready"),
    ],
)
def test_bench_serve_says_what_is_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_serve.main(arguments) == 1
    assert message in capsys.readouterr().err


def test_text_prompts_have_about_the_tokens_that_were_asked_for(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    from openinfer.cli.bench.serve import Text

    text, tokenizer = Text(TINY), Tokenizer.from_file(str(TINY / "tokenizer.json"))
    rng = random.Random(3)
    drawn = [text.draw(40, rng) for _ in range(10)]
    assert len(set(drawn)) == 10
    assert all(abs(len(tokenizer.encode(t).ids) - 40) <= 2 for t in drawn)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Text(tmp_path)


def test_bench_step_measures_points_and_writes_records(tmp_path: Path) -> None:
    path, records = tmp_path / "step.json", tmp_path / "records.json"
    points = ["decode:2,20", "prefill:40", "mixed:2,20,10", "offline:4,10,5"]
    arguments = [str(TINY), *SMALL, "--points", *points, "--repeats", "2"]
    assert bench_step.main([*arguments, "--json", str(path), "--records", str(records)]) == 0
    results = json.loads(path.read_text())["results"]
    assert [r["point"] for r in results] == points
    decode, prefill, mixed, offline = results
    assert len(decode["repeats"]["wall_ms"]) == len(decode["repeats"]["device_ms"]) == 2
    assert len(prefill["repeats"]["device_ms"]) == 2
    assert "wall_ms" not in mixed
    assert offline["output_tokens_per_s"] > 0
    found = json.loads(records.read_text())
    works = [
        [r[n] for n in ("decode_rows", "decode_context", "prefill_tokens", "prefill_context")] for r in found
    ]
    assert works == [
        [2, 40, 0, 0],
        [0, 0, 32, 528],
        [0, 0, 8, 292],
        [2, 40, 10, 55],
    ]  # the prompt in two chunks
    assert all(r["seconds"] > 0 for r in found)


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ("decode:1", "not one of decode:ROWS,CONTEXT"),
        ("decode:1,0", "not one of"),
        ("decode:1,x", "not one of"),
        ("sprint:1", "not one of"),
        ("decode:4,20", "needs 4 rows; this engine has 3 (--max-num-seqs)"),
        ("mixed:1,20,40", "needs 41 tokens in a step; this engine has 32"),
        ("prefill:9999", "tokens in a sequence"),
    ],
)
def test_bench_step_refuses_points_before_it_measures(
    point: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_step.main([str(TINY), *SMALL, "--points", point, "--repeats", "1"]) == 1
    assert message in capsys.readouterr().err


def test_bench_ops_times_every_op_once_and_explain_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ops.json"
    arguments = [str(TINY), *SMALL, "--context", "20", "--tokens", "2", "16", "--repeats", "1"]
    assert bench_ops.main([*arguments, "--json", str(path)]) == 0
    results = json.loads(path.read_text())["results"]
    assert {r["op"] for r in results} == {
        "expand_rows", "embed", "norm_linear", "norm_rope_attend", "linear_add", "gate_up_silu",
        "select_rows", "sample", "top_logprobs", "advance",
    }  # fmt: skip
    assert len({r["key"] for r in results}) == len(results)
    assert all(r["us"] > 0 and len(r["repeats"]["us"]) == 1 for r in results)
    attends = [r["key"] for r in results if r["op"] == "norm_rope_attend"]
    # 2 rows of 20; a prompt of 16 alone; 2 rows and 14 tokens, for the bucket of 3 rows
    for work in (
        "2 rows, 40 cached, 40 pairs",
        "1 rows, 16 cached, 136 pairs",
        "3 rows, 54 cached, 145 pairs",
    ):
        assert sum(k.endswith(work) for k in attends) == 1
    capsys.readouterr()
    small = ["--max-num-seqs", "3", "--max-num-batched-tokens", "32"]
    assert explain.main([str(TINY), *small, "--decode", "2,20", "--ledger", str(path)]) == 0
    text = capsys.readouterr().out
    assert "measured us" in text
    assert not [line for line in text.splitlines() if line.endswith(" -")]  # every op was measured
    assert explain.main([str(TINY), *small, "--decode", "2,21", "--ledger", str(path)]) == 0
    unknown = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith(" -")]
    assert unknown == ["norm_rope_attend", "sum"]


def test_explain_counts_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main([str(TINY), "--prefill", "3000", "--gpu-memory", "3"]) == 0
    text = capsys.readouterr().out
    assert "forward 2048 tokens, 1 rows and sample 1 rows; then forward 1024 tokens" in text
    (attend,) = [line.split() for line in text.splitlines() if line.startswith("norm_rope_attend ")]
    pairs = 3000 * 3001 // 2
    # Layers, heads, head size; norms and rotation are little.
    assert float(attend[4]) == pytest.approx(4 * pairs * 2 * 4 * 128 / 1e9, rel=0.01)
    assert "weights" in text
    assert "blocks of 16 tokens" in text


MIXTURE = qwen3_5.config_json("35B-A3B", fp8=True)


def short(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json with the first eight layers: two of attention and six of states."""
    return {**config, "text_config": {**config["text_config"], "num_hidden_layers": 8}}


@pytest.mark.parametrize(
    ("published", "collectives"),
    [
        (qwen3.config_json("8B"), {"linear_add", "gather_columns"}),
        (qwen3_5.config_json("9B"), {"linear_add", "gather_columns"}),
        (short(MIXTURE), {"linear_add", "reduce_add", "gather_columns"}),
        pytest.param(MIXTURE, {"linear_add", "reduce_add", "gather_columns"}, marks=pytest.mark.slow),
        (deepseek_v4.config_json("Flash", layers=3), {"hc_post", "gather_columns"}),
    ],
    ids=["qwen3", "qwen3_5", "mixture", "whole mixture", "deepseek_v4"],
)
def test_explain_knows_ranks(
    published: dict[str, Any], collectives: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank has and reads less, and bytes travel between ranks in the ops that say so alone."""
    (tmp_path / "config.json").write_text(json.dumps(published))
    weights, experts = [], []
    for ranks in (1, 4):
        small = ["--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "256"]
        assert explain.main([str(tmp_path), *small, "--decode", "8,200", "--ranks", str(ranks)]) == 0
        text = capsys.readouterr().out
        weights += [float(gb) for gb in re.findall(r"weights +([0-9.]+) GB", text)]
        experts += [float(mb) for mb in re.findall(r"^experts\S* +\d+ +\d+ +([0-9.]+)", text, re.M)]
        assert ("link MB" in text) == (ranks > 1)
    links = re.findall(r"^(\w+) .* (\d+\.\d{3})$", text, re.M)
    assert {name for name, link in links if float(link) and name != "sum"} == collectives
    assert weights[1] < 0.5 * weights[0]
    assert not experts or experts[1] == pytest.approx(experts[0] / 4, rel=0.1)  # those that a step reads


def test_explain_shows_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--kv-offload-gb",
        "0.5",
        "--kv-offload-dir",
        "kv",
        "--kv-offload-disk-gb",
        "4",
        "--host-rate",
        "20",
        *("--max-num-seqs", "8", "--max-num-batched-tokens", "64"),
    ]
    assert explain.main([str(TINY), *flags]) == 0
    host, disk = capsys.readouterr().out.splitlines()[-2:]
    assert "tier: host memory 500 MB: " in host
    assert "20 GB/s" in host
    assert "6 GB/s" in disk
    tokens = [int(line.split(": ")[2].split()[0].replace(",", "")) for line in (host, disk)]
    assert tokens[1] == pytest.approx(8 * tokens[0], abs=8)
    assert explain.main([str(TINY), *flags, "--ranks", "2"]) == 0
    ranks = capsys.readouterr().out.splitlines()[-2:]
    assert "40 GB/s" in ranks[0], "each rank copies its half"
    assert ranks[1] == disk, "a record has the parts of all ranks"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--decode", "1"], "it is ROWS,CONTEXT"),
        (["--prefill", "0"], "at least one token"),
        (["--ledger", __file__], "error"),
        (["--decode", "900,20"], "a step has at most 256"),
        (["--ranks", "3"], "3 ranks cannot share it"),
        (["--ranks", "0"], "at least one GPU"),
    ],
)
def test_explain_says_what_is_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain.main([str(TINY), *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_plot_is_drawn_or_matplotlib_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.png"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert explain.main([str(TINY), "--plot", str(path)]) == 1
    said = capsys.readouterr()
    assert "pip install 'openinfer-cli[plot]'" in said.err
    assert said.out == ""  # it is told before the work
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert explain.main([str(TINY), "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_start_that_takes_long_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_server, "SAY_S", 0.05)
    port = bench_server.free_port()
    module = ["openinfer.cli.bench.fake", str(port), str(tmp_path)]
    with bench_server.running(module, port, tmp_path / "log"):
        pass
    assert "openinfer: the server starts, 0 s so far: nothing yet" in capsys.readouterr().err


def test_bench_ops_refuses_what_would_take_a_cpu_hours(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_ops.main([str(TINY), "--device", "cpu", "--context", "500"]) == 1
    (error,) = (line for line in capsys.readouterr().err.splitlines() if "error" in line)
    assert "256 rows of 500 tokens take too long on a CPU: lower --max-num-seqs or --context" in error


def test_tables_fit_100_columns() -> None:
    load = OfferedLoad(123.45, 20000, 1024, 16384, 1024, 0)
    answers = [answer(80.0, 1.0), answer(90.0, 0.9), answer(1, 1, error="lost")]
    served = serve_summary(load, LoadRun(answers, 1e-3, 9e-4), {})
    counted = ("steps", "compiles_after_ready", "allocations_after_ready", "host_waits_after_ready")
    cost = {"us": 1234567.0, "floor_us": 1234567.0, "of_floor": 1.0, "bytes": 10**13, "flops": 10**15}
    key = "norm_rope_attend result[2048x32x128], 256 rows, 12345678 cached, 123456789 pairs"
    link = explain.Line("norm_linear 151936x5120", 9999, 99999, 10**12, 10**14, 1e6, 2e6, 10**9)
    gap = {"p50_us": 1234.5, "max_us": 12345.6, "after": "k" * 200, "before": "k" * 200}
    gaps = {"point": "decode:256,16384", "how": "through the engine", "kernels_a_step": 9999, "span_us": 1e5,
            "device_ms": 100.0, "idle_us": 1e4, "overlapped": 9999, "activities_a_step": 9999,
            "longest_gap_us": 12345.6, "over_limit": 9999, "longest": [gap],
            "kernels": [{"us": 123456.7, "calls": 9999, "name": "k" * 200}]}  # fmt: skip
    step = {"point": "mixed:224,16384,1024", "wall_ms": 12345.6, "device_ms": 12345.6}
    host = {"what": "frontend, 256 clients, 128 tokens, not streamed", "requests_per_s": 12345.6,
            "tokens_per_s": 1234567.8, "cpu_us_a_token": 1234.5, "cpu_us_a_request": 123456.7}  # fmt: skip
    shown = (
        bench_serve._table([{**served, "counters": dict.fromkeys(counted, 1e6)}]),
        bench_ops.line({**cost, "key": key, "calls_a_step": 100}),
        explain.table([link], with_measured=True),
        bench_gaps.gap_table(gaps),
        bench_step._line(step),
        bench_host._line(host),
    )
    assert [line for text in shown for line in text.splitlines() if len(line) > 100] == []


def test_calls_are_told_apart_by_what_their_time_depends_on() -> None:
    outline = Outline(RECIPE, Source.read(TINY), RECIPE.options(max_num_seqs=8), H200)

    def keys(rows: int, context: int) -> list[str]:
        found = []
        for segment in outline.decode(rows, context)[0]:
            recorder, null = CallRecorder(), NullPack(H200)
            segment.run(recorder)
            segment.run(null)
            assert [c.op.name for c in recorder.calls] == [c.op.name for c in null.calls]
            found += [ledger_key(op, args, segment.workload) for op, args in recorder.calls]
            assert sum(map(len, grouped(recorder.calls, segment.workload).values())) == len(recorder.calls)
        return found

    two = keys(2, 20)
    assert two == keys(2, 20)
    other_context = {k.split()[0] for k in set(two) ^ set(keys(2, 21))}
    assert other_context == {"norm_rope_attend"}
    assert not set(two) & set(keys(1, 20))


def test_joined_calls_are_those_that_run_and_are_told_apart_by_their_parts() -> None:
    keys = set()
    options = RECIPE.options(max_num_seqs=8, max_num_batched_tokens=64)
    for size in ("4B", "8B"):
        outline = Outline(RECIPE, Source(RECIPE.published()[size]), options, SERVED)
        (segment, *_), null = outline.decode(1, 20)[0], NullPack(SERVED)
        segment.run(null)
        calls = recorded_calls([segment], SERVED)
        assert [call.op.name for call in calls] == [call.op.name for call in null.calls]
        keys |= {ledger_key(*call, segment.workload) for call in calls if call.op is attention_sublayer}
    assert len(keys) == 2


def test_prompts_of_as_many_tokens_as_rows_are_told_from_decode_steps() -> None:
    outline = Outline(RECIPE, Source.read(TINY), RECIPE.options(max_num_seqs=8), H200)
    recorder, workload = CallRecorder(), Workload(8, 8, 800, 800)
    for longest in (1, 8):
        outline.model.forward(recorder, num_tokens=8, num_rows=8, max_q_len=longest)
    keys = {ledger_key(op, args, workload) for op, args in recorder.calls if op.name == "norm_rope_attend"}
    assert len(keys) == 2
    assert sum("prompts" in one for one in keys) == 1


def test_the_floor_is_the_larger_of_two_times() -> None:
    machine = Machine(1e12, 100e12)
    assert machine.floor_us(Cost(2_000_000, 100_000_000)) == pytest.approx(2)
    assert machine.floor_us(Cost(2_000_000, 1_000_000_000)) == pytest.approx(10)
    assert Workload.decode(2, 10).qk_pairs == 20


def test_bench_host_engine_and_pool() -> None:
    results = bench_host.engine_results(batches=(4,), steps=320)
    for recipe in ("deepseek_v4", "qwen3", "qwen3_5"):
        steady, watch, ranks, change = (r for r in results if r["what"].startswith(f"{recipe}: "))
        assert steady["what"] == f"{recipe}: decode step, nobody joins or leaves, batch 4"
        assert 0 < steady["p50_us"] <= steady["p99_us"]
        assert len(steady["repeats"]["us"]) == 200
        assert watch["what"] == f"{recipe}: trace and watch of such a step, batch 4"
        assert ranks["what"] == f"{recipe}: telling three other ranks of such a step, batch 4"
        # A difference of two blocks: less than nothing where a machine is busy in the wrong one.
        assert watch["p50_us"] <= watch["p99_us"]
        assert all(0 < result["p50_us"] <= result["p99_us"] for result in (ranks, change))
        assert len(change["repeats"]["us"]) == 32
    assert bench_host.pool_result(tokens=256)["mean_us"] > 0


def test_other_ranks_are_told_of_a_decode_step_in_one_message() -> None:
    """Also where rows get blocks: a message takes a microsecond of the host."""
    idle = bench_idle.IdleEngine(RECIPE, 8)
    idle.submit(8)
    idle.fill()
    runner, sent = idle.engine.runner, []
    writer = cast(Writer, SimpleNamespace(send=lambda *message: sent.append(message)))
    runner.leader = Leader(writer)
    runner.leader.begin(runner.graphs.keys())
    idle.steps_us(20)
    assert len(sent) == 20
    assert {len(message) for message in sent} == {1, 3}  # without a delta and with one
    runner.leader = LoneLeader()
    idle.close()


def test_bench_host_frontend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_host, "CLIENTS", 4)
    streamed, whole = bench_host.frontend_results(rounds=2)
    for result in (streamed, whole):
        assert result["errors"] == 0
        assert result["tokens_per_s"] == pytest.approx(bench_host.TOKENS_OUT * result["requests_per_s"])


def test_the_made_up_tokenizer_has_every_word(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    bench_fake.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.decode(bench_fake.WORDS[:2]) == " w300 w301"
    assert tokenizer.get_vocab_size() == bench_fake.VOCAB_SIZE


# -- benchmarks/table.py --


@pytest.fixture(scope="module")
def table() -> ModuleType:
    return module_at(BENCHMARKS / "table.py")


def test_the_table_takes_the_newest_of_each_figure(table: Any, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    (folder / "m").mkdir(parents=True)

    def put(name: str, bench: str, date: str, results: list[dict[str, Any]], **more: Any) -> None:
        data = {"bench": bench, "date": date, "gpu": "G", "results": results, **more}
        (folder / "m" / name).write_text(json.dumps(data))

    put("b.json", "step", "2026-01-01", [{"point": "p", "wall_ms": 9.0}, {"point": "q", "wall_ms": 5.0}])
    put("a.json", "step", "2026-01-02T11:00", [{"point": "p", "wall_ms": 4.0}], commit="0123abcdef")
    load = {"request_rate": 4.0, "max_concurrency": 0, "input_len": 7, "ttft_ms": {"p50": 20.0}}
    put("s.json", "serve", "2026-01-01", [load], server={"pss_bytes": 2e9})
    targets = [
        {
            "table": "m",
            "what": "P",
            "bench": "step",
            "point": "p",
            "metric": "wall_ms",
            "floor": 1,
            "must": 5,
        },
        {
            "table": "m",
            "what": "Q",
            "bench": "step",
            "point": "q",
            "metric": "wall_ms",
            "must": 10,
            "higher": True,
        },
        {"table": "m", "what": "T", "bench": "serve", "point": "4 7", "metric": "ttft_ms.p50", "must": 10},
        {
            "table": "m",
            "what": "S",
            "bench": "serve",
            "point": "server",
            "metric": "pss_bytes",
            "scale": 1e-9,
        },
        {"table": "m", "what": "N", "bench": "serve", "point": "9 7", "metric": "ttft_ms.p50", "must": 10},
    ]
    rows = {line[2]: line for line in table.tables(targets, folder).splitlines() if line.startswith("| ")}
    assert rows["P"] == "| P |  | 1 | 5 |  | 4 | 125% | 25% | [G, 2026-01-02, 0123abc](results/m/a.json) |"
    assert rows["Q"] == "| Q |  |  | 10 |  | 5 | 50% |  | [G, 2026-01-01](results/m/b.json) |"
    assert "| 20 | 50% |" in rows["T"]
    assert "| 2 |" in rows["S"]
    assert "not measured" in rows["N"]


def test_the_documents_have_the_tables_of_the_results(table: Any) -> None:
    """After adding a result: python benchmarks/table.py --write."""
    targets = json.loads((BENCHMARKS / "targets.json").read_text())
    root, results = BENCHMARKS.parent, BENCHMARKS / "results"
    assert table.tables(targets, results) in (BENCHMARKS / "README.md").read_text()
    assert table.beside_vllm(targets, results) in (root / "docs/comparison.md").read_text()
    front = [row for row in targets if row.get("front")]
    assert table.beside_vllm(front, results) in (root / "README.md").read_text()


def test_targets_name_points_that_the_yardsticks_measure() -> None:
    from openinfer.cli.bench.points import POINTS

    targets = json.loads((BENCHMARKS / "targets.json").read_text())
    assert {t["point"] for t in targets if t["bench"] == "step"} == set(POINTS)
    files = (BENCHMARKS / "results" / "host").glob("*.json")
    measured = {result["what"] for path in files for result in json.loads(path.read_text())["results"]}
    assert {t["point"] for t in targets if t["bench"] == "host"} <= measured


def test_bench_names_its_yardsticks(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 0
    out: Any = capsys.readouterr().out
    assert all(name in out for name in bench.YARDSTICKS)
    assert bench.main(["speed"]) == 2
    assert "not one of serve, step, ops, kernels, eval, host" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["qwen3-tiny", "qwen3_5-tiny"])
def test_random_prompts_have_ids_of_the_models_vocabulary(model: str) -> None:
    """Qwen3.5's config.json has its text model one level down."""
    found = bench_serve._vocab_size(TINY.parent / model)
    with Checkpoint(TINY.parent / model) as weights:
        (embedding,) = [name for name in weights.names if name.endswith("embed_tokens.weight")]
        assert found == weights.info(embedding).shape[0]
