"""A whole engine in a page or two: a pool, a step loop and a sampler around a model that is a table of bigrams.

It needs neither a GPU nor a recipe. These parts are real:

- continuous batching with chunked prefill;
- a paged cache with shared prefixes;
- a step launched before the last one is read;
- rows that end by themselves;
- seeded sampling.

    python examples/toy_engine.py
"""

from collections import deque

import numpy as np

from openinfer.kvpool import Group, Pool
from openinfer.sampler import SamplingParams, sample
from openinfer.scheduler import (
    Finished,
    FinishReason,
    FirstCome,
    Scheduled,
    Seq,
    Step,
    StepLoop,
    StepResult,
    Tokens,
)

CORPUS = """the pool lends blocks to a sequence and the loop plans the step
the step runs on the device and the loop reads what the step before it made
a row that ends stays in the step that is in flight and its blocks go back to the pool after it
"""
ALPHABET = sorted(set(CORPUS))
END = ALPHABET.index("\n")
BLOCK_SIZE = 8


class Model:
    """Bigram logits, and a taste for what the sequence holds already: so it has to read its cache."""

    def __init__(self) -> None:
        counts = np.full((len(ALPHABET), len(ALPHABET)), 1e-3, np.float32)
        ids = encode(CORPUS)
        np.add.at(counts, (ids[:-1], ids[1:]), 1)
        self.bigrams = np.log(counts / counts.sum(1, keepdims=True))

    def __call__(self, context: np.ndarray) -> np.ndarray:
        """Tokens of one sequence, int[n] -> logits of the next, f32[vocabulary]."""
        seen = np.bincount(context, minlength=len(ALPHABET)).astype(np.float32)
        return self.bigrams[context[-1]] + 0.2 * np.log1p(seen)


class Runner:
    """The "device": slots with block tables and lengths, and pages of tokens as the cache."""

    def __init__(self, model: Model, num_blocks: int, max_rows: int, max_model_len: int) -> None:
        self.model = model
        self.pages = np.zeros((num_blocks, BLOCK_SIZE), np.int32)
        self.tables = np.zeros((max_rows + 1, -(-max_model_len // BLOCK_SIZE)), np.int32)
        self.lengths = np.zeros(max_rows + 1, np.int32)
        self.last = np.zeros(max_rows + 1, np.int32)
        self.alive = np.zeros(max_rows + 1, bool)
        self.results: deque[StepResult] = deque()

    def launch(self, step: Step) -> None:
        self.alive[step.left] = False
        for seq in step.joined:
            self.alive[seq.slot], self.lengths[seq.slot] = True, seq.lease.num_cached
        for seq, _, first, blocks in step.blocks:
            self.tables[seq.slot, first : first + len(blocks)] = blocks
        tokens = np.full(len(step.rows), -1)
        finished = []
        emitting = []
        for index, (seq, num_tokens, emits, start) in enumerate(step.rows):
            if self.alive[seq.slot]:
                chunk = [self.last[seq.slot]] if start is None else seq.tokens[start : start + num_tokens]
                self.store(seq.slot, chunk)
                if emits:
                    emitting.append((index, seq))
        if emitting:
            logits = np.stack([self.model(self.context(seq.slot)) for _, seq in emitting])
            params = [seq.owner for _, seq in emitting]
            positions = [int(self.lengths[seq.slot]) for _, seq in emitting]
            for (index, seq), token in zip(
                emitting, sample(logits, params, positions).token_ids, strict=True
            ):
                tokens[index] = self.last[seq.slot] = token
                if token == END or self.lengths[seq.slot] + 1 == seq.max_len:
                    self.alive[seq.slot] = False
                    finished.append((seq.slot, FinishReason.STOP if token == END else FinishReason.LENGTH))
        self.results.append(StepResult(step.index, finished, tokens))

    def collect(self, wait_s: float | None) -> StepResult | None:
        return self.results.popleft() if self.results else None

    def store(self, slot: int, tokens: list[int]) -> None:
        where = np.arange(self.lengths[slot], self.lengths[slot] + len(tokens))
        self.pages[self.tables[slot, where // BLOCK_SIZE], where % BLOCK_SIZE] = tokens
        self.lengths[slot] += len(tokens)

    def context(self, slot: int) -> np.ndarray:
        where = np.arange(self.lengths[slot])
        return self.pages[self.tables[slot, where // BLOCK_SIZE], where % BLOCK_SIZE]


def encode(text: str) -> list[int]:
    return [ALPHABET.index(letter) for letter in text]


def serve(prompts: list[str], num_blocks: int = 24) -> tuple[list[str], StepLoop, Pool]:
    """Complete all prompts in one batch."""
    pool = Pool([Group("tokens", BLOCK_SIZE, num_blocks)])
    runner = Runner(Model(), num_blocks, max_rows=4, max_model_len=96)
    loop = StepLoop(runner, pool, FirstCome(max_batched_tokens=32), max_rows=4, max_model_len=96)
    seqs = [
        Seq(number, encode(prompt), 40, owner=SamplingParams(temperature=0.5, seed=number))
        for number, prompt in enumerate(prompts)
    ]
    for seq in seqs:
        loop.submit(seq)
    while loop.has_work:
        for event in loop.step(1.0):
            match event:
                case Scheduled(seq, num_cached):
                    print(f"{seq.id}: starts, {num_cached} of {seq.prompt_len} tokens cached")
                case Tokens():
                    for position, seq in event.emitting():
                        seq.tokens.append(int(event.payload[position]))
                case Finished(seq, reason):
                    print(f"{seq.id}: {reason.value} after {seq.num_output} tokens")
    return ["".join(ALPHABET[token] for token in seq.tokens) for seq in seqs], loop, pool


if __name__ == "__main__":
    SYSTEM = "the loop plans the step and "
    texts, loop, pool = serve(
        [SYSTEM + end for end in ("the pool ", "a row ", "its blocks ", "the device ", "what ", "it ")]
    )
    print(*map(repr, texts), loop.stats, pool.stats, sep="\n")
