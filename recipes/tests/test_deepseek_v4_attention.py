"""The kernels of DeepSeek-V4's attention against the references: in Triton's interpreter, and on a GPU as published."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton; compile workers drop it

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import Launch, NullPack, Op, Target
from openinfer.kernels.op.target import H200
from openinfer.kernels.testing import error, run_interpreted
from openinfer.recipes.deepseek_v4 import sparse
from openinfer.recipes.deepseek_v4.ops.index_topk import index_topk
from openinfer.recipes.deepseek_v4.ops.sparse_attend import sparse_attend
from openinfer.tensor import Tensor, bfloat16, float32

Array = np.ndarray[Any, Any]
Run = Callable[[Op[Any], Mapping[str, Any]], dict[str, Array]]
PAGE, LAYERS = 128, 3  # of the caches, the middle layer of which is used
ATTEND = 5e-3  # relative error: probabilities, parts and the result are rounded


def angles(positions: int, rotary: int) -> Array:
    """float32 [positions, 2, rotary / 2]."""
    turn = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(rotary // 2) / (rotary // 2))
    return np.stack([np.cos(turn), np.sin(turn)], axis=1).astype(float32)


class Pages:
    """Memory of pages [pages, E, d] of which nothing is written yet (NaN), with a table a slot; the pages that a table
    names come in no order, and beyond them it names one that stays NaN."""

    def __init__(self, rng: np.random.Generator, slots: int, width: int, per_page: int, dim: int) -> None:
        self.per_page = per_page
        count = slots * width + 2
        self.memory = np.full((count, LAYERS, per_page, dim), np.nan, bfloat16)[:, 1]
        self.tables = 2 + rng.permutation(slots * width).reshape(slots, width).astype(np.int32)
        self.tables[0] = 0

    def place(self, slot: int, numbers: Array) -> tuple[Array, Array]:
        """The page and the place in it of a slot's numbers."""
        return self.tables[slot, numbers // self.per_page], numbers % self.per_page

    def write(self, slot: int, numbers: Array, values: Array) -> None:
        self.memory[self.place(slot, numbers)] = values.astype(bfloat16)


# Attention


def attend_args(
    rng: np.random.Generator,
    tokens: Sequence[tuple[int, int]],
    *,
    per_page: int = 0,
    topk: int = 0,
    heads: int = 4,
    dim: int = 64,
    rotary: int = 16,
    window: int = 128,
) -> dict[str, Any]:
    """Arguments for tokens (slot, position): entries if `per_page`, selected ones if `topk`. What no token may see is
    NaN."""
    slots, last = max(s for s, _ in tokens) + 1, max(p for _, p in tokens)
    width = last // PAGE + 2
    raw = Pages(rng, slots, width, PAGE, dim)
    made = Pages(rng, slots, width, per_page or 1, dim)
    selected = np.full((len(tokens), topk), -1, np.int32)
    for t, (slot, p) in enumerate(tokens):
        if slot == 0:
            continue
        seen = np.arange(max(0, p + 1 - window), p + 1)
        raw.write(slot, seen, rng.standard_normal((len(seen), dim)))
        w = np.arange((p + 1) * per_page // PAGE)
        if topk:
            w = rng.permutation(w)[:topk]
            selected[t, : len(w)] = w
        made.write(slot, w, rng.standard_normal((len(w), dim)) * 2)
    return {
        "out": np.full((len(tokens), heads * dim), np.nan, bfloat16),
        "q": (rng.standard_normal((len(tokens), heads, dim)) / 4).astype(bfloat16),
        "kv": raw.memory,
        "entries": made.memory if per_page else None,
        "selected": selected if topk else None,
        "sinks": rng.standard_normal(heads).astype(float32),
        "cos_sin": angles(last + 1, rotary),
        "positions": np.array([p for _, p in tokens], np.int32),
        "token_slots": np.array([s for s, _ in tokens], np.int32),
        "kv_tables": raw.tables,
        "entry_tables": made.tables,
        "scale": 2 * dim**-0.5,
        "eps": 1e-2,
        "window": window,
    }


def check_attend(run: Run, reference: Run, args: dict[str, Any]) -> None:
    got, want = run(sparse_attend, args), reference(sparse_attend, args)
    assert np.isfinite(got["out"].astype(float32)).all()
    live = args["token_slots"] > 0
    assert error(got["out"][live], want["out"][live]) < ATTEND
    for name in got.keys() - {"out"}:
        assert got[name].tobytes() == args[name].tobytes(), name


@pytest.mark.parametrize("sms", [2, 132])
def test_blocks_of_drafts_see_their_own_and_one_window(
    interpreted: Run, reference: Run, rng: np.random.Generator, sms: int
) -> None:
    """Five tokens of each of four rows, one of them padding; after 1, 40 and 300 tokens. Of many SMs each token has
    several parts."""
    ends, rows, block, dim = [(1, 1), (2, 40), (0, 0), (3, 300)], 4, 5, 64
    args = attend_args(rng, [(slot, end - 1) for slot, end in ends], window=32)  # the window before the block
    own = rng.standard_normal((rows * block, dim)).astype(bfloat16)
    own[2::rows] = np.nan  # of padding
    args |= {
        "out": np.full((rows * block, 4 * dim), np.nan, bfloat16), "entries": own, "block": block,
        "q": (rng.standard_normal((rows * block, 4, dim)) / 4).astype(bfloat16), "cos_sin": angles(310, 16),
        "positions": np.array([end + i for i in range(block) for _, end in ends], np.int32),
        "token_slots": np.array([slot for _ in range(block) for slot, _ in ends], np.int32),
    }  # fmt: skip
    target = Target(arch=90, num_sms=sms, interpreted=True)
    check_attend(lambda op, given: run_interpreted(op, given, target), reference, args)
    wrong = reference(sparse_attend, args | {"window": 31})["out"].astype(float32)
    right = reference(sparse_attend, args)["out"].astype(float32)
    assert np.abs(wrong - right)[1::rows].min(axis=0).max() > 0  # a token that leaves the window is noticed


KINDS = {"raw": {}, "all": {"per_page": 1}, "selected": {"per_page": 32, "topk": 40}}
EDGES = [
    (1, 0),
    (2, 2),
    (0, 0),
    (3, 31),
    (1, 127),
    (2, 128),
    (3, 129),
    (1, 300),
]  # the first window, page ends, padding


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [128, 32, 1])
@pytest.mark.parametrize("splits", [1, 3])
def test_attention_of_single_tokens(
    interpreted: Run,
    reference: Run,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    window: int,
    splits: int,
) -> None:
    monkeypatch.setattr(sparse, "attend_tuning", lambda *_, **__: sparse.AttendTuning(16, 3, splits, 16))
    check_attend(interpreted, reference, attend_args(rng, EDGES, window=window, **KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_chunks(interpreted: Run, reference: Run, rng: np.random.Generator, kind: str) -> None:
    """Chunks of two rows, one of which crosses a page; more heads than a program takes, and not a power of two."""
    tokens = [(1, p) for p in range(125, 131)] + [(2, p) for p in range(3)] + [(0, 0)] * 2
    check_attend(interpreted, reference, attend_args(rng, tokens, heads=66, window=40, **KINDS[kind]))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("change", ["sinks", "cos_sin", "selected", "window", "scale", "eps"])
def test_the_comparison_of_attention_notices_a_small_change(
    interpreted: Run,
    reference: Run,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    splits: int,
) -> None:
    """Negative control."""
    monkeypatch.setattr(sparse, "attend_tuning", lambda *_, **__: sparse.AttendTuning(16, 3, splits, 16))
    args = attend_args(rng, [(1, 200), (2, 90)], **KINDS["selected"])
    args["kv"] = np.nan_to_num(args["kv"].astype(float32)).astype(bfloat16)
    want = reference(sparse_attend, args)
    match change:
        case "sinks":
            args["sinks"] = args["sinks"] + float32.type(4)
        case "cos_sin":
            args["cos_sin"] = np.roll(args["cos_sin"], 1, axis=0)
        case "selected":
            args["selected"][:, 0] = args["selected"][:, 1]
        case "window":
            args["window"] = 120
        case "scale":
            args["scale"] *= 1.05
        case "eps":
            args["eps"] *= 2
    assert error(interpreted(sparse_attend, args)["out"], want["out"]) > ATTEND


PUBLISHED: dict[str, dict[str, int]] = {
    kind: {"heads": 64, "dim": 512, "rotary": 64, **more}
    for kind, more in {"raw": {}, "all": {"per_page": 1}, "selected": {"per_page": 32, "topk": 512}}.items()
}
LONGEST = {1: 9000, 9: 3000, 140: 700}


@pytest.fixture(scope="module")
def attention_compiled(compile_together: Callable[..., None]) -> None:
    rng, calls = np.random.default_rng(0), []
    for rows, longest in LONGEST.items():
        tokens = [(1, longest)] + [(1, 0)] * (rows - 1)
        calls += [(sparse_attend, attend_args(rng, tokens, **options)) for options in PUBLISHED.values()]
    compile_together(calls)


@pytest.mark.gpu
@pytest.mark.usefixtures("attention_compiled")
@pytest.mark.parametrize("kind", PUBLISHED)
@pytest.mark.parametrize("rows", LONGEST)
def test_attention_of_published_sizes_on_gpu(
    reference: Run, on_gpu: Run, rng: np.random.Generator, kind: str, rows: int
) -> None:
    longest = LONGEST[rows]
    tokens = [(slot % 4 if slot % 11 else 0, int(rng.integers(0, longest))) for slot in range(1, rows + 1)]
    tokens[-1] = (1, longest)
    check_attend(on_gpu, reference, attend_args(rng, tokens, **PUBLISHED[kind]))


HOPPER = [
    sparse.HopperTuning(*sizes) for sizes in ((32, 4, 1), (64, 2, 1), (32, 4, 3), (64, 2, 2), (32, 4, 10))
]
SOME = [(1, 3), (2, 600), (3, 129), (0, 0), (1, 1500), (3, 31), (2, 2047), (1, 2300), (3, 127)]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", PUBLISHED)
@pytest.mark.parametrize("tuning", HOPPER, ids=str)
def test_attention_for_hopper_on_gpu(
    reference: Run,
    on_gpu: Run,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    tuning: sparse.HopperTuning,
) -> None:
    """Whatever blocks and parts; the first window, entries that no part or not every part has, two programs a token."""
    monkeypatch.setattr(sparse, "hopper_tuning", lambda *_: tuning)
    args = attend_args(rng, SOME, **{**PUBLISHED[kind], "heads": 128})
    check_attend(on_gpu, reference, args)
    want = reference(sparse_attend, args)["out"]
    got = on_gpu(sparse_attend, {**args, "sinks": args["sinks"] + float32.type(1)})["out"]
    live = args["token_slots"] > 0
    assert error(got[live], want[live]) > ATTEND, "negative control"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", PUBLISHED)
def test_attention_in_triton_on_gpu(
    reference: Run, on_gpu: Run, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(sparse.SparseAttendArgs, "for_hopper", False)
    check_attend(on_gpu, reference, attend_args(rng, SOME, **PUBLISHED[kind]))


def planned(tokens: int, target: Target, kind: str = "selected", **change: int) -> list[Launch]:
    """What a step of single tokens launches."""
    sizes = {**PUBLISHED[kind], **change}
    args = attend_args(np.random.default_rng(0), [(1, 4095)] + [(0, 0)] * (tokens - 1), **sizes)
    tensors = {k: Tensor.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in args.items()}
    plan = NullPack(target)
    sparse_attend(plan, **tensors)
    return [command for command in plan.calls[0].commands if isinstance(command, Launch)]


@pytest.mark.parametrize(
    ("target", "change", "function"),
    [
        (H200, {}, "sparse_attend_hopper"),
        (H200, {"heads": 128}, "sparse_attend_hopper"),
        (H200, {"heads": 16}, "sparse_attend"),
        (H200, {"dim": 256}, "sparse_attend"),
        (H200, {"rotary": 32}, "sparse_attend"),
        (Target(120, 188, cublas=True), {}, "sparse_attend"),
        (Target(90, 132, interpreted=True), {}, "sparse_attend"),
    ],
)
def test_which_kernel_attends(target: Target, change: dict[str, int], function: str) -> None:
    assert planned(4, target, **change)[0].spec.function == function


@pytest.mark.parametrize("tokens", [1, 2, 8, 16, 32, 64, 100, 128, 300])
@pytest.mark.parametrize("kind", PUBLISHED)
def test_parts_fill_a_gpu_once_and_only_where_they_pay(tokens: int, kind: str) -> None:
    first, *merge = planned(tokens, H200, kind)
    splits, rows, groups = first.grid
    assert (rows, groups) == (tokens, 1)
    assert len(merge) == (splits > 1)
    assert splits == 1 or splits * tokens <= H200.num_sms
    block = dict(first.spec.constants)["BN"]
    if kind == "selected":  # 640 vectors
        chosen = {1: (64, 10), 2: (64, 10), 8: (64, 10), 16: (64, 5), 32: (32, 4), 64: (64, 2)}
        assert (block, splits) == chosen.get(tokens, (64, 1))
    if kind == "raw":  # 128 vectors: merging takes as long, once the parts are many
        assert (block, splits) == ((32, 4) if tokens <= 8 else (64, 1))


@pytest.mark.gpu
def test_attention_of_a_chunk_on_gpu(reference: Run, on_gpu: Run, rng: np.random.Generator) -> None:
    tokens = [(1, p) for p in range(1900, 2100)]
    check_attend(
        on_gpu, reference, attend_args(rng, tokens, heads=128, dim=512, rotary=64, per_page=32, topk=512)
    )


# The indexer


def index_args(
    rng: np.random.Generator,
    tokens: Sequence[tuple[int, int]],
    *,
    topk: int,
    exact: bool,
    quantized: bool = False,
    heads: int = 4,
    dim: int = 32,
    rotary: int = 16,
) -> dict[str, Any]:
    """Arguments for tokens (slot, position). `exact`: numbers of few bits and quarter turns, so that scores are exact
    in any order of summation, and many are equal."""
    slots, last = max(s for s, _ in tokens) + 1, max(p for _, p in tokens)
    keys = Pages(rng, slots, last // PAGE + 2, 32, dim)
    for slot in range(1, slots):
        w = np.arange(max([p + 1 for s, p in tokens if s == slot], default=0) // 4)
        values = rng.integers(-2, 3, (len(w), dim)) if exact else rng.standard_normal((len(w), dim))
        keys.write(slot, w, values)
    cos_sin = angles(last + 1, rotary)
    if exact:
        turns = rng.integers(0, 4, (last + 1, rotary // 2))
        cos_sin = np.stack([[1, 0, -1, 0], [0, 1, 0, -1]], 1).astype(float32)[turns].transpose(0, 2, 1)
    q, weights = rng.standard_normal((2, len(tokens), heads, dim))
    wide = np.full((len(tokens), heads + 5), np.nan, float32)
    wide[:, 2 : heads + 2] = rng.integers(-3, 6, (len(tokens), heads)) if exact else weights[:, :, 0]
    return {
        "selected": np.full((len(tokens), topk), 99, np.int32),
        "q": (rng.integers(-3, 4, q.shape) if exact else q).astype(bfloat16),
        "weights": wide[:, 2 : heads + 2],
        "keys": keys.memory,
        "cos_sin": np.ascontiguousarray(cos_sin),
        "positions": np.array([p for _, p in tokens], np.int32),
        "token_slots": np.array([s for s, _ in tokens], np.int32),
        "block_tables": keys.tables,
        "scale": 0.125,
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
    topk = args["selected"].shape[1]
    everything = {
        **args,
        "selected": np.full((len(args["q"]), args["keys"].shape[1] * args["block_tables"].shape[1]), 0),
    }
    for t, (mine, its) in enumerate(zip(got["selected"], want["selected"], strict=True)):
        differ = np.setxor1d(mine, its)
        assert len(np.unique(mine[mine >= 0])) == (its >= 0).sum()
        if len(differ):
            scores = true_scores(everything, t)
            line = np.sort(scores)[-topk]
            assert np.abs(scores[differ] - line).max() < 1e-2 * scores.std(), (t, differ)


def true_scores(args: Mapping[str, Any], t: int) -> Array:
    """A token's scores in float64 from the rounded query."""
    slot, p = args["token_slots"][t], args["positions"][t]
    w = np.arange((p + 1) // 4)
    held = args["keys"][args["block_tables"][slot, w // 32], w % 32].astype(np.float64)
    query = index_query(args, t)
    return args["weights"][t].astype(np.float64) @ np.maximum(query @ held.T, 0)


def index_query(args: Mapping[str, Any], t: int) -> Array:
    from openinfer.kernels.op.rounding import hadamard, q4
    from openinfer.recipes.deepseek_v4.ops import rope

    one = slice(t, t + 1)
    query = (
        rope(args["q"][one].astype(float32), args["cos_sin"], args["positions"][one])[0]
        .astype(bfloat16)
        .astype(float32)
    )
    if args["quantized"]:
        query = q4(hadamard(query).astype(bfloat16).astype(float32))
    return query.astype(np.float64)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("segment", [16, 64, 512])
def test_the_indexer(
    interpreted: Run,
    reference: Run,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    quantized: bool,
    exact: bool,
    segment: int,
) -> None:
    """Fewer than topk entries, as many and one more, segments that are not full, padding; slices of three tokens."""
    tuning = sparse.IndexTuning(parts=2, tokens=3, segment=segment, small=segment // 4, block=16)
    monkeypatch.setattr(sparse, "index_tuning", lambda *_: tuning)
    tokens = [(1, 2), (2, 23), (0, 0), (1, 24), (1, 27), (2, 30), (3, 290), (1, 259), (3, 127)]
    check_index(
        interpreted, reference, index_args(rng, tokens, topk=6, exact=exact, quantized=quantized), exact=exact
    )


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


@pytest.fixture(scope="module")
def indexer_compiled(compile_together: Callable[..., None]) -> None:
    rng, sizes = np.random.default_rng(0), {"heads": 64, "dim": 128, "rotary": 64}
    cases = [(quantized, topk) for quantized in (False, True) for topk in (512, 1024)]
    calls = [index_args(rng, [(1, 70000)] * 49, topk=k, exact=True, quantized=q, **sizes) for q, k in cases]
    compile_together([(index_topk, args) for args in calls])


@pytest.mark.gpu
@pytest.mark.usefixtures("indexer_compiled")
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("topk", [512, 1024])
def test_the_indexer_of_published_sizes_on_gpu(
    reference: Run, on_gpu: Run, rng: np.random.Generator, quantized: bool, exact: bool, topk: int
) -> None:
    tokens = [(1, 70000), (2, 9000), (3, 4095), (0, 0), (2, 2047), (3, 2052), (1, 33000), (3, 0), (2, 8191)]
    tokens += [(1, int(p)) for p in rng.integers(0, 70000, 40)]
    check_index(
        on_gpu,
        reference,
        index_args(rng, tokens, topk=topk, exact=exact, quantized=quantized, heads=64, dim=128, rotary=64),
        exact=exact,
    )
