"""Log-probabilities of prompts: the goldens' own in chunks of any size, in any batch, after preemptions; nobody else
notices."""

import random

import numpy as np
import pytest

PAGE = 16 * 2 * 4 * 2 * 128 * 4


def log_softmax(logits):
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def errors(golden, index, entries, shift=0):
    """What an answer's logprobs and alternatives are off from the golden logits of the positions that are stored."""
    prompt, positions = golden.prompt(index), golden.facts["prompts"][index]["logit_positions"]
    assert len(entries) == len(prompt) - 1
    exact = log_softmax(golden.numbers[f"p{index}.logits_fp32"])
    worst = []
    for position, row in zip(positions, exact, strict=True):
        if position + 1 >= len(prompt):
            continue
        entry, token = entries[position], prompt[(position + 1 + shift) % len(prompt)]
        worst.append(abs(entry.logprob - row[token]))
        worst += np.abs(entry.top_logprobs - row[entry.top_token_ids]).tolist()
        assert entry.top_logprobs == sorted(entry.top_logprobs, reverse=True)
        if shift == 0 and entry.rank <= len(entry.top_token_ids):
            assert entry.top_logprobs[entry.rank - 1] == pytest.approx(entry.logprob, abs=1e-6)
        if shift == 0:
            assert (
                abs(1 + (row > row[token] + 1e-3).sum() - entry.rank)
                <= 1 + (abs(row - row[token]) < 1e-3).sum()
            )
    return max(worst, default=0)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 17), (4, 16), (3, 50), (16, 512)])
def test_the_goldens_in_chunks_of_any_size(golden, session, rows, tokens):
    run = session(golden.path, max_num_seqs=rows, max_num_batched_tokens=tokens)
    asked = {}
    for index in range(golden.num_prompts):
        if tokens >= 16 or len(golden.prompt(index)) < 100:
            asked[run.submit(golden.prompt(index), 3, ignore_eos=True, prompt_logprobs=index)] = index
    run.finish()
    for request, index in asked.items():
        outcome = run.outcomes[request]
        assert errors(golden, index, outcome.prompt_logprobs) <= 1e-3
        assert {len(entry.top_token_ids) for entry in outcome.prompt_logprobs} <= {index}
        assert outcome.tokens == golden.greedy(index)[:3]
        assert outcome.cached == 0


def test_a_token_further_on_would_be_noticed(golden, session):
    """Negative control: the same comparison with targets that are off by one."""
    run = session(golden.path, max_num_seqs=2)
    request = run.submit(golden.prompt(2), 1, prompt_logprobs=2)
    run.finish()
    assert errors(golden, 2, run.outcomes[request].prompt_logprobs) <= 1e-3
    assert errors(golden, 2, run.outcomes[request].prompt_logprobs, shift=1) > 1


@pytest.mark.parametrize("seed", range(3))
def test_beside_others_with_a_cache_a_small_pool_and_aborts(golden, session, seed):
    rng = random.Random(seed)
    run = session(
        golden.path,
        max_num_seqs=rng.choice([3, 8]),
        max_num_batched_tokens=rng.choice([16, 33, 200]),
        kv_cache_memory_bytes=PAGE * 30,
    )
    owners, aborted = {}, set()
    waiting = [(rng.randrange(golden.num_prompts), rng.choice([None, 0, 2])) for _ in range(16)]
    while waiting or run.open:
        while waiting and rng.random() < 0.5:
            index, wanted = waiting.pop()
            request = run.submit(golden.prompt(index), 32, ignore_eos=True, prompt_logprobs=wanted)
            owners[request] = (index, wanted)
        if run.open and rng.random() < 0.02:
            aborted.add(victim := rng.choice(run.open))
            run.engine.abort(victim)
        run.step()
    for request, (index, wanted) in owners.items():
        outcome = run.outcomes[request]
        assert outcome.tokens == golden.greedy(index)[: len(outcome.tokens)]
        assert request in aborted or len(outcome.tokens) == 32
        if wanted is None:
            assert outcome.prompt_logprobs == []
        elif outcome.tokens:  # one that was aborted earlier may have a part of them
            assert errors(golden, index, outcome.prompt_logprobs) <= 1e-3
            assert outcome.cached == 0


def test_preempted_prompts_are_not_scored_twice(tiny, session):
    run = session(tiny.path, max_num_seqs=8, max_num_batched_tokens=64, kv_cache_memory_bytes=PAGE * 16)
    asked = [run.submit(tiny.prompt(2), 60, ignore_eos=True, prompt_logprobs=1) for _ in range(6)]
    run.finish()
    assert run.engine.stats().preemptions > 0
    for request in asked:
        assert errors(tiny, 2, run.outcomes[request].prompt_logprobs) <= 1e-3
        assert len(run.outcomes[request].tokens) == 60


def test_an_abort_inside_the_prompt_and_what_is_refused(tiny, session):
    run = session(tiny.path, max_num_seqs=2, max_num_batched_tokens=16)
    cut = run.submit(tiny.prompt(4), 4, prompt_logprobs=0)
    beside = run.submit(tiny.prompt(1), 4, ignore_eos=True, prompt_logprobs=0)
    while len(run.outcomes[cut].prompt_logprobs) < 40:
        run.step()
    run.engine.abort(cut)
    run.finish()
    assert len(run.outcomes[cut].prompt_logprobs) < len(tiny.prompt(4)) - 1
    assert errors(tiny, 1, run.outcomes[beside].prompt_logprobs) <= 1e-3
    wrong = run.submit(tiny.prompt(1), 4, prompt_logprobs=21)
    run.step()
    assert "prompt_logprobs is 21" in run.outcomes[wrong].terminals[0].reason


def test_a_prompt_of_one_token_has_none(tiny, session):
    run = session(tiny.path, max_num_seqs=2)
    request = run.submit(tiny.prompt(2)[:1], 2, ignore_eos=True, prompt_logprobs=3)
    run.finish()
    assert run.outcomes[request].prompt_logprobs == []
    assert len(run.outcomes[request].tokens) == 2
