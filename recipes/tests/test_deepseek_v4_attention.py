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
from openinfer.recipes.deepseek_v4.ops import sparse_attend as sparse
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
