"""Training examples as token ids, in rows of a few lengths."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from chat import Chat
from extraction import extraction
from families import FAMILIES, prompt_and_answer
from structured import beyond, structured
from sums import arithmetic, counting, sorting, spelling
from talk import fact, greeting, memory, story, unknown
from tokenizers import Tokenizer

from tools import refusal, simpler, tool_answer, tool_call, tools_unneeded

Array = np.ndarray[Any, Any]
MIX: dict[Callable[[Random], Chat], int] = {
    fact: 15, arithmetic: 18, counting: 6, spelling: 6, sorting: 7, extraction: 15, tool_call: 13, tool_answer: 6, refusal: 5,
    tools_unneeded: 2, memory: 6, greeting: 5, unknown: 3, story: 3, structured: 20, beyond: 5,
}  # fmt: skip
"""Of so many in 135 chats."""
FIRST = {"structured": 0, "beyond": 0}
"""Shares of the text from which the tokenizers come, and of what Qwen3.5 and DeepSeek-V4 learned."""
LENGTHS = (64, 128, 320, 704)
"""Tokens of a row; longer chats are left out."""
PART = 1000
"""Chats that one process makes at a time."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Chats of about one length: ids uint16 [N, length + 1], padded with 0; prompt and total int16 [N] tokens."""

    ids: Array
    prompt: Array
    total: Array


def chats(seed: int, shares: Mapping[str, int] | None = None) -> Iterator[Chat]:
    """An endless stream of training chats: none that is held out. shares: instead of MIX's, by the makers' names."""
    rng = Random(seed)
    makers, weights = list(MIX), [(shares or {}).get(maker.__name__, share) for maker, share in MIX.items()]
    while True:
        chat = rng.choices(makers, weights)[0](rng)
        if not chat.held_out:
            yield chat


def texts(name: str, seed: int, count: int) -> list[str]:
    """Whole chats as text, for the tokenizer."""
    family = FAMILIES[name]
    render = family.renderer()
    return [
        "".join(prompt_and_answer(family, render, chat))
        for chat, _ in zip(chats(seed, FIRST), range(count), strict=False)
    ]


def examples(
    name: str, folder: Path, seed: int, count: int, shares: Mapping[str, int] | None = None
) -> list[tuple[Array, int]]:
    """So many chats: ids of prompt and answer, which are encoded apart as in a server, and the prompt's length."""
    family = FAMILIES[name]
    render = family.renderer()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng = Random(f"simpler {seed}")
    made = itertools.islice(chats(seed, shares), count)
    pairs = [prompt_and_answer(family, render, simpler(rng, chat)) for chat in made]
    prompts = tokenizer.encode_batch([prompt for prompt, _ in pairs], add_special_tokens=False)
    answers = tokenizer.encode_batch([answer for _, answer in pairs], add_special_tokens=False)
    return [(np.array(p.ids + a.ids, np.uint16), len(p.ids)) for p, a in zip(prompts, answers, strict=True)]


Job = tuple[str, Path, int, int, Mapping[str, int]]


def part(job: Job) -> tuple[Array, Array, Array]:
    """The ids of some chats one after another, the prompts' lengths and the chats' lengths."""
    found = examples(*job)
    prompts = np.array([start for _, start in found], np.int16)
    return (
        np.concatenate([ids for ids, _ in found]),
        prompts,
        np.array([len(ids) for ids, _ in found], np.int16),
    )


class Maker:
    """Makes about `count` chats in other processes, while this one does something else. The same for the same
    arguments. To be made before anything touches the GPU, because the processes are forked."""

    def __init__(
        self, name: str, folder: Path, seed: int, count: int, processes: int, shares: Mapping[str, int]
    ) -> None:
        jobs = [(name, folder, seed * 1_000_003 + n, PART, shares) for n in range(-(-count // PART))]
        self._pool = multiprocessing.get_context("fork").Pool(processes)
        self._parts = self._pool.map_async(part, jobs, chunksize=1)

    def rows(self) -> dict[int, Rows]:
        """Wait for all of them."""
        found = self._parts.get()
        self._pool.terminate()
        return in_rows(found)


def in_rows(parts: list[tuple[Array, Array, Array]]) -> dict[int, Rows]:
    """Chats by length."""
    flat, prompt, total = (np.concatenate(column) for column in zip(*parts, strict=True))
    starts = np.cumsum(total.astype(np.int64)) - total
    rows, lower = {}, 0
    for length in LENGTHS:
        (chosen,) = np.nonzero((total > lower) & (total <= length + 1))
        lower = length + 1
        places = starts[chosen, None] + np.arange(length + 1)
        inside = np.arange(length + 1) < total[chosen, None]
        ids = np.where(inside, flat[np.minimum(places, len(flat) - 1)], 0).astype(np.uint16)
        rows[length] = Rows(ids, prompt[chosen], total[chosen])
    return rows
