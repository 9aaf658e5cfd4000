"""Branches of a call: what they are in a captured graph, against a model of stream capture and on a GPU; elsewhere
nothing but their order."""

import dataclasses
import types

import numpy as np
import pytest

from openinfer.kernels import (
    H200,
    ContractError,
    Cost,
    CudaDriver,
    LaunchError,
    LaunchPack,
    NullPack,
    Op,
    Scratch,
    beside,
    embed,
    launch,
)
from openinfer.kernels.op.op import FORKED, fork, may_share_memory
from openinfer.kernels.packs import cuda_driver
from openinfer.kernels.store.cubins import Compiled
from openinfer.tensor import Device, Tensor, bfloat16, check, driver

MAIN = 5


class Capture:
    """CUDA's driver as far as branches go. A stream knows after which kernels its next one comes, or None while it has
    no part in the graph; `edges`: of each kernel, those that it comes after."""

    def __init__(self, *, capturing=True):
        self.capturing = capturing
        self.after = {MAIN: set()}
        self.priorities = {MAIN: CudaDriver.PRIORITY}
        self.edges = {}
        self.streams = []

    def stream(self, device, priority=0):
        handle = len(self.after) + MAIN
        self.after[handle] = None
        self.priorities[handle] = priority

        def wait(event):
            self.after[handle] = (self.after[handle] or set()) | event.after

        return types.SimpleNamespace(handle=handle, wait=wait)

    def event(self, device):
        made = types.SimpleNamespace(after=None)
        made.record = lambda stream: setattr(made, "after", set(self.after[stream.handle]))
        return made

    def main(self):
        return types.SimpleNamespace(handle=MAIN, wait=lambda event: self.after[MAIN].update(event.after))

    def cuStreamIsCapturing(self, stream):  # noqa: N802
        return 0, int(self.capturing)

    def cuModuleLoadData(self, image):  # noqa: N802
        return 0, 1

    def cuModuleGetFunction(self, module, name):  # noqa: N802
        return 0, name.decode()

    def cuLaunchKernel(self, function, *rest):  # noqa: N802
        stream = rest[-3]
        assert self.after[stream] is not None, f"{function} was launched outside the capture"
        self.edges[function] = frozenset(self.after[stream])
        self.after[stream] = {function}
        self.streams.append(stream)
        return (0,)

    def before(self, kernel):
        """All kernels that are done when this one starts."""
        direct = self.edges[kernel]
        return set(direct).union(*(self.before(k) for k in direct))


class ByName:
    """A store in which a kernel's name is its function's."""

    def get(self, spec):
        if spec.function == "missing":
            raise LaunchError("no such kernel")
        return Compiled(b"ELF", spec.function, 0, 4, 1, ())


@pytest.fixture
def captured(monkeypatch):
    def make(*, capturing=True):
        fake = Capture(capturing=capturing)
        monkeypatch.setattr(cuda_driver, "driver", lambda: fake)
        monkeypatch.setattr(cuda_driver, "Stream", fake.stream)
        monkeypatch.setattr(cuda_driver, "Event", fake.event)
        device = types.SimpleNamespace(shared_memory_per_block=227 << 10)
        return fake, LaunchPack(H200, CudaDriver(device, fake.main(), ByName()), None, None)

    return make


def kernels(*names):
    return [launch("m", name, (1,), {"n": 1}, {}) for name in names]


def test_a_graph_has_the_edges_that_are_meant_and_no_others(captured):
    fake, pack = captured()
    commands = [*kernels("first"), *beside(kernels("a1", "a2", "a3"), kernels("b")), *kernels("last")]
    pack.submit("call", commands)
    pack.submit("next call", list(beside(kernels("c"), kernels("d"), kernels("e"))))
    pack.submit("plain call", kernels("end"))
    assert fake.before("first") == set()
    assert fake.edges["a1"] == fake.edges["b"] == {"first"}
    assert fake.edges["a2"] == {"a1"}
    assert fake.before("a3") == {"first", "a1", "a2"}
    first_call = {"first", "a1", "a2", "a3", "b", "last"}
    assert fake.before("last") == first_call - {"last"}
    for kernel in "cde":
        assert fake.before(kernel) == first_call
    assert fake.before("end") == {*first_call, "c", "d", "e"}
    assert fake.after[MAIN] == {"end"}


def test_branches_after_branches_start_after_all_of_them(captured):
    fake, pack = captured()
    branches = [*beside(kernels("a"), kernels("b")), *beside(kernels("c"), kernels("d"))]
    pack.submit("call", [*branches, *kernels("last")])
    assert fake.before("c") == fake.before("d") == {"a", "b"}
    assert fake.before("last") == {"a", "b", "c", "d"}


def test_commands_that_are_no_branches_are_a_chain(captured):
    fake, pack = captured()
    pack.submit("call", kernels("first", "a1", "a2", "b", "last"))
    assert fake.edges["b"] == {"a2"}
    assert set(fake.streams) == {MAIN}


def test_branches_that_are_listed_first_go_first(captured):
    fake, pack = captured()
    pack.submit("call", list(beside(*(kernels(name) for name in "abcd"))))
    priorities = [fake.priorities[stream] for stream in fake.streams]
    assert priorities == [-3, -1, 0, 0]


def test_what_is_not_captured_stays_on_the_one_stream_in_its_order(captured):
    fake, pack = captured(capturing=False)
    pack.submit("call", [*kernels("first"), *beside(kernels("a1", "a2"), kernels("b")), *kernels("last")])
    assert list(fake.edges) == ["first", "a1", "a2", "b", "last"]
    assert set(fake.streams) == {MAIN}


def test_after_a_failure_within_a_branch_calls_go_to_the_stream_again(captured):
    fake, pack = captured()
    with pytest.raises(LaunchError, match="no such kernel"):
        pack.submit("call", list(beside(kernels("a"), kernels("missing"))))
    pack.submit("next call", kernels("b"))
    assert fake.streams[-1] == MAIN
    assert fake.before("b") == {"a"}


def test_numbers_of_branches():
    assert [c.branch for c in beside(kernels("a", "b"), kernels("c"))] == [1, 1, 2]
    assert [c.branch for c in beside([], kernels("c", "d"))] == [0, 0]  # alone: nothing to be beside of
    assert [c.branch for c in beside([], kernels("c"), [], kernels("d"))] == [1, 2]
    with pytest.raises(LaunchError, match="branches of its own"):
        list(beside(beside(kernels("a"), kernels("b")), kernels("c")))


def op_of(*commands):
    none = dataclasses.make_dataclass("NoArgs", [])
    return Op("some", none, lambda _: None, lambda _: None, lambda *_: commands, lambda *_: Cost(0, 0))


def early(name):
    return dataclasses.replace(*kernels(name), early=True)


def forked(pack, tokens=8):
    """first; a1, a2 beside b1, b2; last, end."""
    op_of(*kernels("first"))(pack)
    with fork(pack, tokens) as (main, side):
        op_of(early("a1"))(main)
        op_of(early("b1"))(side)
        op_of(early("a2"))(main)
        op_of(*beside(kernels("b2"), kernels("b3")))(side)
    op_of(early("last"), early("end"))(pack)


@pytest.mark.parametrize(("tokens", "capturing"), [(8, True), (FORKED + 1, True), (8, False)])
def test_calls_of_a_fork_run_side_by_side(captured, monkeypatch, tokens, capturing):
    """The first call of the second branch starts late. The first branch goes on in the stream, so its calls may start
    early, and so may the one behind both."""
    fake, pack = captured(capturing=capturing)
    sooner = []

    def launch_early(self, kernel, grid, parameters):
        sooner.append(kernel.function)
        fake.cuLaunchKernel(kernel.function, self._at.handle, None, None)

    monkeypatch.setattr(CudaDriver, "_launch_early", launch_early)
    forked(pack, tokens)
    if tokens > FORKED or not capturing:
        assert sooner == ["a1", "b1", "a2", "last", "end"]  # b2 and b3 are branches of their call
    else:
        assert fake.edges["a1"] == fake.edges["b1"] == {"first"}
        assert (fake.edges["a2"], fake.edges["b2"], fake.edges["b3"]) == ({"a1"}, {"b1"}, {"b2"})
        assert fake.before("last") == {"first", "a1", "a2", "b1", "b2", "b3"}
        assert sooner == ["a1", "a2", "last", "end"]
    assert fake.before("end") == fake.before("last") | {"last"}


def test_branches_of_a_fork_have_scratch_memory_of_their_own():
    def using(*sizes, zeroed=False):
        made = {f"s{n}": Scratch((size,), np.dtype(np.uint8), zeroed=zeroed) for n, size in enumerate(sizes)}
        return op_of(launch("m", "f", (1,), made, {}))

    def step(pack):
        using(1024)(pack)
        for tokens in (1, 1, FORKED + 1):
            with fork(pack, tokens) as (main, side):
                using(512)(main)
                using(256, 512)(side)
                using(256)(main)
                using(256, zeroed=True)(side)

    plan, found = NullPack(H200), []
    step(plan)
    assert [(call.fork, call.branch) for call in plan.calls[:5]] == [(0, 0), (1, 1), (1, 2), (1, 1), (1, 2)]
    assert [call.fork for call in plan.calls] == [0, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0, 0]
    assert (plan.workspace_bytes(zeroed=False), plan.workspace_bytes(zeroed=True)) == (1280, 256)

    def read(spec, grid, parameters, early):
        found.append([int.from_bytes(parameters.read(n, 8), "little") for n in range(len(spec.signature))])

    device = types.SimpleNamespace(launch=read, branch=lambda number: None, encode_tensor_map=print)
    memory = [
        Tensor(at, (size,), np.dtype(np.uint8), Device("null")) for at, size in ((4096, 1300), (8192, 256))
    ]
    step(LaunchPack(H200, device, *memory))
    assert found[:5] == [[4096], [4096], [4096 + 512, 4096 + 768], [4096], [8192]]
    assert found[9:11] == [[4096], [4096, 4096 + 256]]


copy = Op(
    "copy", dataclasses.make_dataclass("CopyArgs", ["out", "x"]),
    lambda _: None, lambda _: None, lambda *_: [], lambda *_: Cost(0, 0),
)  # fmt: skip


def copies(memory, first, second):
    """The branches of two copies, each in a branch of a fork, between columns of a matrix."""
    plan = NullPack(H200)
    with fork(plan, 8) as branches:
        for pack, (x, out) in zip(branches, (first, second), strict=True):
            copy(pack, out=memory[:, out], x=memory[:, x])
    return [call.branch for call in plan.calls]


A, B, C, D = (slice(n, n + 64) for n in (0, 64, 128, 192))


def test_branches_of_a_fork_may_read_the_same_and_write_columns_of_one_matrix(arena):
    assert copies(arena.alloc((8, 256), bfloat16), (A, B), (A, C)) == [1, 2]


@pytest.mark.parametrize("second", [(B, D), (C, A), (C, B), (C, slice(112, 176))])
def test_a_fork_whose_branches_need_each_other_is_refused(arena, second):
    """The second copy reads what the first writes, writes what it reads, or what it writes, or some of that."""
    with pytest.raises(ContractError, match="copy and copy are in two branches of a fork"):
        copies(arena.alloc((8, 256), bfloat16), (A, B), second)


def test_an_op_that_does_not_say_what_it_writes_may_write_all(arena):
    x, y, z = (arena.alloc((8,), bfloat16) for _ in range(3))
    unknown = Op(
        "turn", dataclasses.make_dataclass("TurnArgs", ["x", "y"]),
        lambda _: None, lambda _: None, lambda *_: [], lambda *_: Cost(0, 0),
    )  # fmt: skip
    with fork(NullPack(H200), 8) as (main, side):
        copy(main, out=z, x=x)
        with pytest.raises(ContractError, match="copy and turn"):
            unknown(side, x=x, y=y)


def test_calls_of_one_branch_may_need_each_other_and_so_may_two_forks(arena):
    plan = NullPack(H200)
    x, y = (arena.alloc((8, 64), bfloat16) for _ in range(2))
    for _ in range(2):
        with fork(plan, 8) as (main, _):
            copy(main, out=y, x=x)
            copy(main, out=x, x=y)
    with fork(plan, FORKED + 1) as (main, side):
        copy(main, out=y, x=x)
        copy(side, out=x, x=y)
    assert [(call.fork, call.branch) for call in plan.calls] == [(1, 1)] * 2 + [(2, 1)] * 2 + [(0, 0)] * 2


def test_tensors_that_share_memory_overlap(rng):
    """Of pairs of views of an array; and columns that are apart do not."""
    matrix, apart = np.zeros((6, 40), np.int32), 0
    for _ in range(400):
        rows, columns = (np.sort(rng.integers(0, n + 1, (2, 2)), axis=1) for n in matrix.shape)
        a, b = (matrix[slice(*r), slice(*c)] for r, c in zip(rows, columns, strict=True))
        found = may_share_memory(Tensor.from_numpy(a), Tensor.from_numpy(b))
        assert found or not np.shares_memory(a, b)
        if columns[0, 1] <= columns[1, 0] and min(len(a), len(b)) > 1:
            assert not found
            apart += a.size > 0 < b.size
    assert apart > 10


@pytest.mark.gpu
def test_a_real_graph_has_two_branches_and_does_what_the_calls_do(gpu, normal):
    """A chain of two, two beside each other, and one after them. The first has both orders wrong if it is late."""
    target, cuda, device, stream = gpu
    values, ids = normal(50, 2048), np.arange(4, dtype=np.int32)
    table, token_ids = Tensor.empty(values.shape, bfloat16, device), Tensor.empty((4,), "int32", device)
    middle, left, right, end = (Tensor.empty((4, 2048), bfloat16, device) for _ in range(4))
    table.copy_from(values)
    token_ids.copy_from(ids)

    def step(out, source):
        return embed.launches(target, embed.args(out=out, token_ids=token_ids, table=source))

    def launches(target, _):
        yield from step(middle, table)
        yield from beside(step(left, middle), step(right, middle))
        yield from step(end, right)

    op = Op(
        "two_branches",
        dataclasses.make_dataclass("NoArgs", []),
        check=lambda _: None,
        reference=lambda _: None,
        launches=launches,
        cost=lambda w, _: Cost(0, 0),
    )
    plan, pack = NullPack(target), LaunchPack(target, cuda, None, None)
    op(plan)
    cuda.store.prepare(plan.specs())
    op(pack)
    stream.synchronize()
    for tensor in (middle, left, right, end):
        np.testing.assert_array_equal(tensor.numpy(), values[:4])
        tensor.zero_(stream)
    stream.synchronize()
    cu = driver()
    check(cu.cuStreamBeginCapture(stream.handle, cu.CUstreamCaptureMode(2)), "cuStreamBeginCapture")
    op(pack)
    graph = check(cu.cuStreamEndCapture(stream.handle), "cuStreamEndCapture")
    edges = _edges(cu, graph)
    nodes = {n for edge in edges for n in edge}
    assert len(nodes) == 4
    (start,) = nodes - {b for _, b in edges}
    (last,) = nodes - {a for a, _ in edges}
    sides = nodes - {start, last}
    assert edges - {(start, last)} == {(start, n) for n in sides} | {(n, last) for n in sides}
    executable = check(cu.cuGraphInstantiate(graph, 8), "cuGraphInstantiate")
    check(cu.cuGraphLaunch(executable, stream.handle), "cuGraphLaunch")
    stream.synchronize()
    for tensor in (middle, left, right, end):
        np.testing.assert_array_equal(tensor.numpy(), values[:4])
    check(cu.cuGraphExecDestroy(executable), "cuGraphExecDestroy")
    check(cu.cuGraphDestroy(graph), "cuGraphDestroy")


def _edges(cu, graph):
    """(from, to) of a graph's edges, as numbers."""
    count = check(cu.cuGraphGetEdges(graph), "cuGraphGetEdges")[-1]
    found = check(cu.cuGraphGetEdges(graph, count), "cuGraphGetEdges")
    return {(int(a), int(b)) for a, b in zip(found[0], found[1], strict=True)}
