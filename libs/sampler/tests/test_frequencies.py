"""What `sample` draws is distributed as the parameters say, on the cpu pack and through the kernels; a row draws the
same alone and in any batch."""

import numpy as np
import pytest
from scipy import special, stats

from openinfer.kernels import LaunchPack, NullPack
from openinfer.kernels.testing import of_the_day
from openinfer.sampler.gpu import ops as tiles
from openinfer.sampler.gpu import sample
from openinfer.sampler.gpu.device import sample as kernels
from openinfer.sampler.gpu.ops import sample as sample_module
from openinfer.tensor import Tensor

BASE = np.array([2.0, 1.5, 1.5, 0.7, 0.1, -0.4, -1.0, -1.1, -2.5, -4.0, -np.inf, 0.3], np.float32)
SETTINGS = [
    {},
    {"temperatures": 0.6},
    {"temperatures": 2.0},
    {"top_ks": 2},
    {"top_ks": 6},
    {"top_ps": 0.8},
    {"top_ps": 0.999},
    {"min_ps": 0.2},
    {"min_lens": 10**6, "stop_ids": [0, 5]},
    {"temperatures": 0.6, "top_ks": 5, "top_ps": 0.95},
    {"temperatures": 1.7, "top_ks": 9, "top_ps": 0.9, "min_ps": 0.05},
    {"top_ps": 0.5, "min_ps": 0.5},
    {"min_lens": 10**6, "stop_ids": [1, -1], "top_ps": 0.7, "temperatures": 1.3},
]


def distribution(logits, *, temperatures=1.0, top_ks=0, top_ps=1.0, min_ps=0.0, min_lens=0, stop_ids=()):
    """The exact probabilities in float64: sorted, cut where the definition says, ties kept."""
    scaled = logits.astype(np.float64) / temperatures
    if min_lens:
        scaled[[token for token in stop_ids if token >= 0]] = -np.inf
    if min_ps:
        scaled[scaled < scaled.max() + np.log(min_ps)] = -np.inf
    if 0 < top_ks < scaled.size:
        scaled[scaled < np.sort(scaled)[-top_ks]] = -np.inf
    if top_ps < 1:
        falling = np.sort(scaled)[::-1]
        mass = special.softmax(falling).cumsum()
        scaled[scaled < falling[np.searchsorted(mass, top_ps)]] = -np.inf
    return special.softmax(scaled)


@pytest.fixture
def small(monkeypatch):
    """Tiles and lists for a small vocabulary: the interpreter takes as long for padding as for logits."""
    monkeypatch.setattr(tiles, "CHUNK", 256)
    monkeypatch.setattr(tiles, "SMALLEST_GROUP", 16)
    monkeypatch.setattr(sample_module, "LIST", 64)
    monkeypatch.setattr(sample_module, "SHORT", 16)


def check_drawn_from(exact, counts, tests):
    possible = exact > 0
    assert counts[~possible].sum() == 0
    assert stats.chisquare(counts[possible], exact[possible] * counts.sum()).pvalue > 1e-3 / tests


def in_turn(settings, rows):
    """Columns for `rows` rows of each setting, in turn."""
    nothing = {
        "temperatures": 1.0,
        "top_ks": 0,
        "top_ps": 1.0,
        "min_ps": 0.0,
        "min_lens": 0,
        "stop_ids": [-1, -1],
    }
    return {name: np.array([(nothing | s)[name] for s in settings] * rows) for name in nothing}


def check_frequencies(run, step, draws, rows, settings=SETTINGS):
    """Rows of all settings in turn; every setting gets `draws` draws."""
    rng, count = np.random.default_rng(6), len(settings)
    args = step(np.tile(BASE, (rows * count, 1)), **in_turn(settings, rows))
    counts = np.zeros((count, len(BASE)), int)
    for _ in range(-(-draws // rows)):
        args["seeds"] = rng.integers(-(2**31), 2**31, args["seeds"].shape).astype(np.int32)
        tokens = run(sample, **args)["tokens"].reshape(rows, count)
        for i in range(count):
            counts[i] += np.bincount(tokens[:, i], minlength=len(BASE))
    for setting, counted in zip(settings, counts, strict=True):
        check_drawn_from(distribution(BASE, **setting), counted, count)


def test_frequencies(run_cpu, step):
    check_frequencies(run_cpu, step, 1000, 200)


def test_frequencies_of_another_distribution_would_show(run_cpu, step):
    """Negative control: what one setting draws is not taken for what its neighbour should."""
    args = step(np.tile(BASE, (2000, 1)), temperatures=0.6)
    counts = np.bincount(run_cpu(sample, **args)["tokens"], minlength=len(BASE))
    check_drawn_from(distribution(BASE, temperatures=0.6), counts, 1)
    with pytest.raises(AssertionError):
        check_drawn_from(distribution(BASE, temperatures=0.7), counts, 1)


@pytest.mark.slow
def test_frequencies_of_many_draws(run_cpu, step):
    check_frequencies(run_cpu, step, 100_000, 500)


def test_frequencies_in_the_interpreter(run_interpreter, step, small):
    check_frequencies(run_interpreter, step, 40, 40, SETTINGS[10:11])


@pytest.mark.slow
def test_frequencies_of_many_draws_in_the_interpreter(run_interpreter, step, small):
    check_frequencies(run_interpreter, step, 100, 100)


@pytest.mark.gpu
def test_frequencies_on_the_device(run_gpu, step):
    check_frequencies(run_gpu, step, 100_000, 2000)


LARGE = [
    {"top_ps": 0.95},
    {"temperatures": 0.7, "top_ps": 0.5},
    {"top_ks": 3000},
    {"top_ks": 20_000, "top_ps": 0.9, "temperatures": 1.3},
    {"min_ps": 0.01},
    {"temperatures": 0.7},
    {"top_ks": 20, "top_ps": 0.95},
]


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [2.5, 0.1], ids=["normal", "flat"])
@pytest.mark.parametrize("setting", LARGE, ids=str)
def test_frequencies_of_a_large_vocabulary_on_the_device(gpu, step, setting, scale):
    """1e5 draws of 151,936 tokens, the kernels' whole way; token ids in 100 bins of equal probability."""
    target, driver, device, stream = gpu
    rows, vocabulary, rng = 256, 151_936, np.random.default_rng(8)
    row = (rng.standard_normal(vocabulary) * scale).astype(np.float32)
    args = step(np.tile(row, (rows, 1)), **setting)
    tensors = {name: Tensor.empty(array.shape, array.dtype, device) for name, array in args.items()}
    for name, array in args.items():
        tensors[name].copy_from(array)
    plan = NullPack(target)
    sample(plan, **tensors)
    scratch = Tensor.empty((plan.workspace_bytes(zeroed=False),), np.dtype(np.uint8), device)
    pack = LaunchPack(target, driver, scratch, None)
    counts = np.zeros(vocabulary, int)
    for _ in range(100_000 // rows + 1):
        tensors["seeds"].copy_from(rng.integers(-(2**31), 2**31, args["seeds"].shape).astype(np.int32))
        sample(pack, **tensors)
        stream.synchronize()
        counts += np.bincount(tensors["tokens"].numpy(), minlength=vocabulary)
    exact = distribution(row, **setting)
    assert counts[exact == 0].sum() <= counts.sum() * 2e-5  # a token that is within rounding of top_p
    order = np.argsort(-exact, kind="stable")  # likely tokens in bins of their own
    bins = np.minimum((exact[order].cumsum() * 100).astype(int), 99)
    expected = np.bincount(bins, weights=exact[order], minlength=100)
    counted = np.bincount(bins, weights=counts[order], minlength=100)
    check_drawn_from(expected, counted, 2 * len(LARGE))


def check_alone(run, step, logits, **columns):
    """Each row of a batch draws alone what it draws among the others."""
    args = step(logits, **columns)
    together = run(sample, **args)
    for r in range(len(logits)):
        alone = dict(args)
        for name in ("tokens", "logprobs", "logits", "slots", "emits"):
            alone[name] = args[name][r : r + 1].copy()
        alone["q_starts"] = args["q_starts"][r : r + 2] - args["q_starts"][r]
        got = run(sample, **alone)
        assert got["tokens"][0] == together["tokens"][r]
        assert got["logprobs"][0] == together["logprobs"][r]


MIXED = {
    "temperatures": [0, 0.5, 0.7, 1, 1.3, 2, 0.8, 1],
    "top_ks": [0, 0, 20, 1, 50, 0, 600, 0],
    "top_ps": [1, 0.9, 0.95, 0.5, 1, 1, 0.99, 0.3],
    "min_ps": [0, 0, 0, 0.1, 0.02, 0, 0.001, 0],
}


@pytest.mark.parametrize("pack", ["cpu", "interpreter"])
def test_a_row_draws_the_same_alone(request, step, monkeypatch, pack):
    monkeypatch.setattr(tiles, "CHUNK", 256)
    monkeypatch.setattr(tiles, "SMALLEST_GROUP", 16)
    logits = np.random.default_rng(9).normal(0, 2, (8, 1000)).astype(np.float32)
    check_alone(request.getfixturevalue(f"run_{pack}"), step, logits, **MIXED)


@pytest.mark.gpu
def test_64_rows_draw_the_same_alone_on_the_device(run_gpu, step):
    logits = np.random.default_rng(10).normal(0, 2.5, (64, 151_936)).astype(np.float32)
    check_alone(run_gpu, step, logits, **{name: values * 8 for name, values in MIXED.items()})


LOGITS = {
    "normal": lambda rng, v: rng.normal(0, 2.5, v),
    "flat": lambda rng, v: rng.normal(0, 0.1, v),
    "bfloat16": lambda rng, v: np.round(rng.normal(0, 2.5, v) * 32) / 32,
    "peaks": lambda rng, v: np.where(
        np.arange(v) % 2000 == 7, 14 + rng.normal(0, 3, v), rng.normal(0, 2.5, v)
    ),
    "sorted": lambda rng, v: -1.1 * np.log(np.arange(1.0, v + 1)),
    "outlier": lambda rng, v: np.where(np.arange(v) == 5, -1e30, rng.normal(0, 2.5, v)),
}


@pytest.mark.parametrize("kind", of_the_day(list(LOGITS), 2))
def test_the_brackets_of_a_large_vocabulary_hold(
    run_cpu, run_interpreter, step, check_tokens, monkeypatch, kind
):
    """At the sizes that the kernels run with, no row has to be searched as a whole, which would take milliseconds."""
    searched, slow = kernels.searched, []
    monkeypatch.setattr(kernels, "searched", lambda *args: slow.append(1) or searched(*args))
    filters = {"top_ps": [0.95, 0.9, 0.999], "top_ks": [0, 3000, 0], "min_ps": [0, 0, 0.01]}
    if kind == "outlier":  # a bin is then as wide as all the others together: top_k has to be searched
        filters["top_ks"] = [0] * 3
    rng = np.random.default_rng(11)
    logits = np.stack([LOGITS[kind](rng, 40_000) for _ in range(3)]).astype(np.float32)
    args = step(logits, temperatures=[0.7, 1.2, 1], **filters)
    check_tokens(args, run_interpreter(sample, **args)["tokens"])
    assert not slow


def test_rows_whose_brackets_fail_are_searched(run_interpreter, step, check_tokens, monkeypatch):
    """Thousands of equal logits at the bound, and a list that is too short for them."""
    searched, slow = kernels.searched, []
    monkeypatch.setattr(kernels, "searched", lambda *args: slow.append(1) or searched(*args))
    monkeypatch.setattr(sample_module, "LIST", 64)
    monkeypatch.setattr(sample_module, "SLACK", 8)
    logits = np.round(np.random.default_rng(12).normal(0, 1, (4, 2000))).astype(np.float32)
    args = step(logits, top_ks=[0, 300, 0, 900], top_ps=[0.8, 1, 0.6, 0.7], min_ps=[0, 0, 0.1, 0])
    check_tokens(args, run_interpreter(sample, **args)["tokens"])
    assert len(slow) == 4
