"""The kernels that make DeepSeek-V4's queries, keys and entries against the references: in Triton's interpreter, and on
a GPU as published."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton; compile workers drop it

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import NullPack, Op, Store, Target, index_topk
from openinfer.kernels.op.coded import Coded
from openinfer.kernels.op.rounding import hadamard, q4, q8
from openinfer.kernels.op.target import shared_bytes
from openinfer.kernels.testing import error, never_coded, values_in
from openinfer.recipes.deepseek_v4.ops.compress import compress
from openinfer.recipes.deepseek_v4.ops.queries import place_vectors, q_kv_write
from openinfer.recipes.deepseek_v4.ops.sparse_attend import sparse_attend
from openinfer.tensor import Arena, Device, Tensor, bfloat16, float32, int32

Array = np.ndarray[Any, Any]
Run = Callable[[Op[Any], Mapping[str, Any]], dict[str, Array]]
PAGE, LAYERS, EPS = 128, 3, 1e-6
ROUNDED = 4e-3
"""Relative error: a last bit of bfloat16 here and there, and of e4m3 or E2M1 where that decides."""


Check = Callable[..., dict[str, Array]]


@pytest.fixture
def check(reference: Run) -> Check:
    """check(run, op, args, limits): the outputs within these errors of the reference's, and nothing else touched."""

    def compare(
        run: Run, op: Op[Any], args: Mapping[str, Any], limits: Mapping[str, float]
    ) -> dict[str, Array]:
        got, want = run(op, args), reference(op, args)
        for name in got:
            if name.split(".")[0] not in limits:
                assert got[name].tobytes() == args[name].tobytes(), name
        for name, limit in limits.items():
            assert error(values_in(got, name), values_in(want, name)) < limit, name
        return got

    return compare


def angles(positions: int, rotary: int) -> Array:
    """float32 [positions, 2, rotary / 2]."""
    turn = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(rotary // 2) / (rotary // 2))
    return np.stack([np.cos(turn), np.sin(turn)], axis=1).astype(float32)


# Queries and keys


def write_args(
    rng: np.random.Generator, tokens: Sequence[tuple[int, int]], width: int, dim: int, *, quantized: bool
) -> dict[str, Any]:
    slots, last = max(s for s, _ in tokens) + 1, max(p for _, p in tokens)
    tables = 1 + rng.permutation(slots * (last // PAGE + 1)).reshape(slots, -1).astype(np.int32)
    tables[0] = 0
    return {
        "qr": never_coded(len(tokens), width)
        if quantized
        else np.full((len(tokens), width), np.nan, bfloat16),
        "kv": np.full((tables.size + 1, LAYERS, PAGE, dim), np.nan, bfloat16)[:, 1],
        "qkv": (rng.standard_normal((len(tokens), width + dim)) * 3).astype(bfloat16),
        "q_norm": rng.uniform(0.5, 1.5, width).astype(float32),
        "kv_norm": rng.uniform(0.5, 1.5, dim).astype(float32),
        "cos_sin": angles(last + 1, 64),
        "positions": np.array([p for _, p in tokens], np.int32),
        "token_slots": np.array([s for s, _ in tokens], np.int32),
        "block_tables": tables,
        "eps": EPS,
        "quantized": quantized,
    }


TOKENS = [(1, 0), (2, 127), (0, 0), (3, 128), (2, 128), (1, 300), (0, 0)]


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("width", [128, 384])
def test_q_kv_write(
    check: Check, interpreted: Run, rng: np.random.Generator, width: int, quantized: bool
) -> None:
    args = write_args(rng, TOKENS, width, 128, quantized=quantized)
    got = check(interpreted, q_kv_write, args, {"qr": ROUNDED, "kv": ROUNDED})
    if quantized:
        rows = got["kv"][np.isfinite(got["kv"].astype(float32)).all(axis=2)].astype(float32)
        np.testing.assert_array_equal(rows[:, :64], q8(rows[:, :64], 64))


def test_vectors_that_are_placed_later_lie_where_q_kv_write_writes(
    interpreted: Run, reference: Run, rng: np.random.Generator
) -> None:
    args = write_args(rng, TOKENS, 128, 128, quantized=True)
    x = reference(q_kv_write, {**args, "kv": np.zeros((len(TOKENS), 128), bfloat16), "block_tables": None})[
        "kv"
    ]
    where = {name: args[name] for name in ("kv", "positions", "token_slots", "block_tables")}
    wanted = reference(q_kv_write, args)["kv"]
    for run in reference, interpreted:
        assert run(place_vectors, {"x": x, **where})["kv"].tobytes() == wanted.tobytes()


@pytest.mark.parametrize("name", ["q_norm", "kv_norm", "cos_sin", "positions"])
def test_the_comparison_notices_a_small_change(
    interpreted: Run, reference: Run, rng: np.random.Generator, name: str
) -> None:
    """Negative control."""
    args = write_args(rng, TOKENS[:1] + TOKENS[3:4], 128, 128, quantized=False)
    want = reference(q_kv_write, args)
    # One token further, and from the last place of the rotary table to its first.
    args[name] = (args[name] + 1) % 128 if name == "positions" else args[name] * float32.type(1.02)
    got = interpreted(q_kv_write, args)
    assert max(error(got["kv"], want["kv"]), error(got["qr"], want["qr"])) > ROUNDED


# Entries


def compress_args(
    rng: np.random.Generator,
    rows: Sequence[tuple[int, int]],
    *,
    window: int,
    dim: int = 32,
    rotary: int = 16,
    rounding: str = "none",
    dead: Sequence[int] = (),
    padding: int = 0,
) -> dict[str, Any]:
    """Arguments for rows of (tokens before, tokens). What must not be read or is not to be written is NaN."""
    kinds, columns = (3, 2 * dim) if window == 4 else (1, dim)
    size, tokens = len(rows) + 2, sum(n for _, n in rows) + padding
    width = max(before + n for before, n in rows) // PAGE + 2
    slots = 1 + rng.permutation(size - 1)[: len(rows)].astype(np.int32)
    state_tables, entry_tables = (
        1 + rng.permutation(size * width).reshape(size, width).astype(np.int32) for _ in range(2)
    )
    state = np.full((size * width + 1, LAYERS, kinds, 3, dim), np.nan, float32)[:, 1]
    seq_lens, alive = np.zeros(size, np.int32), np.zeros(size, np.int32)
    for r, (slot, (before, _)) in enumerate(zip(slots, rows, strict=True)):
        seq_lens[slot], alive[slot] = before, r not in dead
        if before:
            old = state[state_tables[slot, (before - 1) // PAGE]]
            old[:, 0] = rng.standard_normal((kinds, dim)) * 3
            old[:, 1] = rng.uniform(1, 2, (kinds, dim))
            old[:, 2] = rng.standard_normal((kinds, dim))
            if kinds == 3 and before <= window:  # there is no window before
                old[0] = np.array([-np.inf, 0, 0])[:, None]
    wide = (rng.standard_normal((tokens, 2 * columns + 11)) * 3).astype(float32)
    return {
        "entries": np.full((size * width + 1, LAYERS, PAGE // window, dim), np.nan, bfloat16)[:, 1],
        "state": state,
        "az": wide[:, 3 : 3 + 2 * columns],
        "ape": rng.standard_normal((window, columns)).astype(float32),
        "norm_weight": rng.uniform(0.5, 1.5, dim).astype(float32),
        "cos_sin": angles(width * PAGE, rotary),
        "slots": slots,
        "q_starts": np.concatenate([[0], np.cumsum([n for _, n in rows])]).astype(np.int32),
        "seq_lens": seq_lens,
        "alive": alive,
        "state_tables": state_tables,
        "entry_tables": entry_tables,
        "eps": EPS,
        "rounding": rounding,
        "max_q_len": max(n for _, n in rows),
    }


COMPRESSED = {"entries": ROUNDED, "state": 1e-5}
STARTS = [0, 1, 3, 4, 7, 126, 127, 128, 129, 255, 256]
CHUNKS = [(0, 1), (126, 1), (126, 3), (127, 129), (128, 5), (64, 64), (60, 0), (1, 2), (2, 3), (0, 131)]


@pytest.mark.parametrize("window", [4, 128])
def test_compress_single_tokens(
    check: Check, interpreted: Run, rng: np.random.Generator, window: int
) -> None:
    rows = [(start, 1) for start in STARTS] + [(9, 1), (77, 0)]
    check(interpreted, compress, compress_args(rng, rows, window=window, dead=(11,), padding=1), COMPRESSED)


@pytest.mark.parametrize("window", [4, 128])
def test_compress_chunks(check: Check, interpreted: Run, rng: np.random.Generator, window: int) -> None:
    """Chunks that begin and end before, at and after the edges of pages and windows; dead rows, empty ones, padding."""
    check(
        interpreted, compress, compress_args(rng, CHUNKS, window=window, dead=(1, 8), padding=5), COMPRESSED
    )


@pytest.mark.parametrize("window", [4, 128])
def test_compress_keeps_the_states_of_drafts(
    check: Check, interpreted: Run, rng: np.random.Generator, window: int
) -> None:
    """Rows of up to four tokens that begin and end around edges of pages and windows, and chunks beside them."""
    starts, lengths = [0, 1, 3, 125, 126, 127, 128, 129, 254, 256], [4, 3, 1, 4, 2, 3, 4, 1, 4, 0]
    rows = [*zip(starts, lengths, strict=True), (130, 3), (3, 40), (120, 20), (127, 140)]
    args = compress_args(rng, rows, window=window, dead=(10,), padding=3)
    state = args["state"]
    recent = np.full((len(rows) + 2, LAYERS, 8, *state.shape[1:]), np.nan, float32)[:, 1]
    for slot, (start, length) in zip(args["slots"], rows, strict=True):
        if start % PAGE and length <= 4:  # such a row must not read its page
            page = args["state_tables"][slot, (start - 1) // PAGE]
            recent[slot, (start - 1) % 8] = state[page]
            state[page] = np.nan
    check(interpreted, compress, {**args, "recent": recent}, {**COMPRESSED, "recent": 1e-5})


@pytest.mark.parametrize("rounding", ["q8", "hadamard_q4"])
def test_entries_are_rounded(
    interpreted: Run, reference: Run, rng: np.random.Generator, rounding: str
) -> None:
    args = compress_args(rng, [(2, 40), (7, 1)], window=4, dim=128, rotary=64, rounding=rounding)
    got, want = interpreted(compress, args)["entries"], reference(compress, args)["entries"]
    # A last bit of what is rounded may move a code by a step, or a scale by two, here and there.
    differ = np.abs(got.astype(float32) - want.astype(float32))
    known = np.isfinite(differ)
    assert (differ[known] > 0).mean() < 2e-3
    rows = got[np.isfinite(got.astype(float32)).all(axis=2)].astype(float32)
    assert len(rows) == 11
    if rounding == "q8":
        np.testing.assert_array_equal(rows[:, :64], q8(rows[:, :64], 64))
    else:
        np.testing.assert_array_equal(rows, q4(rows))
        assert np.abs(hadamard(rows) - rows).max() > 0.1


def test_a_window_goes_on_where_a_step_left_it(interpreted: Run, rng: np.random.Generator) -> None:
    """Chunks leave the same entries and states as one step."""
    args = compress_args(rng, [(0, 140)], window=4)
    whole = interpreted(compress, args)
    state, entries, done = args["state"], args["entries"], 0
    for count in (1, 2, 123, 1, 13):
        part = {**args, "state": state, "entries": entries, "az": args["az"][done : done + count]}
        seq_lens = args["seq_lens"].copy()
        seq_lens[args["slots"][0]] = done
        part |= {"seq_lens": seq_lens, "q_starts": np.array([0, count], np.int32), "max_q_len": count}
        after = interpreted(compress, part)
        state, entries, done = after["state"], after["entries"], done + count
    assert entries.tobytes() == whole["entries"].tobytes()
    assert state.tobytes() == whole["state"].tobytes()


@pytest.mark.parametrize("name", ["ape", "norm_weight", "cos_sin", "state", "az"])
def test_the_comparison_of_entries_notices_a_small_change(
    interpreted: Run, reference: Run, rng: np.random.Generator, name: str
) -> None:
    """Negative control."""
    args = compress_args(rng, [(2, 30)], window=4)
    want = reference(compress, args)
    args[name] = args[name] * float32.type(1.05)
    got = interpreted(compress, args)
    assert error(got["entries"], want["entries"]) > ROUNDED


@pytest.mark.gpu
@pytest.mark.parametrize("quantized", [False, True])
def test_published_sizes_on_gpu(
    compile_together: Callable[..., None],
    check: Check,
    on_gpu: Run,
    rng: np.random.Generator,
    quantized: bool,
) -> None:
    limit = 2e-2 if quantized else ROUNDED
    calls: list[tuple[Op[Any], dict[str, Any], dict[str, float]]] = [
        (q_kv_write, write_args(rng, TOKENS, 1536, 512, quantized=quantized), {"qr": limit, "kv": limit})
    ]
    for rows, dead in (([(start, 1) for start in STARTS], (3,)), (CHUNKS, (1, 8))):
        for window, dim, rounding in ((4, 512, "q8"), (4, 128, "hadamard_q4"), (128, 512, "q8")):
            sizes: Any = {"window": window, "dim": dim, "rotary": 64, "padding": 7 * (rows is CHUNKS)}
            args = compress_args(rng, rows, rounding=rounding if quantized else "none", dead=dead, **sizes)
            calls.append((compress, args, {"entries": 10 * limit if dim == 128 else limit, "state": 1e-5}))
    compile_together([(op, args) for op, args, _ in calls])
    for op, args, limits in calls:
        check(on_gpu, op, args, limits)


# What is compiled


def null_step(tokens: int, rows: int, heads: int) -> dict[Op[Any], dict[str, Any]]:
    """The tensors of a layer's calls for published sizes, in null memory."""
    arena = Arena(Device("null"), None)

    def alloc(*shape: int, dtype: np.dtype[Any] = bfloat16) -> Tensor:
        return arena.alloc(shape, dtype)

    def ints(*shape: int) -> Tensor:
        return alloc(*shape, dtype=int32)

    by_token = {
        "positions": ints(tokens),
        "token_slots": ints(tokens),
        "cos_sin": alloc(70000, 2, 32, dtype=float32),
    }
    tables, longest = ints(513, 512), 1 if tokens == rows else tokens
    of_rows = {"slots": ints(rows), "q_starts": ints(rows + 1), "seq_lens": ints(513), "alive": ints(513)}
    az = alloc(tokens, 2624, dtype=float32)
    entries = alloc(40, 21, 32, 512)[:, 3]
    return {
        q_kv_write: by_token | {
            "qr": Coded.allocate(arena, (tokens, 1024), bfloat16), "kv": alloc(40, 43, 128, 512)[:, 3],
            "qkv": alloc(tokens, 1536),
            "q_norm": alloc(1024, dtype=float32), "kv_norm": alloc(512, dtype=float32), "block_tables": tables,
            "eps": EPS, "quantized": True,
        },
        place_vectors: {name: by_token[name] for name in ("positions", "token_slots")} | {
            "x": alloc(tokens, 512), "kv": alloc(40, 43, 128, 512)[:, 3], "block_tables": tables,
        },
        compress: of_rows | {
            "entries": entries, "state": alloc(40, 21, 3, 3, 512, dtype=float32)[:, 3], "az": az[:, :2048],
            "ape": alloc(4, 1024, dtype=float32), "norm_weight": alloc(512, dtype=float32),
            "cos_sin": by_token["cos_sin"], "state_tables": tables, "entry_tables": tables, "eps": EPS,
            "rounding": "q8", "max_q_len": longest,
        },
        index_topk: by_token | {
            "selected": ints(tokens, 512), "q": alloc(tokens, 64, 128), "weights": az[:, 2560:],
            "keys": alloc(40, 21, 32, 128)[:, 3], "block_tables": tables, "scale": 0.1,
            "window": 4, "quantized": True,
        },
        sparse_attend: by_token | {
            "out": alloc(tokens, heads * 512), "q": alloc(tokens, heads, 512), "kv": alloc(40, 43, 128, 512)[:, 3],
            "entries": entries, "selected": ints(tokens, 512), "sinks": alloc(heads, dtype=float32),
            "kv_tables": tables, "entry_tables": tables, "scale": 0.04, "eps": EPS, "window": 128,
        },
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "sms"), [(100, 148), (120, 188)])
def test_kernels_for_other_architectures_fit(tmp_path: Any, arch: int, sms: int) -> None:
    """Those that have e4m3: before sm_89 Triton does not make it."""
    pack, store = NullPack(Target(arch, sms)), Store(arch, tmp_path, folders=[])
    for tokens, rows in [(32, 32), (300, 3)]:
        for op, args in null_step(tokens, rows, 64).items():
            op(pack, **args)
    store.prepare(pack.specs())
    assert max(store.get(s).shared for s in pack.specs()) <= shared_bytes(arch)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [64, 128])
def test_kernels_of_published_sizes_compile(tmp_path: Any, heads: int) -> None:
    pack, store = NullPack(Target(90, 132)), Store(90, tmp_path, folders=[])
    for tokens, rows in [(1, 1), (32, 32), (256, 256), (4096, 1), (2048, 64)]:
        for op, args in null_step(tokens, rows, heads).items():
            op(pack, **args)
    store.prepare(pack.specs())
    assert max(store.get(s).shared for s in pack.specs()) <= shared_bytes(90)
