"""The kernels of Qwen3.5's delta rule, in Triton's interpreter, against the references."""

from __future__ import annotations

import dataclasses
import itertools
import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton; compile workers drop it

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import H200, InterpDriver, LaunchPack, NullPack, Op, Store, Target
from openinfer.kernels.op.target import shared_bytes
from openinfer.kernels.packs.null import scratches
from openinfer.kernels.testing import copied, error, of_the_day, run_interpreted, run_reference
from openinfer.recipes.qwen3_5.ops import gated_delta_net as delta
from openinfer.recipes.qwen3_5.ops.gated_delta_net import gated_delta_net
from openinfer.tensor import Arena, Device, Tensor, bfloat16, float32, int32

Array = np.ndarray[Any, Any]
SMALL = Target(arch=90, num_sms=4, interpreted=True)
# Relative errors: a step rounds where the reference does, chunks round what they multiply.
STEP, CHUNKS = 3e-3, 8e-3
LAYERS = 3  # of a cache of states, the middle one of which is used


def run_both(
    op: Op[Any], args: Mapping[str, Any], target: Target = SMALL
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The arrays of a call as the kernels leave them, and as the reference does."""
    return run_interpreted(op, args, target), run_reference(op, args)


def delta_step(
    rng: np.random.Generator,
    lengths: Sequence[int],
    before: Sequence[int],
    *,
    heads: tuple[int, int, int, int] = (2, 4, 32, 32),
    tokens: int | None = None,
    dead: Sequence[int] = (),
    moved: Sequence[int] = (),
    snapshots: Mapping[int, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Arguments for rows of `lengths` tokens after `before` others. heads: key heads, value heads, their sizes. Rows of
    `moved` read another block than they write; `snapshots` says at which ends rows leave some. Memory that must not be
    read is NaN."""
    key_heads, value_heads, dk, dv = heads
    total, rows, width = tokens or sum(lengths), len(lengths), 2 * key_heads * dk + value_heads * dv
    size, blocks = rows + 3, iter(rng.permutation(np.arange(1, 4 * rows + 12)))
    slots = rng.permutation(np.arange(1, size))[:rows].astype(np.int32)
    seq_lens, alive = np.full(size, 10**6, np.int32), np.zeros(size, np.int32)
    state_from, state_to = np.zeros((2, size), np.int32)
    state = np.full((4 * rows + 12, LAYERS, value_heads, dk, dv), np.nan, float32)[:, 1]
    ring = np.full((4 * rows + 12, LAYERS, 4, width), np.nan, bfloat16)[:, 1]
    due = {row: list(ends) for row, ends in (snapshots or {}).items()}
    most = max([1, *(len(ends) for ends in due.values())])
    ends, targets = np.zeros((rows, most), np.int32), np.zeros((rows, most), np.int32)
    for row, slot in enumerate(slots):
        seq_lens[slot], alive[slot], state_from[slot] = before[row], row not in dead, next(blocks)
        state_to[slot] = next(blocks) if row in moved else state_from[slot]
        if before[row]:
            state[state_from[slot]] = rng.standard_normal((value_heads, dk, dv)) * 0.3
            ring[state_from[slot]] = rng.standard_normal((4, width))
        for n, end in enumerate(due.get(row, [])):
            ends[row, n], targets[row, n] = end, next(blocks)
    mixed = rng.standard_normal((total, width + value_heads * dv + 2 * value_heads + 8)).astype(bfloat16)
    edges = np.cumsum([0, width, value_heads * dv, 2 * value_heads])
    qkv, z, ba = (mixed[:, a:b] for a, b in itertools.pairwise(edges))
    return {
        "out": np.full((total, value_heads * dv), np.nan, bfloat16),
        "qkv": qkv,
        "z": z,
        "ba": ba,
        "conv_weight": (rng.standard_normal((width, 4)) * 0.5).astype(bfloat16),
        "decay": -rng.uniform(0.1, 4, value_heads).astype(float32),
        "dt_bias": (rng.standard_normal(value_heads) - 2).astype(float32),
        "norm_weight": rng.uniform(0.5, 1.5, dv).astype(float32),
        "conv_state": ring,
        "state": state,
        "slots": slots,
        "q_starts": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        "seq_lens": seq_lens,
        "alive": alive,
        "state_from": state_from,
        "state_to": state_to,
        "snapshot_ends": ends,
        "snapshot_blocks": targets,
        "eps": 1e-6,
        "max_q_len": 1 if total == rows and max(lengths) == 1 else total,
    }


def with_drafts(
    rng: np.random.Generator,
    args: dict[str, Any],
    drafts: Sequence[int],
    accepted: Sequence[int],
    most: int = 3,
) -> dict[str, Any]:
    """The arguments with drafts: of each row, and those that its step before accepted. Their inputs are in `recent`,
    and what must not be read there is NaN."""
    ring, size, width = 2 * most + 2, len(args["seq_lens"]), args["qkv"].shape[1] + args["ba"].shape[1]
    recent = np.full((size, LAYERS, ring, width), np.nan, bfloat16)[:, 1]
    by_slot = np.full(size, 99, np.int32)
    for row, slot in enumerate(args["slots"]):
        by_slot[slot], end = accepted[row], args["seq_lens"][slot]
        for position in range(end - accepted[row], end):
            recent[slot, position % ring] = rng.standard_normal(width)
    return {**args, "recent": recent, "accepted": by_slot, "num_drafts": np.array(drafts, np.int32)}


def check_delta(args: dict[str, Any], limit: float, target: Target = SMALL) -> None:
    """Outputs, states and rings as the reference leaves them, and nothing else touched."""
    got, want = run_both(gated_delta_net, args, target)
    for name in got.keys() - {"out", "state"}:
        assert got[name].tobytes() == want[name].tobytes(), name
    assert np.isfinite(got["out"].astype(float32)).all()
    assert error(got["out"], want["out"]) < limit
    assert error(got["state"], want["state"]) < limit


@pytest.mark.parametrize("heads", [(2, 4, 32, 32), (1, 3, 64, 16), (2, 2, 16, 32)])
def test_a_decode_step(rng: np.random.Generator, heads: tuple[int, int, int, int]) -> None:
    lengths, before = [1, 1, 1, 0, 1, 1, 1], [0, 1, 2, 9, 3, 70, 4]
    check_delta(delta_step(rng, lengths, before, heads=heads, tokens=7, dead=(1, 3), moved=(0, 4, 5)), STEP)


@pytest.mark.parametrize("drafts", of_the_day([None, [2, 0, 0, 3, 0]]))
def test_states_in_bf16(rng: np.random.Generator, drafts: list[int] | None) -> None:
    """Rounded where they are left. A prompt that goes on from a snapshot has the bits of one that is not cut."""
    args = delta_step(
        rng, [3, 200, 1, 4, 70], [9, 70, 12, 66, 0], heads=(1, 2, 16, 32), moved=(1, 2), snapshots={1: [128], 4: [64]}
    )  # fmt: skip
    args |= {
        "state": args["state"].astype(bfloat16),
        "decay": args["decay"] / 40,
    }  # what is rounded is not forgotten
    args = with_drafts(rng, args, drafts, [1, 0, 0, 2, 0]) if drafts else args
    check_delta(args, 2 * CHUNKS)
    whole, rest, count = run_interpreted(gated_delta_net, args, SMALL), slice(61, 203), 142
    cut = {**args, "state": whole["state"], "conv_state": whole["conv_state"], "max_q_len": count}
    cut |= {"recent": None, "accepted": None, "num_drafts": None, "q_starts": np.array([0, count], np.int32)}
    cut |= {k: args[k][rest] for k in ("qkv", "z", "ba", "out")}
    cut |= {k: args[k][1:2] for k in ("slots", "snapshot_ends", "snapshot_blocks")}
    cut["seq_lens"] = np.full_like(args["seq_lens"], 128)
    cut["state_from"] = np.full_like(args["state_from"], args["snapshot_blocks"][1, 0])
    got, target = run_interpreted(gated_delta_net, cut, SMALL), args["state_to"][args["slots"][1]]
    assert got["out"].tobytes() == whole["out"][rest].tobytes()
    assert got["state"][target].tobytes() == whole["state"][target].tobytes()


def test_a_decode_step_in_parts(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "choose_tuning", lambda *_: delta.Tuning(step_columns=16))
    check_delta(delta_step(rng, [1, 0, 1, 1], [0, 3, 70, 4], heads=(1, 2, 16, 64), dead=(3,), tokens=4), STEP)


@pytest.mark.parametrize("heads", [(1, 2, 16, 32), (1, 1, 32, 16)])
@pytest.mark.parametrize(("length", "before"), [(5, 0), (64, 0), (66, 63), (70, 3), (1, 64), (130, 128)])
def test_a_prompt(
    rng: np.random.Generator, heads: tuple[int, int, int, int], length: int, before: int
) -> None:
    end = (before + length) // 64 * 64
    args = delta_step(
        rng,
        [length],
        [before],
        heads=heads,
        tokens=length + 9,
        moved=range(before % 2),
        snapshots={0: [end] if end > before else []},
    )
    check_delta(args, CHUNKS)


def test_a_mixed_step(rng: np.random.Generator) -> None:
    """Chunks, decode rows, empty rows, dead ones of each kind, padding, snapshots in any order and blocks that move."""
    lengths, before = [1, 200, 0, 64, 1, 3, 20, 1, 33], [9, 0, 3, 70, 0, 2, 1, 5, 31]
    args = delta_step(
        rng,
        lengths,
        before,
        heads=(1, 2, 16, 32),
        tokens=sum(lengths) + 17,
        dead=(6, 7),
        moved=(0, 3, 5),
        snapshots={1: [128, 64, 192], 3: [128], 8: [64]},
    )
    check_delta(args, CHUNKS)


def test_decode_rows_and_prompts_are_branches_that_need_nothing_of_each_other(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever order they run, the same bits; and no scratch memory is of both."""
    monkeypatch.setattr(delta, "choose_tuning", lambda *_: delta.Tuning(beside=True))
    lengths, before = [1, 70, 0, 1], [9, 60, 3, 0]
    args = delta_step(rng, lengths, before, heads=(1, 1, 16, 16), moved=(0, 1), snapshots={1: [128]})
    left = []
    for order in ("as listed", "in between"):
        arrays, tensors = copied(args)
        plan = NullPack(SMALL)
        gated_delta_net(plan, **tensors)
        commands = plan.calls[0].commands
        assert [c.branch for c in commands] == [1, 1, 1, 1, 2]
        *chunks, step = commands
        assert not {*scratches(step)} & {s for c in chunks for s in scratches(c)}
        if order == "in between":
            commands = (chunks[0], step, *chunks[1:])
        scratch = np.full(plan.workspace_bytes(zeroed=False), 0xFF, np.uint8)
        zeros = np.zeros(plan.workspace_bytes(zeroed=True), np.uint8)
        pack = LaunchPack(SMALL, InterpDriver(), Tensor.from_numpy(scratch), Tensor.from_numpy(zeros))
        pack.submit(order, commands)
        left.append({name: array.tobytes() for name, array in arrays.items()})
    assert left[0] == left[1]
    assert left[0]["out"] != args["out"].tobytes()


@pytest.mark.parametrize(
    ("tokens", "rows", "branches"),
    [(2048, 256, {1, 2}), (1024, 64, {0}), (2048, 8, {0}), (256, 256, {0}), (2048, 1, {0})],
)
def test_only_a_mixed_step_of_many_rows_has_branches(tokens: int, rows: int, branches: set[int]) -> None:
    plan = NullPack(H200)
    args = null_step(tokens, rows, 16, 32)
    gated_delta_net(plan, **{**args, "max_q_len": 1 if tokens == rows else tokens})
    assert {c.branch for c in plan.calls[0].commands} == branches


@pytest.mark.parametrize("heads", [(2, 4, 32, 32), (1, 3, 64, 16)])
def test_rows_with_drafts(rng: np.random.Generator, heads: tuple[int, int, int, int]) -> None:
    """Every number of drafts and of accepted ones, at the start of a sequence and later, dead and moved rows."""
    drafts, accepted = [0, 1, 2, 3, 3, 0, 2, 1, 3, 0], [0, 0, 1, 2, 3, 3, 0, 1, 3, 0]
    lengths = [1 + n for n in drafts[:-1]] + [0]
    before = [0, 1, 2, 3, 70, 9, 131, 5, 66, 4]
    args = delta_step(rng, lengths, before, heads=heads, tokens=sum(lengths) + 6, dead=(7,), moved=(1, 6))
    check_delta(with_drafts(rng, {**args, "max_q_len": 4}, drafts, accepted), STEP)


def test_a_mixed_step_with_drafts(rng: np.random.Generator) -> None:
    """Chunks beside rows with drafts; a chunk as short as such a row leaves its snapshot too."""
    lengths, before = [3, 100, 1, 4, 2, 0, 2, 20], [9, 30, 12, 62, 63, 3, 62, 1]
    args = delta_step(
        rng, lengths, before, heads=(1, 2, 16, 32), tokens=sum(lengths) + 17, dead=(7,), moved=(1, 4),
        snapshots={1: [64, 128], 3: [64], 4: [64], 6: [64]},
    )  # fmt: skip
    check_delta(with_drafts(rng, args, [2, 0, 0, 0, 0, 0, 0, 0], [1, 0, 2, 0, 0, 0, 0, 0]), CHUNKS)


@pytest.mark.parametrize(("dtype", "limit"), [(float32, 1e-5), (bfloat16, 5e-4)])
def test_steps_of_drafts_leave_the_states_of_steps_of_one_token(
    rng: np.random.Generator, dtype: Any, limit: float
) -> None:
    """Two steps, of which the first has a wrong draft: the state is as if that draft had not been there."""
    args = delta_step(rng, [3], [70], heads=(1, 2, 16, 16))
    args["state"] = args["state"].astype(dtype)
    args = with_drafts(rng, {**args, "max_q_len": 3}, [2], [0])
    want = dict(args)
    _, after = run_both(gated_delta_net, args)
    after["seq_lens"] += 2  # the certain token and one draft
    after["accepted"][after["slots"]] = 1
    after["num_drafts"][:] = 0
    second = {**args, **after, **{k: after[k][1:2] for k in ("qkv", "z", "ba", "out")}}
    second |= {"q_starts": np.array([0, 1], np.int32), "max_q_len": 1}
    got, _ = run_both(gated_delta_net, second)
    for n, part in enumerate((want, want, second)):
        row = {k: part[k][n : n + 1] if part is want else part[k] for k in ("qkv", "z", "ba", "out")}
        one = {**want, **row, "q_starts": np.array([0, 1], np.int32), "max_q_len": 1}
        one |= {"recent": None, "accepted": None, "num_drafts": None}
        _, left = run_both(gated_delta_net, one)
        want["state"], want["conv_state"] = left["state"], left["conv_state"]
        want["seq_lens"] = want["seq_lens"] + 1
    assert error(got["out"], left["out"]) < STEP
    assert error(got["state"], want["state"]) < limit
    assert got["conv_state"].tobytes() == want["conv_state"].tobytes()


def test_chunks_that_begin_anywhere(rng: np.random.Generator) -> None:
    """Rows of the published head size that go on inside a chunk; scratch and what lies outside the rows is NaN."""
    starts = [333, 666, 999, *rng.integers(1, 200, 5).tolist()]
    lengths = [333, 67, 1, *rng.integers(1, 130, 5).tolist()]
    for rows in (slice(0, 1), slice(1, 8)):
        args = delta_step(
            rng, lengths[rows], starts[rows], heads=(1, 2, 128, 128), tokens=sum(lengths[rows]) + 50,
            moved=(0,), snapshots={0: [(starts[rows][0] // 64 + 1) * 64]},
        )  # fmt: skip
        check_delta(args, CHUNKS)


def test_correlated_keys_that_hardly_fade(rng: np.random.Generator) -> None:
    """The triangular system at its worst: all keys nearly alike, beta near 1 and nothing forgotten. What is left is the
    rounding of the keys, whose differences count here."""
    args = delta_step(rng, [128], [0], heads=(1, 1, 32, 32))
    args["qkv"][:, 32:64] = (1 + 0.05 * rng.standard_normal((128, 32))).astype(bfloat16)
    args["conv_weight"][32:64] = bfloat16.type(1)
    args["ba"][:, :1] = bfloat16.type(6)
    args["decay"][:] = -1e-4
    check_delta(args, 4e-2)


@pytest.mark.parametrize("name", ["decay", "dt_bias", "conv_weight", "norm_weight"])
@pytest.mark.parametrize("lengths", [[1, 1], [40]])
def test_the_comparison_notices_a_change(rng: np.random.Generator, name: str, lengths: list[int]) -> None:
    """Negative control: the kernels with a weight 5 % off are out of bounds."""
    args = delta_step(rng, lengths, [80] * len(lengths))
    good = run_both(gated_delta_net, args)[1]
    args[name] = (args[name] * 1.05).astype(args[name].dtype)
    bad = run_both(gated_delta_net, args)[0]
    limit = STEP if len(lengths) > 1 else CHUNKS
    assert error(bad["out"], good["out"]) > limit or error(bad["state"], good["state"]) > limit


def null_step(tokens: int, rows: int, key_heads: int, heads: int) -> dict[str, Any]:
    """The tensors of a call for a published size, in null memory."""
    arena, width = Arena(Device("null"), None), (2 * key_heads + heads) * 128

    def alloc(*shape: int, dtype: np.dtype[Any] = int32) -> Tensor:
        return arena.alloc(shape, dtype)

    mixed = alloc(tokens, width + heads * 130, dtype=bfloat16)
    by_slot = {name: alloc(513) for name in ("seq_lens", "alive", "state_from", "state_to")}
    return by_slot | {
        "out": alloc(tokens, heads * 128, dtype=bfloat16),
        "qkv": mixed[:, :width],
        "z": mixed[:, width : width + heads * 128],
        "ba": mixed[:, width + heads * 128 :],
        "conv_weight": alloc(width, 4, dtype=bfloat16),
        **{name: alloc(heads, dtype=float32) for name in ("decay", "dt_bias")},
        "norm_weight": alloc(128, dtype=float32),
        "conv_state": alloc(700, 24, 4, width, dtype=bfloat16)[:, 3],
        "state": alloc(700, 24, heads, 128, 128, dtype=float32)[:, 3],
        "slots": alloc(rows),
        "q_starts": alloc(rows + 1),
        **{name: alloc(rows, 4) for name in ("snapshot_ends", "snapshot_blocks")},
        "eps": 1e-6,
        "max_q_len": 1 if tokens == rows else tokens,
    }


INVARIANT = dataclasses.replace(SMALL, batch_invariant=True)
STEPS = {
    "whole": [(24, 0, 0)],
    "cut": [(7, 0, 0), (1, 0, 0), (16, 0, 0)],
    "one by one": [(15, 0, 0)] + [(1, 0, 0)] * 9,
    "drafts": [(5, 0, 0), (1, 3, 2), (1, 3, 0), (1, 1, 1), (1, 2, 1), (11, 0, 0)],
}  # of each: sure tokens, drafts, accepted ones


def by_steps(
    seed: int, args: dict[str, Any], steps: Sequence[tuple[int, int, int]], company: Sequence[int]
) -> dict[str, bytes]:
    """What the row of `args` leaves, in steps beside rows of `company` tokens, which are others in each step."""
    rng, at, mine = np.random.default_rng(seed), int(args["seq_lens"][args["slots"][0]]), len(company) // 2
    args, out, slot = with_drafts(rng, args, [0], [0]), [], int(args["slots"][0])
    before, drafted = at, any(drafts for _, drafts, _ in steps)
    for sure, drafts, accepted in steps:
        lengths = [*company[:mine], sure + drafts, *company[mine:]]
        step = delta_step(
            rng, lengths, [9] * len(lengths), heads=(1, 2, 16, 32), tokens=sum(lengths) + len(company)
        )
        step |= {name: args[name] for name in ("conv_weight", "decay", "dt_bias", "norm_weight")}
        step = with_drafts(rng, {**step, "max_q_len": max(lengths)}, [0] * len(lengths), [0] * len(lengths))
        own, first = int(step["slots"][mine]), sum(lengths[:mine])
        block, target = int(step["state_from"][own]), int(args["state_to"][slot])
        for name in ("qkv", "z", "ba"):
            step[name][first : first + sure + accepted] = args[name][
                at - before : at - before + sure + accepted
            ]
        for name in ("state", "conv_state"):
            step[name] = step[name].astype(args[name].dtype)
            step[name][block] = args[name][target]
        step["recent"][own] = args["recent"][slot]
        step["seq_lens"][own], step["accepted"][own] = at, args["accepted"][slot]
        step["num_drafts"][mine] = drafts
        if not drafted:
            step |= {"recent": None, "accepted": None, "num_drafts": None}
        left = run_interpreted(gated_delta_net, step, INVARIANT)
        out.append(left["out"][first : first + sure + accepted])
        for name in ("state", "conv_state"):
            args[name][target] = left[name][block]
        if drafted:
            args["recent"][slot] = left["recent"][own]
        args["accepted"][slot], at = accepted, at + sure + accepted
    return {"out": np.concatenate(out).tobytes()} | {
        name: args[name][target].tobytes() for name in ("state", "conv_state")
    }


@pytest.mark.parametrize("dtype", of_the_day([float32, bfloat16]))
def test_batch_invariant_kernels_leave_the_same_bits_however_a_row_is_cut(
    rng: np.random.Generator, dtype: Any
) -> None:
    args = delta_step(rng, [24], [30], heads=(1, 2, 16, 32))
    args["state"] = args["state"].astype(dtype)
    left = {
        (name, company): by_steps(n, copied(args)[0], steps, company)
        for n, (name, steps) in enumerate(STEPS.items())
        for company in ((), (1, 3, 20))
        if name != "one by one" or not company
    }
    assert len({*map(str, left.values())}) == 1


@pytest.mark.parametrize("drafts", of_the_day([None, [2, 0, 0, 3, 0, 0, 0]]))
def test_batch_invariant_kernels(rng: np.random.Generator, drafts: list[int] | None) -> None:
    """Prompts, decode rows, drafts, snapshots, dead and empty rows and padding by the same three kernels."""
    lengths, before = [3, 100, 1, 4, 70, 0, 20], [9, 30, 12, 62, 0, 3, 1]
    args = delta_step(
        rng, lengths, before, heads=(1, 3, 16, 32), tokens=sum(lengths) + 17, dead=(6,), moved=(1, 3),
        snapshots={1: [128, 64], 4: [64]},
    )  # fmt: skip
    args = with_drafts(rng, args, drafts, [1, 0, 0, 2, 0, 0, 0]) if drafts else args
    check_delta(args, STEP, INVARIANT)


@pytest.mark.slow
@pytest.mark.parametrize(("key_heads", "heads"), [(16, 16), (16, 32), (16, 48), (16, 64)])
def test_kernels_of_published_sizes_compile(tmp_path: Any, key_heads: int, heads: int) -> None:
    pack, store = NullPack(Target(90, 132)), Store(90, tmp_path, folders=[])
    for tokens, rows in [(1, 1), (256, 256), (4096, 1), (2048, 64)]:
        for pack.target in (Target(90, 132), Target(90, 132, batch_invariant=True)):
            gated_delta_net(pack, **null_step(tokens, rows, key_heads, heads))
    store.prepare(pack.specs())
    assert max(store.get(s).shared for s in pack.specs()) <= shared_bytes(90)
