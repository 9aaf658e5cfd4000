"""Op: a name with a contract, a numpy reference, device code and a cost.

An op is called with keyword arguments against a pack, which decides what the call means: run the reference, launch
kernels, or only write the call down.

    rms_norm(pack, out=h, x=x, weight=w, eps=1e-6)
"""

import contextlib
import copy
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, get_origin

import numpy as np

from openinfer.kernels.errors import ContractError
from openinfer.kernels.op.launch import Command
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor

MOST_KNOWN = 4096
"""The most answers about calls that a composite op keeps: a step has a few, and there are some hundred steps."""

P = ParamSpec("P")
A = TypeVar("A")
L = TypeVar("L")
T = TypeVar("T")
"""What the tensors of a call are: Tensor, or Array for a reference."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The real values of the sizes that are data, for costs.

    `tokens`: tokens in the step; `rows`: sequences in it; `kv_tokens`: cached tokens that attention reads, summed
    over the rows; `qk_pairs`: (query, key) pairs it scores, summed over the rows.
    """

    tokens: int
    rows: int
    kv_tokens: int
    qk_pairs: int

    @classmethod
    def decode(cls, rows: int, context: int) -> "Workload":
        """One new token for each of `rows` sequences of `context` tokens (the new one included)."""
        return cls(rows, rows, rows * context, rows * context)

    @classmethod
    def prefill(cls, tokens: int) -> "Workload":
        """One whole prompt of `tokens` tokens."""
        return cls(tokens, 1, tokens, tokens * (tokens + 1) // 2)

    def dealt(self, parts: int) -> "Workload":
        """That of one of `parts` even parts of the tokens, each of which reads all cached tokens of its row."""
        return Workload(-(-self.tokens // parts), self.rows, self.kv_tokens, self.qk_pairs // parts)


@dataclass(frozen=True, slots=True)
class Cost:
    """The least a call can do: bytes of device memory (each input read once and each output written once), FLOPs, and
    bytes that this rank sends to others (`link`)."""

    bytes: int
    flops: int
    link: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.flops + other.flops, self.link + other.link)

    def floor_s(self, bandwidth: float, flops_per_s: float, link_bytes_per_s: float = math.inf) -> float:
        """Seconds below which no implementation can be: the largest of the three times."""
        return max(self.bytes / bandwidth, self.flops / flops_per_s, self.link / link_bytes_per_s)


class Pack(Protocol):
    """One way to run ops. `run` gets the op and the arguments of a call, as `Op.args` makes them. A pack that looks at
    all calls of a step before it makes them has `recorded(enqueue)`, too: what to call in place of `enqueue`."""

    def run(self, op: "Op[Any]", args: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class DealtPack:
    """Calls for one of `parts` even parts of a step's tokens, of whose cost each is such a part."""

    pack: Pack
    parts: int

    def run(self, op: "Op[Any]", args: Any) -> None:
        self.pack.run(op.dealt(self.parts), args)


class Op(Generic[P]):
    """An op. `args` is the type of a call's arguments: a frozen dataclass of keyword-only fields, generic in what its
    tensors are. Its fields give the op its type, and its docstring is the op's documentation (or that of `check`, where
    ops share a type).

        @dataclass(frozen=True, kw_only=True, slots=True)
        class _Args(Generic[T]):
            \"""out[t] = table[token_ids[t]].\"""

            out: T
            token_ids: T
            table: T

        embed = Op("embed", _Args[Tensor], _check, _reference, _launches, _cost)

    `check(args)` raises ContractError for invalid arguments. `reference(args)` gets numpy arrays in place of tensors,
    of those inside tuples, mappings and other dataclasses too, and writes the outputs in place. It computes in
    float32, and rounds to the tensors' dtype where the published models do. `launches(target, args)` gives the
    commands for a GPU. `cost(workload, args)` is the call's floor. The first axis of the first tensor
    has the tokens or rows of the call. An op whose argument `ranks` may exceed 1 sets
    `collective`: its reference also gets the communicator, which is None where `ranks` is 1. `writes`: the arguments
    that it writes; by default `out`, or any where it has none. `dealt_to`: ranks, each with such a part of the tokens.
    """

    def __init__(
        self,
        name: str,
        args: Callable[P, A],
        check: Callable[[A], None],
        reference: Callable[..., None],
        launches: Callable[[Target, A], Iterable[Command]],
        cost: Callable[[Workload, A], Cost],
        *,
        collective: bool = False,
        writes: Sequence[str] | None = None,
    ) -> None:
        self.name = name
        self.type: Any = get_origin(args) or args
        self.reference = reference
        self.launches: Callable[[Target, Any], Iterable[Command]] = launches
        self.cost: Callable[[Workload, Any], Cost] = cost
        self.collective = collective
        self.dealt_to = 1
        self._check = check
        self.writes = ("out",) if writes is None and "out" in _field_names(self.type) else writes
        documented = check.__doc__ or self.type.__doc__
        self.__doc__ = f"{name}(pack, {', '.join(self._fields())})\n\n    {documented}"

    def __call__(self, pack: Pack, /, *args: P.args, **kwargs: P.kwargs) -> None:
        pack.run(self, self.args(*args, **kwargs))

    @functools.cache  # noqa: B019 - ops live as long as their module
    def dealt(self, parts: int) -> "Op[P]":
        """This op for calls that get one of `parts` even parts of a step's tokens, and cost accordingly."""
        part = copy.copy(self)
        part.cost = lambda workload, args: self.cost(workload.dealt(parts), args)
        part.dealt_to = parts
        return part

    def args(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The arguments of a call as one value. Raises ContractError for ones that are missing or not known."""
        try:
            return self.type(*args, **kwargs)
        except TypeError:
            known = {name.removesuffix("?") for name in self._fields()}
            needed = {name for name in self._fields() if not name.endswith("?")}
            if not args and needed <= kwargs.keys() <= known:
                raise
        raise ContractError(
            f"{self.name} takes {', '.join(self._fields())} by keyword, given {', '.join(kwargs) or 'none'}"
        )

    def _fields(self) -> list[str]:
        """The names of the arguments; those that may be left out have a question mark."""
        missing = dataclasses.MISSING
        optional = [f.default is not missing or f.default_factory is not missing for f in fields(self.type)]
        return [field.name + "?" * may for field, may in zip(fields(self.type), optional, strict=True)]

    def written(self, args: Any) -> list[Tensor]:
        """The tensors that a call may write."""
        if self.writes is None:
            return tensors_in(args)
        return [tensor for name in self.writes for tensor in tensors_in(getattr(args, name))]

    def plan(self, target: Target, args: Any) -> list[Command]:
        """Check the contract and return the commands a device of this kind would run."""
        self.check(args)
        return list(self.launches(target, args))

    def check(self, args: Any) -> None:
        """Raise ContractError for arguments that the contract does not allow."""
        try:
            self._check(args)
        except (TypeError, AttributeError):
            arrays = [name for name, _ in leaves(args, np.ndarray)]
            if not arrays:
                raise
            raise ContractError(
                f"{self.name}: {', '.join(arrays)} must be a Tensor; Tensor.from_numpy(array) shares the memory"
            ) from None

    def __repr__(self) -> str:
        return f"Op({self.name})"


class Composite(Op[P]):
    """An op that does what others do one after the other: `parts`, by the fields of its arguments, which are theirs.

    Its contract is theirs, its reference their references in turn, and its cost the sum. `whole(target, args)` is the
    one launch that does it all, or None where no kernel does; then its launches are those of the parts.
    """

    def __init__(
        self,
        name: str,
        args: Callable[P, A],
        parts: Mapping[str, Op[Any]],
        whole: Callable[[Target, A], Command | None],
    ) -> None:
        collective = any(op.collective for op in parts.values())
        own = self._check_parts, self._refer, self._launch, self._sum
        super().__init__(name, args, *own, collective=collective)
        self.parts = parts
        self.whole: Callable[[Target, Any], Command | None] = whole
        self._known: dict[Any, bool] = {}

    def joins(self, target: Target, args: Any) -> bool:
        """Whether one kernel does it all. As `allow`, it says so of calls like an earlier one without asking again."""
        return self._once((target, call_key(self, args)), lambda: self.whole(target, args) is not None)

    def allow(self, part: Op[Any], args: Any) -> None:
        """Check the contract of a part's call."""

        def check() -> bool:
            part.check(args)
            return True

        self._once(call_key(part, args), check)

    def _once(self, key: Any, ask: Callable[[], bool]) -> bool:
        if key not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[key] = ask()
        return self._known[key]

    def written(self, args: Any) -> list[Tensor]:
        """See Op."""
        return [tensor for op, part in self._of(args) for tensor in op.written(part)]

    def _of(self, args: Any) -> Iterator[tuple[Op[Any], Any]]:
        return ((op, getattr(args, name)) for name, op in self.parts.items())

    def _check_parts(self, args: Any) -> None:
        for op, part in self._of(args):
            op.check(part)

    def _refer(self, args: Any, *communicator: Any) -> None:
        for op, part in self._of(args):
            op.reference(part, *(communicator if op.collective else ()))

    def _launch(self, target: Target, args: Any) -> Iterator[Command]:
        whole = self.whole(target, args)
        if whole is not None:
            yield whole
            return
        for op, part in self._of(args):
            yield from op.launches(target, part)

    def _sum(self, workload: Workload, args: Any) -> Cost:
        return functools.reduce(operator.add, (op.cost(workload, part) for op, part in self._of(args)))


@contextlib.contextmanager
def joined(pack: Pack, op: Composite[Any]) -> Iterator[Pack]:
    """A pack for the calls of an op's parts, which become one call of the op where a kernel does it all. Else they run
    one by one. Either is after the block, unless the pack has no `target`: there each call runs at once.

        with joined(pack, attention_sublayer) as one:
            norm_linear(one, ...)
            norm_rope_attend(one, ...)
            linear_add(one, ...)
    """
    target = getattr(pack, "target", None)
    if target is None:
        yield pack
        return
    calls: list[tuple[Op[Any], Any]] = []
    yield _Held(op, calls)
    if [part for part, _ in calls] == list(op.parts.values()):
        args = op.type(**{name: args for name, (_, args) in zip(op.parts, calls, strict=True)})
        if op.joins(target, args):
            calls = [(op, args)]
    for part, args in calls:
        pack.run(part, args)


@dataclass(frozen=True, slots=True)
class _Held:
    whole: Composite[Any]
    calls: list[tuple[Op[Any], Any]]

    def run(self, op: Op[Any], args: Any) -> None:
        self.whole.allow(op, args)
        self.calls.append((op, args))


def tensors(args: Any, *names: str) -> dict[str, Tensor]:
    """The tensors among the arguments of a call by name, as a launch takes them: those of the names in their order, or
    all in the order of the fields. Those that are None are left out."""
    if not names:
        return {name: part for name, part in parts_of(args) if isinstance(part, Tensor)}
    return {name: part for name in names if (part := getattr(args, name)) is not None}


def leaves(value: Any, kind: type[L], name: str = "") -> Iterator[tuple[str, L]]:
    """The values of `kind` in the arguments of a call, in the order of their fields, each with its name. They may be
    inside dataclasses, tuples, lists and mappings."""
    if isinstance(value, kind):
        yield name, value
        return
    for part, inner in parts_of(value):
        yield from leaves(inner, kind, f"{name}.{part}" if name else str(part))


def mapped(value: Any, kind: type[L], change: Callable[[L], Any]) -> Any:
    """The arguments of a call with each value of `kind` changed, wherever `leaves` finds it."""
    if isinstance(value, kind):
        return change(value)
    parts = [(part, inner, mapped(inner, kind, change)) for part, inner in parts_of(value)]
    if all(old is new for _, old, new in parts):
        return value
    made = {part: new for part, _, new in parts}
    if isinstance(value, Mapping):
        return type(value)(made)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **made)  # type: ignore[type-var]
    return value._replace(**made) if hasattr(value, "_replace") else type(value)(made.values())


def tensors_in(args: Any) -> list[Tensor]:
    """All tensors of a call, as `leaves` finds them, but without their names: packs ask for them at every call."""
    found: list[Tensor] = []
    _collect(args, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if value.__class__ is Tensor:
        found.append(value)
    elif value.__class__ not in PLAIN:
        for part in values_of(value):
            _collect(part, found)


def extent(tensor: Tensor, axis: int = 0) -> int:
    """Bytes from a tensor's first element to its last one's end, of one place on the axes before `axis`."""
    sizes = zip(tensor.shape[axis:], tensor.strides[axis:], strict=True)
    return (1 + sum((n - 1) * stride for n, stride in sizes)) * tensor.dtype.itemsize


PLAIN = {int, float, str, bool, type(None)}
"""Types of most arguments that are no tensors: they have no parts."""


ALIGNMENT = 256
"""Commands may depend on an address modulo this, and on nothing else of it."""


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


def parts_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """The parts of a value of arguments with their names; none of a plain value."""
    if isinstance(value, Mapping):
        return value.items()
    names = _field_names(value.__class__) or getattr(value, "_fields", None)
    return zip(names, values_of(value), strict=True) if names else enumerate(values_of(value))


def values_of(value: Any) -> Iterable[Any]:
    """The parts of a value of arguments without their names."""
    getter = _getter(value.__class__)
    return () if getter is None else getter(value)


@functools.cache
def _getter(kind: type) -> Callable[[Any], Iterable[Any]] | None:
    names = _field_names(kind)
    if names:
        get = operator.attrgetter(*names)
        return get if len(names) > 1 else lambda value: (get(value),)
    if issubclass(kind, Mapping):
        return lambda value: value.values()
    return iter if issubclass(kind, tuple | list) else None


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    """The names of the fields of a dataclass; none of another type."""
    return tuple(f.name for f in fields(kind) if f.init) if dataclasses.is_dataclass(kind) else ()
