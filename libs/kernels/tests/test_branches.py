"""Branches of a call: what they are in a captured graph, against a model of stream capture and on a GPU; elsewhere
nothing but their order."""

import dataclasses
import types

import numpy as np
import pytest

from openinfer.kernels import (
    H200,
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
from openinfer.kernels.packs import cuda_driver
from openinfer.kernels.packs.forks import FORKED, forks, may_share_memory
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


def early(name):
    return dataclasses.replace(*kernels(name), early=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns:
    """Parts of a matrix that a call reads and writes."""

    out: tuple
    x: tuple


DIAMOND = "first x>s, a1 s>a, a2 a>b, b1 s>c, b2 c>d, last bd>e, end e>f"
AT_ONCE = [(slice(1, 3), slice(3, 5))]


def op_named(name, *commands, **options):
    made = commands or [early(name)]
    return Op(
        name, Columns, lambda _: None, lambda _: None, lambda *_: made, lambda *_: Cost(0, 0), **options
    )


def calls_of(arena, text, tokens=8, **ops):
    """Calls as `name reads>writes`: each letter is 64 columns of a matrix, a capital of them the half behind and what
    follows. ops: those of some names; dealt, collective and such."""
    matrix, calls = arena.alloc((tokens, 27 * 64), bfloat16), []
    for call in text.split(", "):
        name, _, uses = call.partition(" ")
        x, out = (
            tuple(
                matrix[:, at : at + 64]
                for c in part
                for at in [64 * (ord(c.lower()) - 97) + 32 * c.isupper()]
            )
            for part in uses.split(">")
        )
        calls.append((ops.get(name) or op_named(name), Columns(out=out, x=x)))
    return calls


def make(pack, calls):
    for op, args in calls:
        pack.run(op, args)


@pytest.mark.parametrize(
    ("was", "now", "found"),
    [
        ("", "", AT_ONCE),
        ("b1 s>c", "b1 sb>c", []),  # reads what a2 writes
        ("b1 s>c", "b1 sA>c", []),  # some of it
        ("b1 s>c, b2 c>d", "b1 s>a, b2 a>d", []),  # writes what a2 reads
        ("b1 s>c", "b1 s>bc", []),  # writes what it writes
        ("b1 s>c", "b1 sa>c", [(slice(2, 3), slice(3, 5))]),  # needs a1 alone
        ("b2 c>d", "b2 bc>d", [(slice(1, 3), slice(3, 4))]),  # needs both branches
        ("b2 c>d", "b2 b>d", []),  # ends the second window, without a need of b1
        ("last bd>e", "last b>e", []),  # does not need b2
        ("a1 s>a", "a1 x>a", []),  # does not come behind first
        ("b1 s>c", "b1 x>c", []),
        (", last bd>e, end e>f", "", []),
        ("b1 s>c, b2 c>d", "b1 s>d", [(slice(1, 3), slice(3, 4))]),
        ("a1 s>a, a2 a>b, b1 s>c, b2 c>d", "a s>b, b s>d", [(slice(1, 2), slice(2, 3))]),
        ("a1 s>a, a2 a>b, b1 s>c, b2 c>d", "a s>b, a s>d", []),  # two calls of one op
        ("end e>f", "c bd>f, d a>g, end fge>h", [*AT_ONCE, (slice(5, 6), slice(6, 8))]),  # behind a fork
    ],
)
def test_windows_that_need_nothing_of_each_other_are_found(arena, was, now, found):
    assert forks(calls_of(arena, DIAMOND.replace(was, now))) == found


@pytest.mark.parametrize(
    ("tokens", "options", "parts", "found"),
    [
        (FORKED, {}, 1, AT_ONCE),
        (FORKED + 1, {}, 1, []),
        (FORKED // 2 + 1, {}, 2, []),  # of a step that ranks deal
        (8, {"collective": True}, 1, []),
        (8, {"writes": ("out", "x")}, 1, [(slice(2, 3), slice(3, 5))]),  # b1 writes what a1 reads
    ],
)
def test_what_an_op_is_decides_on_its_branches(arena, tokens, options, parts, found):
    op = op_named("b1", **options)
    assert forks(calls_of(arena, DIAMOND, tokens, b1=op if parts == 1 else op.dealt(parts))) == found


def test_an_op_that_does_not_say_what_it_writes_may_write_all(arena):
    x, y, z = (arena.alloc((8,), bfloat16) for _ in range(3))
    kind = dataclasses.make_dataclass("TurnArgs", ["x", "y"])
    unknown = Op("turn", kind, lambda _: None, lambda _: None, lambda *_: [], lambda *_: Cost(0, 0))
    (first, _), (last, _) = calls_of(arena, "first x>s, last x>s")
    calls = [
        (first, Columns(out=(x,), x=())),
        (op_named("a"), Columns(out=(z,), x=(x,))),
        (unknown, kind(x, y)),
    ]
    behind = (last, Columns(out=(x,), x=(y, z)))
    assert forks([*calls, behind]) == []
    unknown.writes = ("y",)
    assert forks([*calls, behind]) == [(slice(1, 2), slice(2, 3))]


@pytest.mark.parametrize(("tokens", "capturing"), [(8, True), (FORKED + 1, True), (8, False)])
def test_windows_run_side_by_side(captured, arena, monkeypatch, tokens, capturing):
    """The first call of the second branch starts late. The first branch goes on in the stream, so its calls may start
    early, and so may the one behind both."""
    fake, pack = captured(capturing=capturing)
    sooner = []

    def launch_early(self, kernel, grid, parameters):
        sooner.append(kernel.function)
        fake.cuLaunchKernel(kernel.function, self._at.handle, None, None)

    monkeypatch.setattr(CudaDriver, "_launch_early", launch_early)
    ops = {
        "first": op_named("first", *kernels("first")),
        "b2": op_named("b2", *beside(kernels("b2"), kernels("b3"))),
    }
    calls = calls_of(arena, DIAMOND, tokens, **ops)
    pack.recorded(lambda: make(pack, calls))()
    if tokens > FORKED or not capturing:
        assert sooner == ["a1", "a2", "b1", "last", "end"]  # b2 and b3 are branches of their call
    else:
        assert fake.edges["a1"] == fake.edges["b1"] == {"first"}
        assert (fake.edges["a2"], fake.edges["b2"], fake.edges["b3"]) == ({"a1"}, {"b1"}, {"b2"})
        assert fake.before("last") == {"first", "a1", "a2", "b1", "b2", "b3"}
        assert sooner == ["a1", "a2", "last", "end"]
    assert fake.before("end") == fake.before("last") | {"last"}
    make(pack, calls)  # not recorded: one after the other
    assert fake.edges["b1"] == {"a2"}


def test_after_a_failure_within_a_fork_calls_go_to_the_stream_again(captured, arena):
    fake, pack = captured()
    names = {"b1": "missing"} | {name: name for name in ("first", "a1", "a2", "end")}
    calls = calls_of(arena, DIAMOND, **{name: op_named(name, *kernels(its)) for name, its in names.items()})
    with pytest.raises(LaunchError, match="no such kernel"):
        pack.recorded(lambda: make(pack, calls))()
    pack.submit("next call", kernels("b"))
    assert fake.streams[-1] == MAIN
    with pytest.raises(ZeroDivisionError):
        pack.recorded(lambda: 1 / 0)()
    make(pack, calls[-1:])
    assert fake.edges["end"] == {"b"}


def test_branches_of_a_fork_have_scratch_memory_of_their_own(arena):
    def using(*sizes, zeroed=False):
        made = {f"s{n}": Scratch((size,), np.dtype(np.uint8), zeroed=zeroed) for n, size in enumerate(sizes)}
        return launch("m", "f", (1,), made, {})

    used = {"first": using(1024), "a1": using(512), "a2": using(256), "b1": using(256, 512)}
    ops = {name: op_named(name, one) for name, one in {**used, "b2": using(256, zeroed=True)}.items()}
    calls, plan, found = calls_of(arena, DIAMOND, **ops), NullPack(H200), []
    make(plan, calls)
    assert (plan.workspace_bytes(zeroed=False), plan.workspace_bytes(zeroed=True)) == (1024, 256)
    made = plan.traced(lambda: make(plan, calls))
    assert [call.branch for call in made] == [0, 1, 1, 2, 2, 0, 0]
    assert plan.calls[len(calls) :] == made
    assert (plan.workspace_bytes(zeroed=False), plan.workspace_bytes(zeroed=True)) == (1280, 256)

    def read(spec, grid, parameters, early):
        found.append([int.from_bytes(parameters.read(n, 8), "little") for n in range(len(spec.signature))])

    device = types.SimpleNamespace(launch=read, branch=lambda number: None, encode_tensor_map=print)

    def run(size):
        sizes = (4096, size), (8192, 256)
        memory = [Tensor(at, (size,), np.dtype(np.uint8), Device("null")) for at, size in sizes]
        pack = LaunchPack(H200, device, *memory)
        pack.recorded(lambda: make(pack, calls))()

    run(1300)
    assert found[:5] == [[4096], [4096], [4096], [4096 + 512, 4096 + 768], [8192]]
    with pytest.raises(
        LaunchError, match="b1 needs 768 bytes of scratch and 0 of zeroed scratch; the pack has 512"
    ):
        run(1024)


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
