"""The step benchmark: how long prefill and decode steps take, on the device and through the engine."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from openinfer.frontend.contract import Request
from openinfer.recipes.qwen3.engine import Qwen3Engine
from openinfer.recipes.qwen3.gate import Forced
from openinfer.sampler import SamplingParams
from openinfer.tensor import Event


def device_decode_ms(engine: Qwen3Engine, rows: int, context: int, repeats: int = 40) -> list[float]:
    """Milliseconds of device time of decode steps (both segments) of `rows` sequences of `context` tokens, each with
    its own random tokens in the cache. The engine must be idle and have no prefix cache."""
    runner, rng = engine.runner, np.random.default_rng(rows * 100003 + context)
    forced, vocab = Forced(runner), engine.info.vocab_size
    for slot in range(1, rows + 1):
        forced.join(slot, context + repeats + 8)
        forced.feed(slot, rng.integers(0, vocab, context - 4).tolist(), runner.buckets.mixed_tokens[-1])
        runner.model.rows.set("limits", slot, 1 << 30)
    forced.step([(slot, [int(rng.integers(vocab))]) for slot in range(1, rows + 1)])
    state = runner.model.rows
    state.write("emits", 0, np.ones(rows, np.int32))
    state.write("prompt", 0, np.full(rows, -1, np.int32))
    forced.upload()
    tokens, num_rows, longest = runner.buckets.choose(rows, rows)
    marks = [Event(runner.stream.device, timing=True) for _ in range(repeats + 1)]
    for mark in marks:
        mark.record(runner.stream)
        runner.graphs.launch(("forward", tokens, num_rows, longest))
        runner.graphs.launch(("sample", num_rows))
    runner.stream.synchronize()
    state.write("emits", 0, np.zeros(rows, np.int32))
    forced.leave()
    return [after.elapsed_s(before) * 1e3 for before, after in itertools.pairwise(marks[2:])]


def engine_run(
    engine: Qwen3Engine, prompts: Sequence[Sequence[int]], num_tokens: int
) -> tuple[float, list[float]]:
    """Submit the prompts at once, greedy; wall seconds to the first token of the last of them, and of every step after
    that in which all of them got one."""
    start = time.perf_counter()
    for n, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        engine.submit(
            Request(
                id=-1 - n,
                prompt_token_ids=list(prompt),
                sampling=params,
                max_tokens=num_tokens,
                arrival=start,
            )
        )
    begun: set[int] = set()
    first, last, steps, terminals = 0.0, 0.0, [], 0
    while terminals < len(prompts):
        outputs = engine.step(1.0)
        now = time.perf_counter()
        terminals += sum(update.id < 0 and hasattr(update, "reason") for update in outputs.updates)
        if len(begun) == len(prompts) and len(outputs.request_ids) == len(prompts):
            steps.append(now - last)
        if outputs.request_ids:
            begun.update(outputs.request_ids)
            if not first and len(begun) == len(prompts):
                first = now - start
            last = now
    return first, steps


def step_bench(engine: Qwen3Engine, *, context: int = 1024, repeats: int = 5) -> dict[str, Any]:
    """Decode at batch 1 and prefill of `context` tokens, fresh random ids each time; medians and every repeat."""
    rng, vocab = np.random.default_rng(7), engine.info.vocab_size

    def prompt() -> list[int]:
        return [int(t) for t in rng.integers(0, vocab, context)]

    engine_run(engine, [prompt()], 8)
    prefill, decode = [], []
    for _ in range(repeats):
        first, steps = engine_run(engine, [prompt()], 33)
        prefill.append(first * 1e3)
        decode += [s * 1e3 for s in steps]
    device = device_decode_ms(engine, 1, context)
    return {
        "context": context,
        "prefill_ms": statistics.median(prefill),
        "decode_ms": statistics.median(decode),
        "device_decode_ms": statistics.median(device),
        "repeats": {"prefill_ms": prefill, "decode_ms": decode, "device_decode_ms": device},
    }
