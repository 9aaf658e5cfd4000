"""Sampling parameters through the Qwen3 engine: its tokens are those of the definition on the tokens so far, whatever
the batch, cached prefixes and preemptions around them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from openinfer.frontend.contract import Finished, Rejected, Request
from openinfer.kernels import Op
from openinfer.recipes.engine.engine import Engine
from openinfer.recipes.qwen3.recipe import build
from openinfer.sampler import SamplingParams, sample

FAVOURED = tuple((token, 6.0) for token in range(100, 140))
ASKED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.4},
    {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": ((7, 8.0),)},
    {"temperature": 0.8, "presence_penalty": 2, "logit_bias": FAVOURED, "top_p": 0.9},
    {"allowed_token_ids": tuple(range(50, 60)), "min_tokens": 5},
    {"allowed_token_ids": (4, 5, 6), "bad_words_token_ids": ((4, 4), (5, 6), (6, 5, 4), (6, 6, 6))},
    {
        "logit_bias": FAVOURED,
        "repetition_penalty": 2,
        "bad_words_token_ids": ((101,), (102, 103)),
        "top_k": 30,
    },
    {"temperature": 0, "repetition_penalty": 0.8, "frequency_penalty": 0.7, "logit_bias": ((2, 3.0),)},
]
MAX_TOKENS = 40


class TapPack:
    """The engine's pack, keeping the logits that every row was sampled from, by its length so far and its seed."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.logits: dict[tuple[int, int, int], np.ndarray[Any, Any]] = {}

    def run(self, op: Op[Any], args: Mapping[str, Any]) -> None:
        if op.name == "sample":
            a = {name: tensor.numpy() for name, tensor in args.items()}
            for r, slot in enumerate(a["slots"]):
                if a["alive"][slot] and a["emits"][r]:
                    position = int(a["seq_lens"][slot] + a["q_starts"][r + 1] - a["q_starts"][r])
                    self.logits[(position, *a["seeds"][slot].tolist())] = a["logits"][r].copy()
        self.inner.run(op, args)


def requests() -> list[Request]:
    rng, shared = random.Random(4), random.Random(5).choices(range(3, 1000), k=40)
    return [
        Request(
            id=i,
            prompt_token_ids=[*shared, *rng.choices(range(3, 1000), k=1 + 7 * i)],
            sampling=SamplingParams(**asked, seed=i, ignore_eos=True),
            max_tokens=MAX_TOKENS,
            arrival=0.0,
        )
        for i, asked in enumerate(ASKED)
    ]


def run(engine: Engine, wanted: list[Request]) -> dict[int, list[int]]:
    """The tokens of each request."""
    for request in wanted:
        engine.submit(request)
    tokens: dict[int, list[int]] = {request.id: [] for request in wanted}
    left = len(wanted)
    while left:
        outputs = engine.step(0.1)
        for request_id, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
            tokens[request_id].append(token)
        left -= sum(isinstance(update, Finished) for update in outputs.updates)
        assert not any(isinstance(update, Rejected) for update in outputs.updates)
    return tokens


def make(path: Any, cache_bytes: int, **flags: Any) -> Engine:
    return build(str(path), device="cpu", max_model_len=256, kv_cache_memory_bytes=cache_bytes, **flags)


def test_tokens_are_those_of_the_definition(tiny: Any) -> None:
    engine, wanted = make(tiny.path, 64 << 20, max_num_seqs=8), requests()
    engine.runner.pack = tap = TapPack(engine.runner.pack)
    engine.runner.record()
    got = run(engine, wanted)
    engine.close()
    for request in wanted:
        p, prompt, output = request.sampling, request.prompt_token_ids, got[request.id]
        assert p.seed is not None
        assert len(output) == MAX_TOKENS
        lengths = range(len(prompt), len(prompt) + MAX_TOKENS)
        want = sample(
            np.stack([tap.logits[(length, p.seed, 0)] for length in lengths]),
            [p] * MAX_TOKENS,
            lengths,
            prompts=[prompt] * MAX_TOKENS,
            outputs=[output[:n] for n in range(MAX_TOKENS)],
        )
        assert output == want.token_ids.tolist(), p
    assert set(got[4]) <= set(range(50, 60))
    assert not any(pair in ((4, 4), (5, 6)) for pair in zip(got[5], got[5][1:], strict=False))


def test_neither_batch_nor_preemption_nor_cached_prefix_changes_a_token(tiny: Any) -> None:
    wanted = requests()
    roomy = make(tiny.path, 64 << 20, max_num_seqs=8)
    together = run(roomy, wanted)
    again = run(roomy, wanted)
    hits, none = roomy.stats().prefix_hit_tokens, roomy.stats().preemptions
    roomy.close()
    small = make(tiny.path, 26 * 16 * 8192, max_num_seqs=8)
    preempted, count = run(small, wanted), small.stats().preemptions
    alone = {i: tokens for request in wanted[::3] for i, tokens in run(small, [request]).items()}
    small.close()
    assert hits > 0 == none < count
    assert together == again == preempted == {**together, **alone}


@pytest.mark.parametrize(
    "asked",
    [
        {"logit_bias": ((1024, 1.0),)},
        {"allowed_token_ids": (3, 5000)},
        {"bad_words_token_ids": ((1, 2), (3, 1024))},
    ],
    ids=str,
)
def test_ids_past_the_vocabulary_are_refused(tiny: Any, asked: dict[str, Any]) -> None:
    engine = make(tiny.path, 16 << 20, max_num_seqs=1)
    sampling = SamplingParams(**asked)
    engine.submit(Request(id=1, prompt_token_ids=[1], sampling=sampling, max_tokens=1, arrival=0.0))
    (update,) = engine.step(0.0).updates
    engine.close()
    assert {"penalties", "logit_bias", "allowed_token_ids", "bad_words"} <= set(engine.info.features)
    assert isinstance(update, Rejected)
    assert f"token {sampling.max_token_id}; ids must be in [0, 1024)" in update.reason
