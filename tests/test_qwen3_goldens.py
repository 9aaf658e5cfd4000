"""The Qwen3 recipe against the float32 goldens: hidden states, logits, greedy tokens, in any batch and any chunks."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import CpuPack, Op, apply_writes
from openinfer.recipes.qwen3 import RECIPE
from openinfer.recipes.qwen3.model import Model
from openinfer.tensor import Device, Stream, Tensor

TOLERANCE = 1e-3


class TapPack:
    """The cpu pack, keeping a copy of the residual stream wherever an op has changed it."""

    def __init__(self) -> None:
        self.inner = CpuPack()
        self.streams: list[np.ndarray[Any, Any]] = []

    def run(self, op: Op[Any], args: Mapping[str, Any]) -> None:
        self.inner.run(op, args)
        if op.name in ("embed", "linear_add"):
            stream: Tensor = args["out" if op.name == "embed" else "x"]
            self.streams.append(stream.numpy().copy())


@pytest.fixture
def load_model(place: Any) -> Callable[[Any, int], Model]:
    """load_model(golden, max_tokens)"""
    return lambda golden, max_tokens: place(RECIPE, golden.path, [65], max_tokens=max_tokens)


def start_row(model: Model, prompt: list[int]) -> None:
    """Put a sequence into slot 1, with one step that feeds its whole prompt."""
    rows, n = model.batch.rows, len(prompt)
    rows.set("alive", 1, 1)
    rows.set("limits", 1, 1024)
    rows.write("stop_ids", 1, [-1] * 20)
    rows.write("block_tables", 1, list(range(1, 65)))
    rows.set("slots", 0, 1)
    rows.write("q_starts", 0, [0, n])
    rows.set("emits", 0, 1)
    rows.write("prompt", 0, prompt)
    for _ in rows.uploads(Stream(Device("cpu"))):
        apply_writes(CpuPack(), words=rows.words, writes=rows.writes)


def test_hidden_states_and_logits(load_model, golden):
    facts = golden.facts["hidden"]
    prompt = golden.prompt(facts["prompt"])
    model, pack = load_model(golden, 512), TapPack()
    start_row(model, prompt)
    model.forward(pack, len(prompt), 1, len(prompt))
    positions = facts["positions"]
    after = [pack.streams[0], *pack.streams[2::2]]  # two additions a layer
    names = ["hidden.embed", *(f"hidden.layer{n}" for n in range(model.config.num_layers))]
    assert len(after) == len(names)
    for name, stream in zip(names, after, strict=True):
        np.testing.assert_allclose(
            stream[positions], golden.numbers[name], atol=TOLERANCE, rtol=0, err_msg=name
        )
    logits = model.batch.logits.numpy()[0]
    expected = golden.numbers[f"p{facts['prompt']}.logits_fp32"][-1]
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("prompt_index", range(5))
def test_logits_of_every_stored_position(load_model, golden, prompt_index):
    """Each stored position as the last one of a prompt: also what a cache filled token by token must give."""
    prompt = golden.prompt(prompt_index)
    expected = golden.numbers[f"p{prompt_index}.logits_fp32"]
    positions = golden.facts["prompts"][prompt_index]["logit_positions"]
    for position, row in list(zip(positions, expected, strict=True))[-4:]:
        model = load_model(golden, 512)
        start_row(model, prompt[: position + 1])
        model.forward(CpuPack(), position + 1, 1, position + 1)
        np.testing.assert_allclose(model.batch.logits.numpy()[0], row, atol=TOLERANCE, rtol=0)


def test_a_wrong_model_is_noticed(load_model, golden):
    """Negative control: with keys' norms swapped for queries', the same comparison fails."""
    facts = golden.facts["hidden"]
    prompt = golden.prompt(facts["prompt"])
    model = load_model(golden, 512)
    layer = model.weights.layers[0]
    swapped = layer.q_norm.numpy().copy()
    layer.q_norm.numpy()[:] = layer.k_norm.numpy()
    layer.k_norm.numpy()[:] = swapped
    start_row(model, prompt)
    model.forward(CpuPack(), len(prompt), 1, len(prompt))
    expected = golden.numbers[f"p{facts['prompt']}.logits_fp32"][-1]
    wrong = model.batch.logits.numpy()[0] - expected
    assert np.abs(wrong).max() > 10 * TOLERANCE


@pytest.mark.parametrize("max_tokens", [1, 3, 16, 17, 128, 512])
def test_greedy_whatever_the_chunk(golden, session, max_tokens):
    run = session(golden.path, max_num_seqs=1, max_num_batched_tokens=max_tokens)
    for index in range(golden.num_prompts):
        if max_tokens < 16 and len(golden.prompt(index)) > 129:
            continue
        run.submit(golden.prompt(index), 32, ignore_eos=True)
    run.finish()
    for index, outcome in run.outcomes.items():
        assert outcome.tokens == golden.greedy(index), f"prompt {index}"


@pytest.mark.parametrize("seed", range(4))
def test_greedy_whatever_the_batch(golden, session, seed):
    """Random arrivals, repeated prompts (prefix hits), aborts in between, a pool small enough to preempt."""
    rng = random.Random(seed)
    page = 16 * 2 * 4 * 2 * 128 * 4
    run = session(
        golden.path,
        max_num_seqs=rng.choice([3, 8]),
        max_num_batched_tokens=rng.choice([16, 33, 200]),
        kv_cache_memory_bytes=page * rng.choice([30, 60]),
        enable_prefix_caching=rng.random() < 0.7,
    )
    owners: dict[int, int] = {}
    aborted = set()
    waiting = [rng.randrange(golden.num_prompts) for _ in range(14)]
    while waiting or run.open:
        while waiting and rng.random() < 0.5:
            index = waiting.pop()
            owners[run.submit(golden.prompt(index), 32, ignore_eos=True)] = index
        if run.open and rng.random() < 0.02:
            victim = rng.choice(run.open)
            run.engine.abort(victim)
            aborted.add(victim)
        run.step()
    for request, index in owners.items():
        tokens = run.outcomes[request].tokens
        assert tokens == golden.greedy(index)[: len(tokens)]
        assert request in aborted or len(tokens) == 32
        assert len(run.outcomes[request].terminals) == 1
