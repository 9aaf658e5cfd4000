"""The launching pack: plans an op call, packs its commands' parameters, and gives them to a driver.

With a CudaDriver it is the `cuda` pack; with an InterpDriver, which runs the very same records through Triton's
interpreter on the CPU, it is `interp`. The pack keeps the commands of calls that were planned before.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from openinfer.kernels.errors import LaunchError
from openinfer.kernels.op.launch import Collective, Command, Matmul, PeerTable, Scratch, Spec, TensorMap
from openinfer.kernels.op.op import ALIGNMENT, Op, call_key, extent, tensors_in
from openinfer.kernels.op.packing import Parameters
from openinfer.kernels.op.target import Target
from openinfer.kernels.packs.forks import Fork, forks
from openinfer.kernels.packs.null import Placement, place
from openinfer.tensor import Tensor

MOST = 16384
"""Calls remembered; an engine has a few thousand."""

Source = tuple[int, int]
"""The number of a tensor among the arguments of an op, and bytes from its start."""


class _Prepared(NamedTuple):
    """The commands of a call, and where each of their tensors (by id) is among the call's arguments; None if that does
    not follow from the arguments alone."""

    commands: Sequence[Command]
    placement: Placement
    sources: Mapping[int, Source] | None


def sources(commands: Sequence[Command], args: Any) -> dict[int, Source] | None:
    """Where the tensors of the commands are. None if one is no argument and lies in none, or in two apart."""
    given = tensors_in(args)
    itself = {id(tensor): number for number, tensor in enumerate(given)}
    spans = [(number, t.ptr, t.ptr + (extent(t) if t.numel else 0)) for number, t in enumerate(given)]
    found: dict[int, Source] = {}
    for tensor in (one for command in commands for one in command.memory if isinstance(one, Tensor)):
        if id(tensor) in itself:
            found[id(tensor)] = (itself[id(tensor)], 0)
            continue
        holders = {start: number for number, start, end in spans if start <= tensor.ptr < end}
        if len(holders) != 1:
            return None
        ((start, number),) = holders.items()
        found[id(tensor)] = (number, tensor.ptr - start)
    return found


class LaunchDriver(Protocol):
    """Runs packed launches."""

    def encode_tensor_map(self, spec: Spec, tensor_map: TensorMap, address: int, index: int) -> bytes: ...
    def launch(self, spec: Spec, grid: tuple[int, int, int], parameters: Parameters, early: bool) -> None: ...
    def matmul(self, command: Matmul, operands: Sequence[int], workspace: int) -> None:
        """operands: the addresses of the command's."""

    def collective(self, command: Collective, out: int, x: int) -> None: ...
    def peers(self, table: PeerTable) -> int: ...
    def branch(self, number: int) -> None:
        """The next commands are of this branch; 0: of no branch, and after all branches. Called at each change."""


class LaunchPack:
    """Runs ops as kernel launches on one stream.

    `scratch` and `zeroed` are the workspace: byte tensors at least as large as the null pack found for the same calls;
    `zeroed` must be zero when the first op runs. Calls share them, so they must be ordered on one stream, but for those
    of the second branch of a fork: theirs are at the end.
    """

    def __init__(
        self, target: Target, driver: LaunchDriver, scratch: Tensor | None, zeroed: Tensor | None
    ) -> None:
        self.target = target
        self.driver = driver
        self._workspace = (scratch, zeroed)  # keeps the memory alive
        self._areas = [(0, 0) if one is None else (one.nbytes, one.ptr) for one in self._workspace]
        """Bytes and address of ordinary scratch memory, and of the zeroed."""
        self._parameters: dict[Spec, Parameters] = {}
        self._known: dict[Any, _Prepared] = {}
        """Calls by what their commands depend on."""
        self._branch = 0
        self._taken = [0, 0]  # the most of each area that a call of the first branch has
        self._held: list[tuple[Op[Any], Any]] | None = None  # the calls of a step so far

    def recorded(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """A function that makes the calls of this pack that `enqueue` makes, and those of forks side by side. `enqueue`
        keeps the rules of StepGraphs."""
        return functools.partial(self._step, enqueue, [])

    def _step(self, enqueue: Callable[[], None], found: list[list[Fork]]) -> None:
        """found: the forks of the step, once it ran."""
        self._held = calls = list[tuple[Op[Any], Any]]()
        try:
            enqueue()
        finally:
            self._held = None
        if not found:
            found.append(forks(calls))
        at = 0
        for fork in found[0]:
            self._make(calls[at : fork[0].start])
            try:
                for branch, window in enumerate(fork, start=1):
                    self._into(branch)
                    self._make(calls[window])
            finally:
                self._into(0)
            at = fork[1].stop
        self._make(calls[at:])

    def _make(self, calls: Sequence[tuple[Op[Any], Any]]) -> None:
        for op, args in calls:
            self.run(op, args)

    def _into(self, branch: int) -> None:
        """The calls that follow are of this branch of a fork; 0: of none."""
        self._branch = branch
        self._taken = self._taken if branch == 2 else [0, 0]
        self.driver.branch(branch)

    def run(self, op: Op[Any], args: Any) -> None:
        if self._held is not None:
            self._held.append((op, args))
            return
        prepared = self._prepare(op, args)
        where = prepared.sources
        given = [] if where is None else tensors_in(args)

        def address(tensor: Tensor) -> int:
            if where is None:
                return tensor.ptr
            number, offset = where[id(tensor)]
            return given[number].ptr + offset

        self._launch(op.name, prepared.commands, prepared.placement, address)

    def _prepare(self, op: Op[Any], args: Any) -> _Prepared:
        """Like op.plan, but a call like an earlier one gets that one's commands. Raises the same errors as op.plan."""
        key = call_key(op, args)
        prepared = self._known.get(key)
        if prepared is None or prepared.sources is None:
            commands = op.plan(self.target, args)
            prepared = _Prepared(commands, place(commands), sources(commands, args))
            if len(self._known) < MOST:
                self._known[key] = prepared
        return prepared

    def submit(self, name: str, commands: Sequence[Command]) -> None:
        """Launch the commands of one call; `name` is for messages. Raises LaunchError if the workspace is too small."""
        self._launch(name, commands, place(commands), attrgetter("ptr"))

    def _launch(
        self,
        name: str,
        commands: Sequence[Command],
        placement: Placement,
        address_of: Callable[[Tensor], int],
    ) -> None:
        offsets, *needed = placement
        taken = self._taken if self._branch == 2 else (0, 0)
        have = [size - other for (size, _), other in zip(self._areas, taken, strict=True)]
        if needed[0] > have[0] or needed[1] > have[1]:
            raise LaunchError(
                f"{name} needs {needed[0]} bytes of scratch and {needed[1]} of zeroed scratch; the pack has {have[0]} "
                f"and {have[1]}: make them as large as the null pack's workspace_bytes"
            )
        if self._branch == 1:
            self._taken = list(map(max, self._taken, needed))

        def address(tensor: Tensor | Scratch | PeerTable) -> int:
            if isinstance(tensor, Tensor):
                return address_of(tensor)
            if isinstance(tensor, PeerTable):
                return self.driver.peers(tensor)
            (size, at), used = self._areas[tensor.zeroed], needed[tensor.zeroed]
            return offsets[tensor] + at + ((size - used) // ALIGNMENT * ALIGNMENT if self._branch == 2 else 0)

        if self._branch:  # the branches of a call run one after the other there
            for command in commands:
                self._run(command, address)
            return
        at = 0
        try:
            for command in commands:
                if command.branch < at:  # the command comes after all branches, or starts another beside()
                    self.driver.branch(0)
                if command.branch not in (0, at):
                    self.driver.branch(command.branch)
                at = command.branch
                self._run(command, address)
        finally:
            if at:
                self.driver.branch(0)

    def _run(self, command: Command, address: Callable[[Tensor | Scratch | PeerTable], int]) -> None:
        if isinstance(command, Matmul):
            operands = [address(operand) for operand in command.operands]
            self.driver.matmul(command, operands, address(command.workspace))
            return
        if isinstance(command, Collective):
            self.driver.collective(command, address(command.out), address(command.x))
            return
        spec = command.spec
        parameters = self._parameters.get(spec)
        if parameters is None:
            parameters = self._parameters[spec] = Parameters(spec)
        parameters.pack(command.args, address, functools.partial(self.driver.encode_tensor_map, spec))
        self.driver.launch(spec, command.grid, parameters, command.early and not command.branch)
