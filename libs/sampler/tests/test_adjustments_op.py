"""Adjustments in `sample` and `advance`: against the definition on plain lists, step by step, and against the exact
distributions; the kernels against the reference."""

import dataclasses

import numpy as np
import pytest
from scipy import special, stats

from openinfer.kernels import ContractError, CpuPack
from openinfer.sampler import SamplingParams
from openinfer.sampler import sample as sample_rows
from openinfer.sampler.gpu import advance, sample
from openinfer.sampler.gpu import ops as tiles
from openinfer.sampler.gpu.ops import sample as sample_module
from openinfer.sampler.gpu.ops.adjustments import adjustment_fields, adjustment_values
from openinfer.tensor import Tensor

VOCABULARY = 203
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.7}
WORDS = ((3,), (5, 6), (5, 6, 7), tuple(range(32)), (200, 1))


def mixture(rng):
    """Rows of everything, alone and together: (params, prompt, output)."""
    biases = tuple((int(t), float(rng.normal(0, 3))) for t in rng.choice(VOCABULARY, 150, replace=False))
    allowed = tuple(rng.choice(VOCABULARY, 60).tolist())
    asked = [
        {},
        {"temperature": 0, "repetition_penalty": 1.5},
        {"repetition_penalty": 0.6, "top_k": 30},
        {"frequency_penalty": 1.2},
        {"presence_penalty": -1.1, "top_p": 0.8},
        {"logit_bias": biases},
        {"logit_bias": ((0, 4.0), (VOCABULARY - 1, 5.0)), "temperature": 0},
        {"allowed_token_ids": allowed, "top_p": 0.9, "temperature": 0.7},
        {"bad_words_token_ids": WORDS, "min_p": 0.01},
        {**PENALTIES, "logit_bias": biases, "top_k": 40, "top_p": 0.95},
        {**PENALTIES, "logit_bias": biases, "bad_words_token_ids": WORDS, "allowed_token_ids": allowed},
        {**PENALTIES, "bad_words_token_ids": WORDS, "temperature": 0},
    ]
    rows = []
    for given in asked:
        prompt = rng.integers(0, VOCABULARY, rng.integers(1, 60)).tolist()
        output = [*rng.integers(0, 12, rng.integers(4, 40)).tolist(), 5, 6]
        rows.append((SamplingParams(**given), prompt, output))
    return rows


def columns(rows):
    """The filters of the rows, as `step` takes them."""
    params = [p for p, _, _ in rows]
    names = {"temperatures": "temperature", "top_ks": "top_k", "top_ps": "top_p", "min_ps": "min_p"}
    return {column: [getattr(p, name) for p in params] for column, name in names.items()}


def seeds_of(args):
    words = args["seeds"][args["slots"]].view(np.uint32).astype(np.uint64)
    return (words[:, 0] | words[:, 1] << np.uint64(32)).view(np.int64).tolist()


@pytest.fixture
def rng(request):
    return np.random.default_rng(list(request.node.name.encode()))


@pytest.fixture
def logits(rng):
    return lambda rows: (rng.standard_normal((rows, VOCABULARY)) * 2).astype(np.float32)


def test_the_op_is_sample_on_the_tokens_so_far(run_cpu, step, rng, logits):
    rows = mixture(rng)
    args = step(logits(len(rows)), adjustments=rows, **columns(rows))
    params, prompts, outputs = zip(*rows, strict=True)
    positions = [len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)]
    want = sample_rows(args["logits"], params, positions, seeds_of(args), prompts=prompts, outputs=outputs)
    assert run_cpu(sample, **args)["tokens"].tolist() == want.token_ids.tolist()


@pytest.mark.parametrize("small", [False, True])
def test_kernels_agree_with_the_reference(
    run_cpu, run_interpreter, check_tokens, step, rng, logits, monkeypatch, small
):
    if small:  # ids of bad words and biases in many parts
        monkeypatch.setattr(tiles, "CHUNK", 64)
        monkeypatch.setattr(tiles, "SMALLEST_GROUP", 16)
        monkeypatch.setattr(sample_module, "BLOCK", 64)
    rows = [(p, prompt, output if r % 4 else []) for r, (p, prompt, output) in enumerate(mixture(rng))]
    rows[1] = (rows[1][0], [], rows[1][2])
    args = step(logits(len(rows)), adjustments=rows, **columns(rows))
    args["stop_ids"][:] = args["logits"].argmax(axis=1)[0]
    args["min_lens"][args["slots"][::3]] = 1000
    want, got = run_cpu(sample, **args), run_interpreter(sample, **args)
    check_tokens(args, got["tokens"])
    for name in args.keys() - {"tokens", "logprobs"}:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def test_values_that_would_show_are_seen_by_no_row(run_cpu, run_interpreter, step, logits):
    args = step(logits(5), temperatures=0)
    for run in (run_cpu, run_interpreter):
        assert run(sample, **args)["tokens"].tolist() == args["logits"].argmax(axis=1).tolist()


def test_rows_with_nothing_left_fail_alone(run_cpu, run_interpreter, step, logits):
    nothing = SamplingParams(allowed_token_ids=(4,), bad_words_token_ids=((4,),))
    rows = [None, (nothing, [1], []), (SamplingParams(allowed_token_ids=(4,)), [1], [])]
    args = step(logits(3), adjustments=rows)
    for run in (run_cpu, run_interpreter):
        assert run(sample, **args)["tokens"][1:].tolist() == [-2, 4]


class Sequence:
    """A slot's sequence, and what the definition makes of it."""

    def __init__(self, slot, params, prompt):
        self.slot, self.params, self.prompt, self.output = slot, params, prompt, []

    def join(self, state):
        values = adjustment_values(self.params, self.prompt, self.output, VOCABULARY)
        for name, value in values.items():
            state[name][self.slot] = value
        state["seq_lens"][self.slot] = len(self.prompt) + len(self.output) - 1
        state["alive"][self.slot] = 1
        state["temperatures"][self.slot] = self.params.temperature


def test_the_state_follows_sequences_that_join_leave_and_resume(step, rng, logits):
    """Both ops over 60 steps; slots are used again, and sequences are preempted and come back elsewhere."""
    asked = [p for p, _, _ in mixture(rng) if p.top_k == 0 and p.top_p == 1 and p.min_p == 0]
    args = step(logits(6))
    args["q_starts"] = np.arange(7, dtype=np.int32)
    state = {
        **args,
        "result": np.zeros((6, 3), np.int32),
        "last_tokens": np.zeros(8, np.int32),
        "limits": np.full(8, 10**6, np.int32),
    }
    rows = [Sequence(slot, asked[r], [r, r + 1, 5]) for r, slot in enumerate(args["slots"].tolist())]
    for sequence in rows:
        sequence.join(state)
    resumed = 0
    for index in range(60):
        if index % 7 == 6:  # a new sequence takes the place of an old one
            old = rows[index % 6]
            rows[index % 6] = Sequence(old.slot, asked[index % len(asked)], [index, 6])
            rows[index % 6].join(state)
        if index % 11 == 10:  # two are preempted, and resumed in each other's slot
            a, b = rows[index % 6], rows[(index + 1) % 6]
            a.slot, b.slot = b.slot, a.slot
            state["slots"][[index % 6, (index + 1) % 6]] = a.slot, b.slot
            a.join(state)
            b.join(state)
            resumed += bool(a.output and b.output)
        state["logits"][:] = logits(6)
        params, positions = [s.params for s in rows], [len(s.prompt) + len(s.output) for s in rows]
        want = sample_rows(
            state["logits"],
            params,
            positions,
            seeds_of(state),
            prompts=[s.prompt for s in rows],
            outputs=[s.output for s in rows],
        ).token_ids.tolist()
        for op in (sample, advance):
            tensors = {name: Tensor.from_numpy(state[name]) for name in names(op)}
            op(CpuPack(), **tensors)
        assert state["result"][:, 0].tolist() == want
        for sequence, token in zip(rows, want, strict=True):
            sequence.output.append(token)
    assert resumed > 2


def names(op):
    return [field.name for field in dataclasses.fields(op.type)]


BASE = np.array([1.0, 0.6, 0.3, 0.0, -0.3, -0.7, -1.5], np.float32)
PROMPT, OUTPUT = [0, 3], [1, 1, 4, 1]
SETTINGS = [
    {"repetition_penalty": 1.8},
    {"frequency_penalty": 0.4},
    {"presence_penalty": 1.1},
    {"logit_bias": ((6, 2.0), (0, -1.0))},
    {"allowed_token_ids": (1, 2, 5)},
    {"bad_words_token_ids": ((0,), (4, 1, 2), (1, 1, 3))},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": -0.5, "temperature": 0.8},
    {"logit_bias": ((6, 3.0),), "presence_penalty": 0.9, "top_k": 4},
    {
        "logit_bias": ((2, 1.0), (5, 1.5)),
        "allowed_token_ids": (0, 1, 2, 4, 5),
        "bad_words_token_ids": ((4, 1, 2),),
        "repetition_penalty": 0.7,
        "frequency_penalty": 0.2,
        "top_p": 0.9,
        "temperature": 1.3,
    },
]


def distribution(params):
    """The exact probabilities in float64, from what the parameters are said to mean."""
    x = BASE.astype(np.float64)
    for token in range(len(x)):
        count = OUTPUT.count(token)
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            x[token] = -np.inf
        for word in params.bad_words_token_ids:
            if word[-1] == token and [*PROMPT, *OUTPUT, token][-len(word) :] == list(word):
                x[token] = -np.inf
        x[token] += dict(params.logit_bias).get(token, 0)
        if token in PROMPT + OUTPUT:
            x[token] *= params.repetition_penalty ** (-1 if x[token] > 0 else 1)
        x[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    scaled = x / params.temperature
    if params.top_k:
        scaled[scaled < np.sort(scaled)[-params.top_k]] = -np.inf
    if params.top_p < 1:
        order = np.argsort(-scaled)
        mass = special.softmax(scaled)[order].cumsum()
        scaled[order[np.searchsorted(mass, params.top_p) + 1 :]] = -np.inf
    return special.softmax(scaled)


def check_frequencies(run, step, draws, rows):
    """Rows of all settings in turn; every setting gets `draws` draws."""
    rng, count = np.random.default_rng(5), len(SETTINGS)
    params = [SamplingParams(**given) for given in SETTINGS]
    batch = [(params[r % count], PROMPT, OUTPUT) for r in range(rows * count)]
    args = step(np.tile(BASE, (len(batch), 1)), adjustments=batch, **columns(batch))
    counts = np.zeros((count, len(BASE)), int)
    for _ in range(-(-draws // rows)):
        args["seeds"] = rng.integers(-(2**31), 2**31, args["seeds"].shape).astype(np.int32)
        tokens = run(sample, **args)["tokens"].reshape(rows, count)
        for i in range(count):
            counts[i] += np.bincount(tokens[:, i], minlength=len(BASE))
    for p, counted in zip(params, counts, strict=True):
        exact = distribution(p)
        possible = exact > 0
        assert counted[~possible].sum() == 0, p
        assert stats.chisquare(counted[possible], exact[possible] * counted.sum()).pvalue > 1e-3 / count, p


def test_frequencies(run_cpu, step):
    check_frequencies(run_cpu, step, 1200, 300)


@pytest.mark.slow
def test_frequencies_of_many_draws(run_cpu, step):
    check_frequencies(run_cpu, step, 100_000, 300)


@pytest.mark.slow
def test_frequencies_in_the_interpreter(run_interpreter, step):
    check_frequencies(run_interpreter, step, 60, 12)


@pytest.mark.gpu
def test_frequencies_on_the_device(run_gpu, step):
    check_frequencies(run_gpu, step, 100_000, 1000)


def test_fields_and_values_agree():
    everything = SamplingParams(
        **PENALTIES, logit_bias=((1, 1.0),), allowed_token_ids=(1,), bad_words_token_ids=((1,),)
    )
    fields = {field.name: field for field in adjustment_fields(VOCABULARY)}
    values = adjustment_values(everything, [1], [2], VOCABULARY)
    assert values.keys() == fields.keys()
    for name, value in values.items():
        assert np.shape(value) == fields[name].shape, name
        assert not isinstance(value, np.ndarray) or value.dtype == fields[name].dtype, name
    assert adjustment_values(SamplingParams(), [1, 2], [3], VOCABULARY) == {"prompt_lens": 2, "adjusts": 0}


def test_a_count_past_16_bits_stays_at_the_largest():
    params = SamplingParams(presence_penalty=1.0)
    counts = adjustment_values(params, [1], [2] * 70_000 + [3], VOCABULARY)["output_counts"].view(np.uint16)
    assert counts[[1, 2, 3]].tolist() == [0, 65_535, 1]


def test_what_the_contract_refuses(step, logits):
    args = {name: Tensor.from_numpy(array) for name, array in step(logits(2)).items()}
    with pytest.raises(ContractError, match="output_counts has shape"):
        sample(CpuPack(), **args | {"output_counts": args["prompt_masks"]})
    with pytest.raises(ContractError, match="recent_tokens has shape"):
        sample(CpuPack(), **args | {"recent_tokens": args["penalties"].view_as(np.dtype(np.int32))})
