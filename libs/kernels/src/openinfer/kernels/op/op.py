"""Op: a name with a contract, a numpy reference, device code and a cost.

An op is called with keyword arguments against a pack, which decides what the call means: run the reference, launch
kernels, or only write the call down.

    rms_norm(pack, out=h, x=x, weight=w, eps=1e-6)
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, get_origin

import numpy as np

from openinfer.kernels.errors import ContractError
from openinfer.kernels.op.launch import Command
from openinfer.kernels.op.target import Target
from openinfer.tensor import Tensor

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
    def decode(cls, rows: int, context: int) -> Workload:
        """One new token for each of `rows` sequences of `context` tokens (the new one included)."""
        return cls(rows, rows, rows * context, rows * context)

    @classmethod
    def prefill(cls, tokens: int) -> Workload:
        """One whole prompt of `tokens` tokens."""
        return cls(tokens, 1, tokens, tokens * (tokens + 1) // 2)


@dataclass(frozen=True, slots=True)
class Cost:
    """The least a call can do: bytes of device memory (each input read once and each output written once), FLOPs, and
    bytes that this rank sends to others (`link`)."""

    bytes: int
    flops: int
    link: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops, self.link + other.link)

    def floor_s(self, bandwidth: float, flops_per_s: float, link_bytes_per_s: float = math.inf) -> float:
        """Seconds below which no implementation can be: the largest of the three times."""
        return max(self.bytes / bandwidth, self.flops / flops_per_s, self.link / link_bytes_per_s)


def _arguments(contract: Callable[..., Any]) -> str:
    """The names of a contract's arguments; those that may be left out have a question mark, and a group of others has
    two stars."""
    known = inspect.signature(contract).parameters.values()
    return ", ".join(
        f"**{one.name}" if _is_group(one) else one.name + "?" * (one.default is not inspect.Parameter.empty)
        for one in known
    )


def _is_group(argument: inspect.Parameter) -> bool:
    """Whether it stands for any number of arguments, such as adapters or the state by slot."""
    return argument.kind is inspect.Parameter.VAR_KEYWORD


class Pack(Protocol):
    """One way to run ops. `run` gets the op and the arguments of a call, as `Op.args` makes them."""

    def run(self, op: Op[Any], args: Any) -> None: ...


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

        embed = Op("embed", _Args[Tensor], check=_check, reference=_reference, launches=_launches, cost=_cost)

    `check(args)` raises ContractError for invalid arguments. `reference(args)` gets numpy arrays in place of tensors,
    of those inside tuples, mappings and other dataclasses too, and writes the outputs in place. It computes in
    float32, and rounds to the tensors' dtype where the published models do. `launches(target, args)` gives the
    commands for a GPU. `cost(workload, args)` is the call's floor. The first field is the output, or is written in
    place; its first axis has the tokens or rows of the call. An op whose argument `ranks` may exceed 1 sets
    `collective`: its reference also gets the communicator, which is None where `ranks` is 1.
    """

    def __init__(
        self,
        name: str,
        args: Callable[P, A],
        *,
        reference: Callable[..., None],
        launches: Callable[..., Iterable[Command]],
        cost: Callable[..., Cost],
        check: Callable[[A], None] | None = None,
        collective: bool = False,
    ) -> None:
        self.name = name
        self.type: Any = get_origin(args) or args
        self.reference = reference
        self.launches = launches
        self.cost = cost
        self.collective = collective
        self._check = check
        if check is None:
            self._adapt()
            self.__doc__ = f"{name}(pack, {_arguments(args)})\n\n    {args.__doc__ or ''}"
        else:
            documented = check.__doc__ or self.type.__doc__
            self.__doc__ = f"{name}(pack, {', '.join(self._fields())})\n\n    {documented}"

    def _adapt(self) -> None:
        reference, launches, cost = self.reference, self.launches, self.cost
        self.reference = lambda a, c=None: reference(**a, **({} if c is None else {"communicator": c}))
        self.launches = lambda target, a: launches(target, **a)
        self.cost = lambda workload, a: cost(workload, **a)

    def __call__(self, pack: Pack, /, *args: P.args, **kwargs: P.kwargs) -> None:
        pack.run(self, self.args(*args, **kwargs))

    def args(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The arguments of a call as one value. Raises ContractError for ones that are missing or not known."""
        if self._check is None:
            return Keywords(kwargs)
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
        return [field.name + "?" * (field.default is not dataclasses.MISSING) for field in fields(self.type)]

    def plan(self, target: Target, args: Any) -> list[Command]:
        """Check the contract and return the commands a device of this kind would run."""
        self.check(args)
        return list(self.launches(target, args))

    def check(self, args: Any) -> None:
        """Raise ContractError for arguments that the contract does not allow."""
        if self._check is None:
            self.check_keywords(args)
            return
        try:
            self._check(args)
        except (TypeError, AttributeError):
            arrays = [name for name, _ in leaves(args, np.ndarray)]
            if not arrays:
                raise
            raise ContractError(
                f"{self.name}: {', '.join(arrays)} must be a Tensor; Tensor.from_numpy(array) shares the memory"
            ) from None

    def check_keywords(self, args: Any) -> None:
        try:
            self.type(**args)
        except (TypeError, AttributeError):
            given, known = args.keys(), inspect.signature(self.type).parameters
            single = {name: one for name, one in known.items() if not _is_group(one)}
            needed = {name for name, one in single.items() if one.default is inspect.Parameter.empty}
            unknown = given - single.keys() if len(single) == len(known) else set()
            arrays = [name for name, value in args.items() if isinstance(value, np.ndarray)]
            if unknown or not needed <= given:
                raise ContractError(
                    f"{self.name} takes {_arguments(self.type)} by keyword, given {', '.join(given) or 'none'}"
                ) from None
            if arrays:
                raise ContractError(
                    f"{self.name}: {', '.join(arrays)} must be a Tensor; Tensor.from_numpy(array) shares the memory"
                ) from None
            raise

    def __repr__(self) -> str:
        return f"Op({self.name})"


class Keywords(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


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


def parts_of(value: Any) -> list[tuple[Any, Any]]:
    """The parts of a value of arguments with their names; none of a plain value."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple | list):
        return list(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    return [(name, getattr(value, name)) for name in _field_names(value.__class__)]


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    """The names of the fields of a dataclass; none of another type."""
    return tuple(f.name for f in fields(kind) if f.init) if dataclasses.is_dataclass(kind) else ()
