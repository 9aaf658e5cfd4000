"""The kernels on a real device at real sizes, against the references."""

import numpy as np
import pytest

from openinfer.sampler import SamplingParams
from openinfer.sampler.gpu import advance, greedy, sample, score, top_logprobs
from openinfer.sampler.gpu.ops.state import GREEDY_FIELDS
from openinfer.sampler.gpu.ops.step import STEP

pytestmark = pytest.mark.gpu

VOCABULARY = 151_936


@pytest.mark.parametrize("rows", [1, 8, 64, 256])
def test_sample(run_gpu, run_cpu, step, check_tokens, rows):
    rng = np.random.default_rng(rows)
    logits = rng.normal(0, 2.5, (rows, VOCABULARY)).astype(np.float32)
    filtered = np.arange(rows) < 48  # the reference sorts the vocabulary for each of these
    args = step(
        logits,
        temperatures=rng.choice([0, 0.3, 0.7, 1, 1.5], rows),
        top_ks=np.where(filtered, rng.choice([0, 1, 20, 500, 5000], rows), 0),
        top_ps=np.where(filtered, rng.choice([1, 0.5, 0.95, 0.999], rows), 1),
        min_ps=np.where(filtered, rng.choice([0, 0, 0.05], rows), 0),
        stop_ids=logits.argmax(axis=1)[:, None],
        min_lens=rng.choice([0, 1000], rows),
    )
    logits[rows // 2, 7] = np.nan if rows > 8 else logits[rows // 2, 7]
    want, got = run_cpu(sample, **args), run_gpu(sample, **args)
    assert check_tokens(args, got["tokens"]) <= 1 + rows // 50
    same = got["tokens"] == want["tokens"]
    np.testing.assert_allclose(got["logprobs"][same], want["logprobs"][same], atol=1e-4)
    again = run_gpu(sample, **args)
    np.testing.assert_array_equal(again["tokens"], got["tokens"])
    np.testing.assert_array_equal(again["logprobs"], got["logprobs"])


@pytest.mark.parametrize("rows", [1, 8, 64, 256])
def test_greedy(run_gpu, run_cpu, step, rows):
    rng = np.random.default_rng(rows)
    logits = rng.integers(-50, 50, (rows, VOCABULARY)).astype(np.float32)  # thousands of equal maxima
    args = step(
        logits,
        temperatures=0.0,
        stop_ids=logits.argmax(axis=1)[:, None],
        min_lens=rng.choice([0, 1000], rows),
    )
    logits[rows // 2, 7] = np.nan if rows > 8 else logits[rows // 2, 7]
    names = ("tokens", "logprobs", "logits", *STEP, *GREEDY_FIELDS)
    got = run_gpu(greedy, **{name: args[name] for name in names})["tokens"]
    np.testing.assert_array_equal(got, run_cpu(sample, **args)["tokens"])
    np.testing.assert_array_equal(got, run_gpu(sample, **args)["tokens"])


def test_sample_with_adjustments(run_gpu, run_cpu, step, check_tokens):
    rng = np.random.default_rng(3)
    biases = tuple((int(t), float(rng.normal(0, 4))) for t in rng.choice(VOCABULARY, 300, replace=False))
    words = tuple(tuple(rng.integers(0, 9, n).tolist()) for n in rng.integers(1, 5, 128))
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.4}
    allowed = tuple(rng.integers(0, VOCABULARY, 4000).tolist())
    asked = [
        {},
        penalties,
        {"logit_bias": biases},
        {"bad_words_token_ids": words},
        {"allowed_token_ids": allowed},
        {"logit_bias": biases, "bad_words_token_ids": words, "allowed_token_ids": allowed, **penalties},
    ]
    rows = []
    for r in range(36):
        prompt, output = (
            rng.integers(0, VOCABULARY, 2000).tolist(),
            rng.integers(0, 9, 100 * (r % 2)).tolist(),
        )
        rows.append((SamplingParams(**asked[r % 6]), prompt, output))
    args = step(
        rng.normal(0, 2.5, (36, VOCABULARY)).astype(np.float32),
        adjustments=rows,
        temperatures=rng.choice([0, 0.7, 1.2], 36),
        top_ks=rng.choice([0, 0, 40], 36),
        top_ps=rng.choice([1, 0.9], 36),
    )
    want, got = run_cpu(sample, **args), run_gpu(sample, **args)
    assert check_tokens(args, got["tokens"]) <= 1
    np.testing.assert_array_equal(got["output_counts"], want["output_counts"])


@pytest.mark.parametrize("rows", [1, 64])
def test_top_logprobs(run_gpu, run_cpu, rows):
    rng = np.random.default_rng(rows)
    args = {
        "ids": np.zeros((rows, 20), np.int32),
        "values": np.zeros((rows, 20), np.float32),
        "logits": np.round(rng.normal(0, 2.5, (rows, VOCABULARY)), 2).astype(np.float32),  # with ties
        "slots": np.arange(1, rows + 1, dtype=np.int32),
        "alive": np.ones(rows + 1, np.int32),
        "emits": np.ones(rows, np.int32),
        "num_logprobs": np.append(20, rng.integers(-1, 21, rows)).astype(np.int32),
    }
    want, got = run_cpu(top_logprobs, **args), run_gpu(top_logprobs, **args)
    np.testing.assert_array_equal(got["ids"], want["ids"])
    np.testing.assert_allclose(got["values"], want["values"], atol=1e-4)


@pytest.mark.parametrize("rows", [1, 256])
def test_score(run_gpu, run_cpu, rows):
    rng = np.random.default_rng(rows)
    args = {
        "logprobs": np.zeros(rows, np.float32),
        "ranks": np.zeros(rows, np.int32),
        "logits": np.round(rng.normal(0, 2.5, (rows, VOCABULARY)), 2).astype(np.float32),  # with ties
        "targets": np.append(7, rng.integers(-1, VOCABULARY, rows - 1)).astype(np.int32),
    }
    want, got = run_cpu(score, **args), run_gpu(score, **args)
    np.testing.assert_allclose(got["logprobs"], want["logprobs"], atol=1e-4)
    np.testing.assert_array_equal(got["ranks"], want["ranks"])


def test_advance(run_gpu, run_cpu):
    rng, rows = np.random.default_rng(0), 300
    slots = rng.permutation(rows).astype(np.int32)
    args = {
        "result": np.full((rows, 3), -9, np.int32),
        "tokens": np.where(rng.random(rows) < 0.1, -2, rng.integers(0, 30, rows)).astype(np.int32),
        "logprobs": -rng.random(rows).astype(np.float32),
        "slots": slots,
        "q_starts": np.append(0, rng.integers(0, 3, rows).cumsum()).astype(np.int32),
        "emits": rng.integers(0, 2, rows).astype(np.int32),
        "alive": (np.arange(rows) % 5 != 0).astype(np.int32),
        "seq_lens": rng.integers(0, 50, rows).astype(np.int32),
        "last_tokens": np.full(rows, 99, np.int32),
        "limits": rng.integers(20, 60, rows).astype(np.int32),
        "min_lens": rng.integers(0, 60, rows).astype(np.int32),
        "stop_ids": rng.integers(-1, 30, (rows, 4)).astype(np.int32),
        "adjusts": rng.integers(0, 16, rows).astype(np.int32),
        "output_counts": rng.integers(-(2**31), 2**31, (rows, 15)).astype(np.int32),
        "recent_tokens": rng.integers(0, 30, (rows, 8)).astype(np.int32),
    }
    want, got = run_cpu(advance, **args), run_gpu(advance, **args)
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)
