"""The indexer's kernels against the reference, over entries of one token and of four: in Triton's interpreter, and on a
GPU at the published sizes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import H200, Op, Store, Target, index_topk
from openinfer.kernels.op.rounding import hadamard, q4
from openinfer.kernels.testing import copied
from openinfer.tensor import bfloat16, float32

Array = np.ndarray[Any, Any]
Run = Callable[[Op[Any], Mapping[str, Any]], dict[str, Array]]
MODULE = importlib.import_module("openinfer.kernels.ops.index_topk")
V4, V32 = {"heads": 64, "dim": 128, "rotary": 64}, {"heads": 64, "dim": 128, "rotary": 64, "window": 1}
PER_PAGE = {4: 32, 1: 16}
"""Entries of a page, by the tokens that an entry covers."""


def index_args(
    rng: np.random.Generator, tokens: Sequence[tuple[int, int]], *, topk: int, exact: bool, quantized: bool = False,
    heads: int = 4, dim: int = 32, rotary: int = 16, window: int = 4,
) -> dict[str, Any]:  # fmt: skip
    """Arguments for tokens (slot, position). Pages come in no order, and what no token sees is NaN. `exact`: numbers of
    few bits and quarter turns, so that scores are exact in any order of summation, and many are equal."""
    slots, last, per_page = max(s for s, _ in tokens) + 1, max(p for _, p in tokens), PER_PAGE[window]
    width = last // (window * per_page) + 2
    tables = 2 + rng.permutation(slots * width).reshape(slots, width).astype(np.int32)
    tables[0] = 0
    keys = np.full((slots * width + 2, 3, per_page, dim), np.nan, bfloat16)[:, 1]
    for slot in range(1, slots):
        w = np.arange(max([p + 1 for s, p in tokens if s == slot], default=0) // window)
        values = rng.integers(-2, 3, (len(w), dim)) if exact else rng.standard_normal((len(w), dim))
        keys[tables[slot, w // per_page], w % per_page] = values.astype(bfloat16)
    angle = np.arange(last + 1)[:, None] * 10000.0 ** (-np.arange(rotary // 2) / (rotary // 2))
    if exact:
        angle = np.pi / 2 * rng.integers(0, 4, angle.shape)
    cos_sin = np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(float32)
    q, weights = rng.standard_normal((2, len(tokens), heads, dim))
    wide = np.full((len(tokens), heads + 5), np.nan, float32)
    wide[:, 2 : heads + 2] = rng.integers(-3, 6, (len(tokens), heads)) if exact else weights[:, :, 0]
    return {
        "selected": np.full((len(tokens), topk), 99, np.int32),
        "q": (rng.integers(-3, 4, q.shape) if exact else q).astype(bfloat16),
        "weights": wide[:, 2 : heads + 2],
        "keys": keys,
        "cos_sin": np.round(cos_sin) if exact else cos_sin,
        "positions": np.array([p for _, p in tokens], np.int32),
        "token_slots": np.array([s for s, _ in tokens], np.int32),
        "block_tables": tables,
        "scale": 0.125,
        "window": window,
        "quantized": quantized,
    }


def check_index(run: Run, reference: Run, args: dict[str, Any], *, exact: bool) -> None:
    """The entries that the reference takes; where scores are rounded, entries whose scores are as large but for 1e-2 of
    the scores' spread."""
    got, want = run(index_topk, args), reference(index_topk, args)
    for name in got.keys() - {"selected"}:
        assert got[name].tobytes() == args[name].tobytes(), name
    if exact:
        np.testing.assert_array_equal(got["selected"], want["selected"])
        return
    for t, (mine, its) in enumerate(zip(got["selected"], want["selected"], strict=True)):
        differ = np.setxor1d(mine, its)
        assert len(np.unique(mine[mine >= 0])) == (its >= 0).sum()
        if len(differ):
            scores = true_scores(args, t)
            line = np.sort(scores)[-len(its)]
            assert np.abs(scores[differ] - line).max() < 1e-2 * scores.std(), (t, differ)


def true_scores(args: Mapping[str, Any], t: int) -> Array:
    """A token's scores in float64, by the definition; of the rounded query."""
    slot, p, per_page = args["token_slots"][t], args["positions"][t], args["keys"].shape[1]
    w = np.arange((p + 1) // args["window"])
    held = args["keys"][args["block_tables"][slot, w // per_page], w % per_page].astype(np.float64)
    query, (cos, sin) = args["q"][t].astype(float32), args["cos_sin"][p]
    start = query.shape[1] - 2 * len(cos)
    turned = (query[:, start::2] + 1j * query[:, start + 1 :: 2]) * (cos + 1j * sin)
    query[:, start::2], query[:, start + 1 :: 2] = turned.real, turned.imag
    query = query.astype(bfloat16).astype(float32)
    if args["quantized"]:
        query = q4(hadamard(query).astype(bfloat16).astype(float32))
    product = np.maximum(query.astype(np.float64) @ held.T, 0)
    found: Array = args["weights"][t].astype(np.float64) @ product
    return found


TOKENS = [(1, 2), (2, 23), (0, 0), (1, 24), (1, 27), (2, 30), (3, 290), (1, 259), (3, 127)]


@pytest.mark.parametrize("window", [4, 1])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("segment", [16, 64, 512])
def test_the_indexer(
    interpreted: Run, reference: Run, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch,
    quantized: bool, exact: bool, segment: int, window: int,
) -> None:  # fmt: skip
    """Fewer than topk entries, as many and one more, segments that are not full, padding; slices of three tokens; and
    candidates of all segments at once, or of two at a time."""
    tuning = MODULE.IndexTuning(parts=2, tokens=3, segment=segment, small=segment // 4, block=16)
    monkeypatch.setattr(MODULE, "index_tuning", lambda *_: tuning)
    monkeypatch.setattr(MODULE, "MERGED_CANDIDATES", 6 if window == 1 else 16384)
    args = index_args(rng, TOKENS, topk=6, exact=exact, quantized=quantized, window=window)
    check_index(interpreted, reference, args, exact=exact)


@pytest.mark.parametrize("older", [False, True])
def test_keys_of_the_step_are_read_after_the_wait(
    interpreted: Run, reference: Run, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, older: bool
) -> None:
    """Entries that a row of one token and one of four drafts write are not there before. If older ones are not either,
    that shows (a control)."""
    args = index_args(rng, [(1, 199), *((2, p) for p in range(258, 263))], topk=6, exact=True)
    want, (arrays, tensors) = reference(index_topk, args)["selected"], copied(args)
    for slot, first in ((1, 199), (2, 258)):
        w = np.arange(0 if older else first // 4, 66)
        arrays["keys"][args["block_tables"][slot, w // 32], w % 32] = 0
    kernels = importlib.import_module("openinfer.kernels.device.index_topk")
    monkeypatch.setattr(kernels, "wait_ahead", lambda EARLY: np.copyto(arrays["keys"], args["keys"]))
    monkeypatch.setattr(Target, "early", lambda *_: True)
    interpreted(index_topk, tensors)
    assert (arrays["selected"] == want).all() != older


def test_the_reference_takes_the_largest_scores(reference: Run, rng: np.random.Generator) -> None:
    for window in (1, 4):
        args = index_args(rng, [(1, 200), (2, 3), (3, 130)], topk=8, exact=False, window=window)
        got = reference(index_topk, args)["selected"]
        for t in (0, 2):
            best = np.argsort(-true_scores(args, t), kind="stable")[:8]
            np.testing.assert_array_equal(got[t], np.sort(best))
        few = range(4 // window)
        np.testing.assert_array_equal(got[1], [*few, *[-1] * (8 - len(few))])


def test_equal_scores(interpreted: Run, rng: np.random.Generator) -> None:
    """All zeros of both signs, all alike, and a few that stand out among equals: the lowest entries first."""
    args = index_args(rng, [(1, 200), (2, 200), (3, 200)], topk=8, exact=True)
    args["weights"][0] = [-1, -2, -1, -3]
    args["keys"][args["block_tables"][1]] = 0
    args["keys"][args["block_tables"][2]] = 1
    args["keys"][args["block_tables"][3]] = 0
    args["keys"][args["block_tables"][3, 1], 3:5] = 2
    args["q"][:], args["cos_sin"][:, 0], args["cos_sin"][:, 1] = 1, 1, 0
    args["weights"][2] = 1
    got = interpreted(index_topk, args)["selected"]
    np.testing.assert_array_equal(got, [range(8), range(8), [0, 1, 2, 3, 4, 5, 35, 36]])


def test_the_comparison_of_selections_notices_a_small_change(
    interpreted: Run, reference: Run, rng: np.random.Generator
) -> None:
    """Negative control."""
    args = index_args(rng, [(1, p) for p in range(200, 400, 20)], topk=8, exact=False)
    weights = args["weights"].copy()
    weights[:, 0] *= 1.5
    with pytest.raises(AssertionError):
        check_index(
            lambda op, a: {**interpreted(op, {**a, "weights": weights}), "weights": a["weights"]},
            reference,
            args,
            exact=False,
        )


@pytest.mark.parametrize(("topk", "width"), [(512, 262144), (1024, 262144), (2048, 163840), (2048, 1 << 20)])
def test_a_program_chooses_from_few_candidates_at_a_time(topk: int, width: int) -> None:
    """Of V4, V3.2 and GLM-5.2; all of V4's at once."""
    tuning = MODULE.index_tuning(H200, 8, width, topk)
    assert (tuning.segment, tuning.small) == (8192, max(1024, topk))
    segments = -(-width // tuning.segment)
    assert min(segments, MODULE.MERGED_CANDIDATES // topk) == (segments if topk == 512 else 16384 // topk)


@pytest.mark.parametrize(
    ("topk", "sizes"), [(512, V4), pytest.param(2048, V32, marks=pytest.mark.slow)], ids=["V4-Flash", "V3.2"]
)
def test_kernels_compile_and_fit(
    plan: Callable[..., Any], cubins: Any, resources: Callable[..., Any], topk: int, sizes: Any
) -> None:
    """At published sizes, for sm_90: what a thread keeps is in registers."""
    args = index_args(np.random.default_rng(0), [(1, 40000)] * 2, topk=topk, exact=True, **sizes)
    pack = plan(index_topk, **copied(args)[1])
    store = Store(90, cubins, folders=[])
    store.prepare(pack.specs())
    for spec in pack.specs():
        assert resources(store.get(spec).cubin)["LOCAL"] == 0, (spec, resources(store.get(spec).cubin))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("topk", "sizes"), [(512, V4), (1024, V4), (2048, V32), (2048, {**V32, "heads": 32})],
    ids=["V4-Flash", "V4-Pro", "V3.2", "GLM-5"],
)  # fmt: skip
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("exact", [True, False])
def test_the_indexer_of_published_sizes_on_gpu(
    reference: Run, on_gpu: Run, rng: np.random.Generator, quantized: bool, exact: bool, topk: int, sizes: Any
) -> None:
    tokens = [(1, 70000), (2, 9000), (3, 4095), (0, 0), (2, 2047), (3, 2052), (1, 33000), (3, 0), (2, 8191)]
    tokens += [(1, int(p)) for p in rng.integers(0, 70000, 40)]
    args = index_args(rng, tokens, topk=topk, exact=exact, quantized=quantized, **sizes)
    check_index(on_gpu, reference, args, exact=exact)
