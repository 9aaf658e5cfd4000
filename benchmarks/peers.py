"""Prefill and decode on engines of their own, on two GPUs of one host if there are two.

    python benchmarks/peers.py MODEL_DIR [--ways shared tcp nixl] [--gpus 0 1] [--tokens N ...] [--json FILE]

An engine computes a prompt of 16,384 tokens, and another one fetches its KV and goes on. By default it maps the first
one's memory (shared), as engines of one host do; with tcp and nixl they take each other for engines of two hosts.
Weights are random, so MODEL_DIR needs only config.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from driven import FRESH, LONG, SHORT, Json, driven, loads_seen

from openinfer.frontend.kv_transfer import KVTransfer

BUFFER_BYTES = 3.2e9
"""Host memory of each engine: the second long prompt evicts the first."""


def first(outcome: Any) -> dict[int, float]:
    """The likeliest first tokens."""
    entry = outcome.logprobs[0]
    return dict(zip(entry.top_token_ids, entry.top_logprobs, strict=True))


def error(one: dict[int, float], other: dict[int, float]) -> float:
    """The mean difference of log-probabilities of tokens that both have; 9 where they have none."""
    return float(np.mean([abs(one[token] - other[token]) for token in one.keys() & other.keys()] or [9.0]))


def _serve_prefill(model_dir: Path, flags: Json, gpu: str, link: Any) -> None:
    """The prefill engine, in a process of its own: prompts come, parameters of transfers go."""
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    with driven(model_dir, **flags) as one:
        one.run(one.prompt(SHORT))
        link.send("ready")
        while (prompt := link.recv()) is not None:
            began = time.perf_counter()
            number = one.submit(prompt, 1, kv_transfer=KVTransfer(do_remote_decode=True), logprobs=10)
            one.until(lambda number=number: number in one.ended)  # type: ignore[misc]
            outcome = one.session.outcomes[number]
            link.send((outcome.terminals[0].kv_transfer, 1e3 * (time.perf_counter() - began), first(outcome)))
            # It waits in recv now, as a server's engine does. A loop of steps would hold the interpreter's lock, which
            # the threads that serve the other engine need for each word.


def peers(model_dir: Path, way: str, gpus: Sequence[str], lengths: Sequence[int]) -> Json:
    """Prompts of these lengths, which one engine computes and another goes on with."""
    connector = "NixlConnector" if way == "nixl" else "TcpConnector"
    config = {
        "kv_connector": connector,
        "kv_port": 0,
        "kv_buffer_size": BUFFER_BYTES,
        "kv_connector_extra_config": {"share_memory": way == "shared"},
    }
    flags: Json = {"kv_transfer_config": json.dumps(config), "kv_cache_memory_bytes": 12 << 30}
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_serve_prefill, args=(model_dir, flags, gpus[-1], theirs))
    child.start()
    found: Json = {"way": way, "gpus": list(gpus)}
    try:
        with driven(model_dir, **flags) as one, loads_seen() as seen:
            if ours.recv() != "ready":
                raise RuntimeError("the prefill engine did not start")
            one.run(one.prompt(SHORT))
            one.run(one.prompt(LONG))
            one.wait_for_memory()
            time.sleep(1.0)  # the other locks its memory too
            rows = []
            for length in lengths:
                prompt = one.prompt(length)
                began = time.perf_counter()
                ours.send(prompt)
                given, prefill_ms, theirs_first = ours.recv()
                number = one.run(prompt, 8, kv_transfer=given, logprobs=10)
                fetched = one.session.outcomes[number]
                total_ms = 1e3 * (time.perf_counter() - began)
                ttft_ms = 1e3 * (one.times[number][1] - began)
                one.engine.pool.reset_prefix_cache()
                plain = one.run(prompt, 8, logprobs=10)
                own = one.session.outcomes[plain]
                rows.append({
                    "tokens": length, "cached": fetched.cached, "prefill_ms": prefill_ms,
                    "decode_ttft_ms": one.ttft_ms(number),
                    "ttft_ms": ttft_ms, "total_ms": total_ms, "one_engine_ttft_ms": one.ttft_ms(plain),
                    "same_tokens": sum(x == y for x, y in zip(fetched.tokens, own.tokens, strict=True)),
                    "error": error(first(fetched), first(own)),
                    "error_of_prefill": error(theirs_first, first(own)),
                })  # fmt: skip
                print(rows[-1], one.engine.stats().offload_blocks, flush=True)
            found["rows"] = rows
            found["load_gb_per_s"] = [load.blocks * one.page_bytes / load.seconds / 1e9 for load in seen]
            ours.send(None)
    finally:
        child.join(10)
        if child.is_alive():
            child.kill()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model_dir", type=Path)
    add("--json", type=Path)
    add("--ways", nargs="+", choices=["shared", "tcp", "nixl"], default=["shared"])
    add("--gpus", nargs="+", default=[""], help="GPUs of the engines; the last has the prefill engine")
    add("--tokens", nargs="+", type=int, default=[LONG, LONG, FRESH, FRESH], help="tokens of each prompt")
    args = parser.parse_args()
    found: Json = {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d")}
    for way in args.ways:
        found[way] = peers(args.model_dir, way, args.gpus, args.tokens)
        print(way, json.dumps(found[way]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
