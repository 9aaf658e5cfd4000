"""Commands of earlier op calls, used again. The layers of a model call the same ops with the same shapes at other
addresses. So the commands of the first call serve the others, which makes recording steps several times faster."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from openinfer.kernels.op.launch import Collective, Command, Matmul, TensorMap
from openinfer.kernels.op.op import PLAIN, Op, tensors_in, values_of
from openinfer.kernels.op.target import Target
from openinfer.kernels.packs.null import Placement, place
from openinfer.tensor import Tensor

ALIGNMENT = 256
"""Commands may depend on an address modulo this, and on nothing else of it."""
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


class Recall:
    """Prepared calls by what their commands depend on."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._known: dict[Any, _Prepared] = {}

    def prepare(self, op: Op[Any], args: Any) -> _Prepared:
        """Like op.plan, but a call like an earlier one gets that one's commands. Raises the same errors as op.plan."""
        key = call_key(op, args)
        prepared = self._known.get(key)
        if prepared is None or prepared.sources is None:
            commands = op.plan(self._target, args)
            prepared = _Prepared(commands, place(commands), sources(commands, args))
            if len(self._known) < MOST:
                self._known[key] = prepared
        return prepared


def call_key(op: Op[Any], args: Any) -> Any:
    """Equal for calls whose commands differ in addresses only: everything but the addresses, their alignment, and which
    of them are the same."""
    return op, _key(args, {})


def _key(value: Any, first: dict[int, int]) -> Any:
    """first: numbers of the addresses so far."""
    kind = value.__class__
    if kind is Tensor:
        ptr = value.ptr
        same = first.setdefault(ptr, len(first))
        return value.shape, value.strides, value.dtype.num, ptr % ALIGNMENT, same
    if kind in PLAIN:
        return kind, value
    parts = [_key(part, first) for part in values_of(value)]
    if isinstance(value, Mapping):
        parts.append(tuple(value))
    return (kind, *parts) if parts else (kind, value if value.__hash__ else None)  # an empty list has no hash


def sources(commands: Sequence[Command], args: Any) -> dict[int, Source] | None:
    """Where the tensors of the commands are. None if one is no argument and lies in none, or in two apart."""
    given = tensors_in(args)
    itself = {id(tensor): number for number, tensor in enumerate(given)}
    spans = [(number, t.ptr, t.ptr + _extent(t)) for number, t in enumerate(given)]
    found: dict[int, Source] = {}
    for tensor in _tensors(commands):
        if id(tensor) in itself:
            found[id(tensor)] = (itself[id(tensor)], 0)
            continue
        holders = {start: number for number, start, end in spans if start <= tensor.ptr < end}
        if len(holders) != 1:
            return None
        ((start, number),) = holders.items()
        found[id(tensor)] = (number, tensor.ptr - start)
    return found


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if 0 in tensor.shape:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides, strict=True))
    return (last + 1) * tensor.dtype.itemsize


def _tensors(commands: Sequence[Command]) -> Iterator[Tensor]:
    for command in commands:
        values: Sequence[Any]
        match command:
            case Matmul():
                values = command.operands
            case Collective():
                values = (command.out, command.x)
            case _:
                values = command.args
        for value in values:
            inner = value.tensor if isinstance(value, TensorMap) else value
            if isinstance(inner, Tensor):
                yield inner
