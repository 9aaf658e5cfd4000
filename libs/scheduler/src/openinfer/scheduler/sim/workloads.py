"""Workloads: lists of requests. A seed always gives the same list."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from ..errors import InvalidSetup

VOCABULARY = 1 << 15
TRACE_BLOCK = 512
"""Tokens of each hash_id in a trace."""

Range: TypeAlias = tuple[int, int]
"""Range of a length in tokens, both ends included, drawn evenly."""


@dataclass(slots=True)
class Request:
    """One request of a workload."""

    arrival: float
    """Seconds. With `after`, seconds from the end of that request."""
    prompt: list[int]
    output: list[int]
    """The output of the model. Only the simulator reads it."""
    max_tokens: int
    """The client's limit, >= len(output)."""
    after: int | None = None
    """Position in the workload of the request that this one continues."""
    tenant: str = ""
    priority: int = 0


def poisson(
    num_requests: int,
    rate: float,
    prompt_tokens: Range = (1024, 1024),
    output_tokens: Range = (128, 128),
    *,
    seed: int = 0,
) -> list[Request]:
    """`rate` independent requests per second. Their prompts share nothing."""
    requests = bursts(num_requests, rate, prompt_tokens, output_tokens, size=1, seed=seed)
    return [replace(request, tenant="") for request in requests]


def bursts(
    num_requests: int,
    rate: float,
    prompt_tokens: Range = (1024, 1024),
    output_tokens: Range = (128, 128),
    *,
    size: int = 32,
    seed: int = 0,
) -> list[Request]:
    """Bursts of `size` requests at random times, `rate` a second on average. Each burst has its own tenant."""
    rng, now, requests = random.Random(seed), 0.0, []
    for number in range(num_requests):
        if number % size == 0:
            now += rng.expovariate(rate / size)
        prompt, output = _tokens(rng, prompt_tokens), _tokens(rng, output_tokens)
        requests.append(Request(now, prompt, output, len(output), tenant=f"tenant {number // size}"))
    return requests


def chats(
    num_requests: int,
    rate: float,
    prompt_tokens: Range = (32, 256),
    output_tokens: Range = (64, 256),
    *,
    turns: int = 8,
    system_tokens: int = 512,
    think_s: float = 5.0,
    seed: int = 0,
) -> list[Request]:
    """Conversations of `turns` requests: each prompt is all that was said, and prompt_tokens more; the next comes
    think_s seconds (on average) after the answer. All begin with one system prompt. `rate`: requests a second, of
    which one in `turns` opens a conversation."""
    rng, now, requests = random.Random(seed), 0.0, list[Request]()
    system = _tokens(rng, (system_tokens, system_tokens))
    while len(requests) < num_requests:
        now += rng.expovariate(rate / turns)
        said, tenant = system, f"tenant {len(requests) // turns}"
        for turn in range(min(turns, num_requests - len(requests))):
            prompt, output = said + _tokens(rng, prompt_tokens), _tokens(rng, output_tokens)
            said = prompt + output
            arrival = rng.expovariate(1 / think_s) if turn else now
            after = len(requests) - 1 if turn else None
            requests.append(Request(arrival, prompt, output, len(output), after, tenant))
    return requests


def read_trace(path: str | Path, *, speed: float = 1.0) -> list[Request]:
    """A recorded trace: JSON lines of {"timestamp": milliseconds, "input_length", "output_length"} and perhaps
    "hash_ids" (equal ids: equal blocks of 512 tokens; the format of Mooncake's traces), "tenant" and "priority".
    `speed` 2: twice as fast. Raises InvalidSetup, OSError."""
    requests = []
    with open(path) as lines:
        for number, line in enumerate(lines):
            try:
                entry = json.loads(line)
                prompt = list(_trace_prompt(number, entry.get("hash_ids"), entry["input_length"]))
                output = _tokens(random.Random(~number), (entry["output_length"],) * 2)
                arrival = entry["timestamp"] / 1000 / speed
            except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
                raise InvalidSetup(f"{path}, line {number + 1} is no request: {error!r}") from error
            tenant, priority = entry.get("tenant", ""), entry.get("priority", 0)
            requests.append(Request(arrival, prompt, output, len(output), None, tenant, priority))
    return requests


def _trace_prompt(number: int, hash_ids: list[int] | None, length: int) -> Iterator[int]:
    if hash_ids is None:
        yield from _tokens(random.Random(number), (length, length))
        return
    for index, start in enumerate(range(0, length, TRACE_BLOCK)):
        seed = hash_ids[index] if index < len(hash_ids) else f"rest of {number}"
        yield from _tokens(random.Random(seed), (min(TRACE_BLOCK, length - start),) * 2)


def _tokens(rng: random.Random, length: Range) -> list[int]:
    return rng.choices(range(VOCABULARY), k=rng.randint(*length))
