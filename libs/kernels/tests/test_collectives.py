"""Collectives: ranks as processes over shared memory on the cpu pack and in the interpreter; plans, costs, refusals."""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from openinfer.kernels import (
    Collective,
    ContractError,
    CpuPack,
    CudaDriver,
    LaunchError,
    LaunchPack,
    NullPack,
    RankLost,
    SharedMemory,
    Store,
    Target,
    Workload,
    all_gather,
    all_reduce,
    gather_columns,
    linear_add,
    reduce_add,
    reduce_scatter,
)
from openinfer.kernels.ranks.exchange import choose_exchange, sum_of_ranks
from openinfer.kernels.store import tables
from openinfer.tensor import Device, Stream, Tensor, bfloat16, float32

WORKER = """
import itertools, json, os, sys
os.environ["TRITON_INTERPRET"] = "1"
import numpy as np
from openinfer.kernels import (
    CpuPack, InterpDriver, LaunchPack, SharedMemory, Target, all_gather, all_reduce, gather_columns, reduce_add,
    reduce_scatter,
)
from openinfer.kernels.op.reference import rms_norm
from openinfer.tensor import Tensor, bfloat16, float8_e4m3fn, float32, uint8
file, size = map(int, sys.argv[1:3])
way = sys.argv[3]
rank = next((rank for rank in range(1, size) if os.fork() == 0), 0)  # the imports take longest
ranks = SharedMemory(file, rank, size, slot_bytes=1000, timeout_s=60)
of = Tensor.from_numpy
if way == "cpu":
    pack = CpuPack(ranks)
else:
    pack = LaunchPack(Target(90, 4, interpreted=True), InterpDriver(ranks), of(np.zeros(1 << 20, np.uint8)), None)
found = {}
for rows, dtype in itertools.product(map(int, sys.argv[4].split(",")), (float32, bfloat16)):
    for turn in range(3):
        x = np.random.default_rng([rank, turn]).standard_normal((size * rows, 16)).astype(dtype)
        out, gathered, part = np.empty_like(x), np.empty((size * size * rows, 16), dtype), np.empty((rows, 16), dtype)
        columns, residual = np.empty((size * rows, 16 * size), dtype), np.full_like(x, turn)
        normed, gain = np.empty_like(x), np.linspace(0.5, 2, 16).astype(float32 if turn == 1 else dtype)
        all_reduce(pack, out=of(out), x=of(x), ranks=size)
        all_gather(pack, out=of(gathered), x=of(x), ranks=size)
        reduce_scatter(pack, out=of(part), x=of(x), ranks=size)
        gather_columns(pack, out=of(columns), x=of(x), ranks=size)
        norm = {"normed": of(normed), "norm_weight": of(gain), "eps": 1e-6} if turn else {}
        reduce_add(pack, x=of(residual), y=of(x.copy()), ranks=size, **norm)
        want = rms_norm(residual, gain, 1e-6) if turn else normed
        np.testing.assert_allclose(normed.astype(float32), want.astype(float32), rtol=0.01)
        all_reduce(pack, out=of(x), x=of(x), ranks=size)  # in place
        assert (x == out).all()
        place = slice(rank * size * rows, (rank + 1) * size * rows)
        again = np.zeros_like(gathered)
        again[place] = gathered[place]
        all_gather(pack, out=of(again), x=of(again)[place], ranks=size)
        assert again.tobytes() == gathered.tobytes()
        for kind in (uint8, float8_e4m3fn):  # codes and their scales
            codes = np.empty((size * size * rows, 16 * x.itemsize), kind)
            all_gather(pack, out=of(codes), x=of(out.view(kind)), ranks=size)
            assert codes.tobytes() == size * out.tobytes()
        mine = slice(rank * rows, (rank + 1) * rows)
        x = np.random.default_rng([rank, turn]).standard_normal((size * rows, 16)).astype(dtype)
        reduce_scatter(pack, out=of(x)[mine], x=of(x), ranks=size)
        assert x[mine].tobytes() == part.tobytes()
        arrays = (out, gathered, part, columns, residual)
        found[f"{rows} {dtype.name} {turn}"] = [a.astype(np.float32).tobytes().hex() for a in arrays]
with open(f"{sys.argv[5]}/{rank}.json", "w") as file:
    json.dump(found, file)
"""


@pytest.fixture
def memory():
    """The descriptor of a file that ranks share."""
    file = os.memfd_create("ranks")
    yield file
    os.close(file)


def run_ranks(folder, file, size, way, rows):
    """What every rank found, by rank."""
    command = [sys.executable, "-c", WORKER, str(file), str(size), way, rows, str(folder)]
    subprocess.run(
        command, stdout=subprocess.PIPE, pass_fds=[file], timeout=120
    )  # the pipe ends with the last rank
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.parametrize(("size", "way", "sizes"), [(4, "cpu", (3, 60)), (2, "interp", (1, 60))])
def test_ranks_exchange_over_shared_memory(memory, tmp_path, size, way, sizes):
    """60 rows take several slots. All numbers of rows share the processes, whose start takes longest."""
    found = run_ranks(tmp_path, memory, size, way, ",".join(map(str, sizes)))
    for rows, dtype in itertools.product(sizes, (float32, bfloat16)):
        for turn in range(3):
            drawn = (np.random.default_rng([rank, turn]) for rank in range(size))
            xs = [rng.standard_normal((size * rows, 16)).astype(dtype) for rng in drawn]
            total = xs[0].astype(np.float32)
            for x in xs[1:]:  # in the order of ranks
                total = total + x.astype(np.float32)
            # Launches store the sum.
            stored = total if way == "cpu" else total.astype(dtype).astype(np.float32)
            onto = (stored + np.float32(turn)).astype(dtype)
            total, whole, beside = total.astype(dtype), np.concatenate(xs), np.concatenate(xs, axis=1)
            for rank in range(size):
                want = (total, whole, total[rank * rows : (rank + 1) * rows], beside, onto)
                hexed = [a.astype(np.float32).tobytes().hex() for a in want]
                assert found[rank][f"{rows} {dtype.name} {turn}"] == hexed


def test_a_rank_that_does_not_come_is_named(memory):
    ranks = SharedMemory(memory, 0, 3, timeout_s=0.05)
    with pytest.raises(RankLost, match=r"rank 1 of 3 did not come to exchange 1 within 0\.05 s"):
        ranks.exchange(np.zeros(4))
    with pytest.raises(ValueError, match="rank 3 of 3"):
        SharedMemory(memory, 3, 3)


def test_a_long_wait_leaves_the_processor_to_others(memory, monkeypatch):
    slept, spun = [], [0.0]

    def spin():
        spun[0] += 1e-5

    monkeypatch.setattr(time, "monotonic", lambda: sum(slept) + spun[0])
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(os, "sched_yield", spin)
    with pytest.raises(RankLost):
        SharedMemory(memory, 0, 2, timeout_s=0.2).exchange(np.zeros(1))
    assert 0 < spun[0] < 0.01 * sum(slept)


def test_a_slot_is_there_before_its_counter_says_so(memory, monkeypatch):
    """For processors that do not keep the order of writes: a fence stands between them, at both ends."""
    ranks, seen = SharedMemory(memory, 0, 1), []

    def late():
        seen.append((int(ranks._arrived[0]), ranks._slots[0, 0, :2].tolist()))
        if len(seen) == 2:
            ranks._slots[0, 0, 1] = 9  # it comes behind the counter

    monkeypatch.setattr("openinfer.kernels.ranks.memory_fence", late)
    (found,) = ranks.exchange(np.array([5, 6], np.uint8))
    assert seen == [(0, [5, 6]), (1, [5, 6])]
    assert found.tolist() == [5, 9]


def test_an_abort_ends_a_wait(memory):
    """Of another rank, which maps the same memory."""
    ranks, other = (SharedMemory(memory, rank, 2) for rank in (0, 1))
    threading.Timer(0.05, other.abort).start()
    with pytest.raises(RankLost, match="aborted: one of them is lost"):
        ranks.exchange(np.zeros(4))
    assert ranks.aborted


def test_one_rank_gets_its_own():
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    for op in (all_reduce, all_gather, reduce_scatter, gather_columns):
        out = np.empty_like(x)
        pack = CpuPack()
        op(pack, out=Tensor.from_numpy(out), x=Tensor.from_numpy(x), ranks=1)
        np.testing.assert_array_equal(out, x)


def calls(arena, rows=8, ranks=4):
    x, more = arena.alloc((rows, 6), bfloat16), arena.alloc((ranks * rows, 6), bfloat16)
    return [
        (all_reduce, {"out": x, "x": x, "ranks": ranks}),
        (all_gather, {"out": more, "x": x, "ranks": ranks}),
        (reduce_scatter, {"out": x, "x": more, "ranks": ranks}),
    ]


def test_the_null_pack_counts_the_bytes_of_links(arena):
    pack = NullPack(Target(90, 132))
    for op, args in calls(arena):
        op(pack, **args)
    commands = [command for call in pack.calls for command in call.commands]
    assert [str(command) for command in commands] == [
        "all_reduce of 96 bytes over 4 ranks",
        "all_gather of 96 bytes over 4 ranks",
        "reduce_scatter of 384 bytes over 4 ranks",
    ]
    assert all(isinstance(command, Collective) for command in commands)
    assert pack.specs() == []
    costs = [call.cost(Workload.decode(1, 1)) for call in pack.calls]
    assert [cost.link for cost in costs] == [2 * 72, 3 * 96, 288]  # a ring's
    assert pack.link_bytes() == sum(cost.link for cost in costs)
    assert costs[1].floor_s(1e12, 1e12) < costs[1].floor_s(1e12, 1e12, 1.0) == 288
    assert (costs[0] + costs[1]).link == 2 * 72 + 3 * 96


def test_packs_without_ranks_refuse_by_name(arena, monkeypatch, tmp_path, memory):
    op, args = calls(arena)[0]
    x = Tensor.from_numpy(np.zeros((8, 6), np.float32))
    with pytest.raises(LaunchError, match="all_reduce is over 4 ranks and this pack has no communicator"):
        op(CpuPack(), out=x, x=x, ranks=4)
    with pytest.raises(LaunchError, match="all_reduce is over 4 ranks; the communicator has 1"):
        op(CpuPack(SharedMemory(memory, 0, 1)), out=x, x=x, ranks=4)
    monkeypatch.setattr("openinfer.kernels.packs.cuda_driver.driver", lambda: None)
    device = Device("null")
    pack = LaunchPack(Target(90, 132), CudaDriver(device, Stream(device), Store(90, tmp_path)), None, None)
    with pytest.raises(LaunchError, match="a collective is over 4 ranks; this driver has none"):
        op(pack, **args)


def test_a_norm_is_part_of_the_push(arena):
    """One kernel for the sum, the residual and the norm; for NCCL the norm is a kernel of its own."""
    target = Target(90, 132)
    for rows, kernels in (
        (128, ["push_sum"]),
        (300, ["push_sum"] * 2),  # of 256 programs
        (4096, ["push_sum"] * 16),
        (8192, ["all_reduce", "add_rows", "rms_norm"]),
    ):
        x, y, normed = (arena.alloc((rows, 4096), bfloat16) for _ in range(3))
        norm = {"normed": normed, "norm_weight": arena.alloc((4096,), float32), "eps": 1e-6}
        pack = NullPack(target)
        reduce_add(pack, x=x, y=y, ranks=2, **norm)
        assert [getattr(c, "kind", None) or c.spec.function for c in pack.calls[0].commands] == kernels
        linear_add(pack, x=x, h=y, weight=arena.alloc((4096, 4096), bfloat16), ranks=2, **norm)
        assert [getattr(c, "kind", None) or c.spec.function for c in pack.calls[1].commands][1:] == kernels
    with pytest.raises(ContractError, match="norm_weight and eps come together"):
        reduce_add(pack, x=x, y=y, ranks=2, normed=normed, norm_weight=norm["norm_weight"])
    with pytest.raises(ContractError, match="normed and norm_weight come together"):
        reduce_add(pack, x=x, y=y, ranks=2, norm_weight=norm["norm_weight"], eps=1e-6)


def test_pushes_start_early_where_the_gpu_can(arena):
    """All kernels of a sum, on sm_90 and up."""
    x, y = (arena.alloc((300, 4096), bfloat16) for _ in range(2))
    for arch, early in ((80, False), (90, True)):
        commands = list(sum_of_ranks(Target(arch, 132), x, y, 2))
        assert len(commands) > 1
        assert {(one.early, dict(one.spec.constants)["EARLY"]) for one in commands} == {(early, early)}


def test_the_way_to_add_up_follows_from_ranks_and_bytes(monkeypatch):
    """Two ranks send each byte once in either way. A table comes before the rule, batch invariance before both."""
    target = Target(90, 132, gpu="a GPU")
    monkeypatch.setattr(tables, "gpu_table", lambda gpu: {})
    found = {(ranks, rows): choose_exchange(target, ranks, rows, 4096).kind
             for ranks in (2, 4, 8) for rows in (1, 8, 64, 512, 8192)}  # fmt: skip
    assert [kind for (ranks, _), kind in found.items() if ranks == 2] == ["push"] * 4 + ["nccl"]
    assert [kind for (ranks, _), kind in found.items() if ranks == 4] == ["push"] * 2 + ["two_shot"] * 2 + [
        "nccl"
    ]
    assert [kind for (ranks, _), kind in found.items() if ranks == 8] == ["push"] * 2 + ["two_shot"] * 2 + [
        "nccl"
    ]
    assert [choose_exchange(target, 2, rows, 4096).warps for rows in (1, 128, 129, 512)] == [
        16,
        16,
        8,
        8,
    ]
    much = [choose_exchange(target, 2, 2048, 4096, most << 20).kind for most in (4, 16)]
    assert much == ["nccl", "push"]
    table = {"sum_of_ranks": {"2x4096": {"8": {"kind": "two_shot", "warps": 4}}}}
    monkeypatch.setattr(tables, "gpu_table", lambda gpu: table)
    tuned = Target(90, 132, gpu="another GPU")
    assert choose_exchange(tuned, 2, 5, 4096) == tables.Exchange("two_shot", 4)
    assert choose_exchange(tuned, 2, 9, 4096) == tables.Exchange("push")
    invariant = {choose_exchange(replace(tuned, batch_invariant=True), 2, n, 4096) for n in (1, 8192)}
    assert invariant == {tables.Exchange("push", 8)}


def test_contracts(arena):
    x = arena.alloc((8, 6), bfloat16)
    for op, out, ranks, why in (
        (all_reduce, arena.alloc((8, 5), bfloat16), 2, r"out has shape \(8, 5\); it must be \[8, 6\]"),
        (all_reduce, arena.alloc((8, 6), float32), 2, "out is float32"),
        (all_gather, arena.alloc((8, 6), bfloat16), 2, r"must be \[16, 6\]"),
        (reduce_scatter, arena.alloc((2, 6), bfloat16), 3, "8 rows, which 3 ranks cannot share"),
        (all_reduce, x, 0, "0 ranks"),
    ):
        with pytest.raises(ContractError, match=why):
            op.check(op.args(out=out, x=x, ranks=ranks))
