"""The null pack: records every call and runs none. Its record is the kernel plan of a step."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from openinfer.kernels.op.launch import Collective, Command, Launch, PeerTable, Scratch, Spec
from openinfer.kernels.op.op import Cost, Op, Workload, call_key, leaves, tensors_in
from openinfer.kernels.op.target import Target
from openinfer.kernels.packs.forks import forks
from openinfer.tensor import Tensor

T = TypeVar("T")


DECODE = ", decode"
"""Ends the name of an op whose rows have few tokens."""
FEW_TOKENS = 8
"""Steps have as many tokens a row, or fewer, where rows have one token and drafts."""


@dataclass(frozen=True, slots=True)
class Call:
    """One op call: its arguments and the commands a device of the target's kind would run for it. `times`: how often
    the traced step has calls like this one (see Repeated). `branch`: of the fork that it is in, 1 or 2; 0: in none."""

    op: Op[Any]
    args: Any
    commands: tuple[Command, ...]
    times: int = 1
    branch: int = 0

    def cost(self, workload: Workload) -> Cost:
        return self.op.cost(workload, self.args)

    @property
    def tokens(self) -> float:
        """The tokens, or rows, that it was traced for: the first axis of its first tensor. Of a mixture of experts, the
        mean rows of one (`rows_each` of its arguments), on which its kernels depend."""
        if each := getattr(self.args, "rows_each", 0.0):
            return float(each)
        return next((tensor.shape[0] for _, tensor in leaves(self.args, Tensor)), 1)

    @property
    def kind(self) -> str:
        """The name of its op, and DECODE where each row has few tokens: such calls have kernels of their own. So
        have dense products with packed weights: the format's short name ends theirs. Other ops may say what theirs are
        `kernels_for`."""
        if own := getattr(self.args, "packed", "") or getattr(self.args, "kernels_for", ""):
            return f"{self.op.name}, {own}"
        few = 0 < getattr(self.args, "max_q_len", 0) <= FEW_TOKENS
        return self.op.name + DECODE if few else self.op.name


def scratches(command: Command) -> list[Scratch]:
    """The scratch memory that a command uses."""
    return [one for one in command.memory if isinstance(one, Scratch)]


@dataclass(slots=True)
class NullPack:
    """Records calls. Tensors may live on the "null" device: no memory and no GPU is needed. `times`: of the calls that
    follow."""

    target: Target
    calls: list[Call] = field(default_factory=list)
    times: int = 1
    _bytes: tuple[int, int] = (0, 0)
    """The most scratch memory, ordinary and zeroed, of a call or of both branches of a fork."""
    _planned: dict[Any, tuple[tuple[Command, ...], "Placement"]] = field(default_factory=dict)
    """The commands of earlier calls: most of a step depend on its tokens alone, not on its rows."""

    def run(self, op: Op[Any], args: Any) -> None:
        key = call_key(op, args), *(tensor.ptr for tensor in tensors_in(args))
        if key not in self._planned:
            commands = tuple(op.plan(self.target, args))
            self._planned[key] = commands, place(commands)
        commands, placed = self._planned[key]
        self.calls.append(Call(op, args, commands, self.times))
        if placed.offsets:
            self._bytes = _most((self._bytes, placed[1:]))

    def traced(self, work: Callable[[], None]) -> list[Call]:
        """Do the work of a step or segment; the calls that it made, with the branches that these are in."""
        start = len(self.calls)
        work()
        made = self.calls[start:]
        for fork in forks([(call.op, call.args) for call in made]):
            needs = []
            for branch, window in enumerate(fork, start=1):
                made[window] = [replace(call, branch=branch) for call in made[window]]
                needs.append(_most(place(call.commands)[1:] for call in made[window]))
            (plain, zeroed), (more, more_zeroed) = needs
            self._bytes = _most((self._bytes, (plain + more, zeroed + more_zeroed)))
        self.calls[start:] = made
        return made

    def specs(self) -> list[Spec]:
        """The distinct kernels of the recorded calls, in the order of first use."""
        commands = (c for call in self.calls for c in call.commands)
        return list(dict.fromkeys(c.spec for c in commands if isinstance(c, Launch)))

    def link_bytes(self) -> int:
        """The least bytes that a rank sends to others in the recorded calls."""
        commands = ((call.times, c) for call in self.calls for c in call.commands)
        return sum(times * c.link_bytes for times, c in commands if isinstance(c, Collective))

    def peer_widths(self) -> set[int]:
        """Bytes of the rows that ranks push to each other in the recorded calls."""
        launches = (c for call in self.calls for c in call.commands if isinstance(c, Launch))
        tables = (arg for command in launches for arg in command.args if isinstance(arg, PeerTable))
        return {table.width for table in tables if table.width is not None}

    def workspace_bytes(self, *, zeroed: bool) -> int:
        """The most scratch memory (of the zeroed or the ordinary kind) that any one call needs, or both branches of a
        fork together."""
        return self._bytes[zeroed]


class Repeated(tuple[T, ...]):
    """The layers of a model that is traced with one layer of each kind. A loop over them tells the pack how many layers
    each one stands for, and the calls of that layer count as many times.

    `kinds`: the layers with their numbers.
    """

    def __new__(cls, pack: NullPack, kinds: Iterable[tuple[T, int]]) -> "Repeated[T]":
        """The layers, for a model to have in place of its own."""
        pairs = tuple(kinds)
        made = super().__new__(cls, (layer for layer, _ in pairs))
        made._pack, made._times = pack, tuple(times for _, times in pairs)
        return made

    def __iter__(self) -> Iterator[T]:
        try:
            for layer, times in zip(super().__iter__(), self._times, strict=True):
                self._pack.times = times
                yield layer
        finally:  # also after a pass that ends early
            self._pack.times = 1

    _pack: NullPack
    _times: tuple[int, ...]


def one_of_each(
    layers: Sequence[T], kind: Callable[[T], object], *, first: bool = False
) -> list[tuple[T, int]]:
    """A layer of each kind, and how many there are. first: the first layer is a kind of its own, because no layer ahead
    of it has made its norm."""
    kinds = [(first and n == 0, kind(layer)) for n, layer in enumerate(layers)]
    counts = Counter(kinds)
    return [(layer, counts[key]) for key, layer in dict(zip(kinds, layers, strict=True)).items()]


class Placement(NamedTuple):
    """Where the scratches of one call are in their workspace regions (256-byte aligned), and what the regions need."""

    offsets: dict[Scratch, int]
    plain_bytes: int
    zeroed_bytes: int


def place(commands: Sequence[Command]) -> Placement:
    """Place the scratches of one call, in the order of first use."""
    offsets: dict[Scratch, int] = {}
    ends = [0, 0]
    for command in commands:
        for scratch in scratches(command):
            if scratch not in offsets:
                offsets[scratch] = ends[scratch.zeroed]
                ends[scratch.zeroed] += -(-scratch.nbytes // 256) * 256
    return Placement(offsets, *ends)


def _most(sizes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The largest of each kind."""
    plain, zeroed = map(max, zip(*sizes, strict=True))
    return plain, zeroed
