"""Op: a name with a contract, a numpy reference, device code and a cost.

An op is called with keyword arguments against a pack, which decides what the call means: run the reference, launch
kernels, or only write the call down.

    rms_norm(pack, out=h, x=x, weight=w, eps=1e-6)
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, Protocol

import numpy as np

from openinfer.kernels.errors import ContractError
from openinfer.kernels.op.launch import Command
from openinfer.kernels.op.target import Target

P = ParamSpec("P")


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


class Pack(Protocol):
    """One way to run ops. `run` gets the op and its keyword arguments."""

    def run(self, op: Op[Any], args: Mapping[str, Any]) -> None: ...


def _arguments(contract: Callable[..., None]) -> str:
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


class Op(Generic[P]):
    """An op. `contract` is a keyword-only function. Its signature gives the op its type, and it raises ContractError
    for invalid arguments. The op's documentation is the call with all arguments, and then the docstring. Optional
    arguments default to None.

    `reference(**args)` gets numpy arrays in place of tensors and writes the outputs in place. It computes in float32,
    and rounds to the tensors' dtype where the published models do. `launches(target, **args)` gives the commands for a
    GPU. `cost(workload, **args)` is the call's floor. An op whose argument `ranks` may exceed 1 sets `collective`: with
    more ranks than one, its reference also gets `communicator`.
    """

    def __init__(
        self,
        name: str,
        contract: Callable[P, None],
        *,
        reference: Callable[..., None],
        launches: Callable[..., Iterable[Command]],
        cost: Callable[..., Cost],
        collective: bool = False,
    ) -> None:
        self.contract = contract
        self.name = name
        self.__doc__ = f"{name}(pack, {_arguments(contract)})\n\n    {contract.__doc__ or ''}"
        self.reference = reference
        self.launches = launches
        self.cost = cost
        self.collective = collective

    def __call__(self, pack: Pack, /, *args: P.args, **kwargs: P.kwargs) -> None:
        pack.run(self, kwargs)

    def plan(self, target: Target, args: Mapping[str, Any]) -> list[Command]:
        """Check the contract and return the commands a device of this kind would run."""
        self.check(args)
        return list(self.launches(target, **args))

    def check(self, args: Mapping[str, Any]) -> None:
        """Raise ContractError for arguments that the contract does not allow, or does not know."""
        try:
            self.contract(**args)  # type: ignore[call-arg]
        except (TypeError, AttributeError):
            given, known = args.keys(), inspect.signature(self.contract).parameters
            single = {name: one for name, one in known.items() if not _is_group(one)}
            needed = {name for name, one in single.items() if one.default is inspect.Parameter.empty}
            unknown = given - single.keys() if len(single) == len(known) else set()
            arrays = [name for name, value in args.items() if isinstance(value, np.ndarray)]
            if unknown or not needed <= given:
                raise ContractError(
                    f"{self.name} takes {_arguments(self.contract)} by keyword, given {', '.join(given) or 'none'}"
                ) from None
            if arrays:
                raise ContractError(
                    f"{self.name}: {', '.join(arrays)} must be a Tensor; Tensor.from_numpy(array) shares the memory"
                ) from None
            raise

    def __repr__(self) -> str:
        return f"Op({self.name})"
