"""Commands of a device as plain records: kernel launches, cuBLASLt products and collectives.

A record holds no driver object. So one record can be compiled ahead of time, counted, launched on a GPU, or sent
through Triton's interpreter. The records of a call must run in their order. Records of different branches (`beside`)
may run in any order: in a CUDA graph they run side by side, elsewhere in their order.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from openinfer.kernels.errors import LaunchError
from openinfer.tensor import Tensor

TRITON_TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float8_e4m3fn": "fp8e4nv",
    "int8": "i8",
    "uint8": "u8",
    "int32": "i32",
    "uint32": "u32",
    "int64": "i64",
}
"""numpy's names of element types to Triton's."""

DTYPES: dict[str, np.dtype[Any]] = {kind: np.dtype(name) for name, kind in TRITON_TYPES.items()}
"""Element types by Triton's names."""

_POINTERS = {dtype: "*" + kind for kind, dtype in DTYPES.items()}

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Scratch:
    """Memory that lives for one op call, taken from the pack's workspace. Compared by identity.

    `zeroed` scratch is zero when the call starts, and its kernels leave it zero: it comes from a separate region that
    is cleared once. Two scratches of one call never overlap; those of different calls do.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    zeroed: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements; scratch is dense."""
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor that a kernel reads or writes in tiles of `block` by bulk tensor copies (sm_90 and up). It has two
    dimensions, or up to five in a kernel of CUDA C++."""

    tensor: Tensor | Scratch
    block: tuple[int, ...]


class Aligned(NamedTuple):
    """An int argument that the kernel may assume to be a multiple of 16 (strides, sizes)."""

    value: int


def aligned(value: int) -> Aligned | int:
    """An int argument that is marked if it is a multiple of 16."""
    return value if value % 16 else Aligned(value)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n, because blocks of a kernel have such sizes."""
    return 1 << (n - 1).bit_length()


def depth(k: int, most: int) -> int:
    """The largest power of two that divides k, at most `most`."""
    return min(k & -k, most)


@dataclass(frozen=True, slots=True)
class PeerTable:
    """The table of the ranks' segments for sums of rows of `width` bytes, or for columns, which the driver owns (see
    device.push_sum)."""

    width: int | None


Arg = Tensor | Scratch | PeerTable | TensorMap | Aligned | int | float


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel to compile: a Triton function with its types, constants and options. Equal specs share a cubin."""

    module: str
    function: str
    # (argument, Triton type), constants left out, in the kernel's order.
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[str, ...]  # arguments that are multiples of 16
    num_warps: int
    num_stages: int
    max_registers: int = 0  # a thread; 0: as many as the compiler likes. Fewer let more programs share an SM
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        values = (self.module, self.function, self.signature, self.constants, self.divisible)
        options = (self.num_warps, self.num_stages, self.max_registers)
        object.__setattr__(self, "_hash", hash((*values, *options)))

    def __hash__(self) -> int:
        return self._hash

    def as_json(self) -> dict[str, Any]:
        """The fields as what JSON has."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}

    def __str__(self) -> str:
        consts, module = ",".join(f"{k}={v}" for k, v in self.constants), self.module.rpartition(".")[2]
        return f"{module}.{self.function}[{consts}]w{self.num_warps}s{self.num_stages}"


@dataclass(frozen=True, slots=True)
class CudaSpec:
    """A kernel of CUDA C++ to compile with NVRTC: a function of a .cu file, which includes files of its package alone.
    Equal specs share a cubin.

    `file`: its name in the package `module`. `signature`: (argument, Triton's name of its type), in the kernel's order.
    `constants`: macros. `shared`: bytes of dynamic shared memory a block.
    """

    module: str
    file: str
    function: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int], ...]
    threads: int
    shared: int

    def as_json(self) -> dict[str, Any]:
        """The fields as what JSON has."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __str__(self) -> str:
        consts = ",".join(f"{k}={v}" for k, v in self.constants)
        return f"{self.file}.{self.function}[{consts}]"


Spec = KernelSpec | CudaSpec
"""A kernel to compile, of either language."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: `args` in the order of the spec's signature. `branch`: see beside.

    `early`: the kernel may start before the one ahead has ended (programmatic dependent launch), and before those ahead
    of that if it is early too. All launches before the last one that is not early have ended, and so have those before
    one that waits before it lets others start (device.norm.wait_ahead). Before the kernel writes, or reads what those
    that run may write, it executes griddepcontrol.wait. Behind branches it waits for all of them. No launch in a branch
    of a call is early, nor is the first in the second branch of a fork, because that is slower.
    """

    spec: Spec
    grid: tuple[int, int, int]
    args: tuple[Arg, ...]
    branch: int = 0
    early: bool = False

    @property
    def memory(self) -> Iterator[Any]:
        """The arguments; of a tensor map what it is of."""
        return (arg.tensor if isinstance(arg, TensorMap) else arg for arg in self.args)


@dataclass(frozen=True, slots=True)
class Matmul:
    """out[M, N] = x[M, K] @ weight[N, K]^T (+ out if `accumulate`) through cuBLASLt; fp32 accumulation.

    scales: float32 scales of x and of weight, which are float8 then: [1, M] and [N, 1], or [K / 128, M] and [N / 128,
    K / 128]. groups: of K columns of x [M, groups K], each with an equal part of the rows of the weight and of the
    columns of out. `branch`: see beside."""

    out: Tensor | Scratch
    x: Tensor | Scratch
    weight: Tensor | Scratch
    workspace: Scratch
    accumulate: bool = False
    branch: int = 0
    scales: tuple[Tensor | Scratch, Tensor | Scratch] | None = None
    groups: int = 1

    @property
    def operands(self) -> tuple[Tensor | Scratch, ...]:
        """All tensors but the workspace: out, x, weight and the scales."""
        return (self.out, self.x, self.weight, *(self.scales or ()))

    @property
    def memory(self) -> tuple[Tensor | Scratch, ...]:
        """All tensors."""
        return (*self.operands, self.workspace)


CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True, slots=True)
class Collective:
    """An exchange of tensors between `ranks` processes that all issue the same ones in the same order.

    all_reduce: out = the sum of all x. all_gather: out = all x along the first axis, by rank. reduce_scatter: out =
    this rank's part of the sum along the first axis. Sums are float32 in the order of ranks, rounded once. `branch`:
    see beside.
    """

    kind: CollectiveKind
    out: Tensor | Scratch
    x: Tensor | Scratch
    ranks: int
    branch: int = 0

    @property
    def memory(self) -> tuple[Tensor | Scratch, ...]:
        """Both tensors."""
        return self.out, self.x

    @property
    def link_bytes(self) -> int:
        """The least bytes that a rank sends: of a ring."""
        if self.kind == "all_gather":
            return (self.ranks - 1) * self.x.nbytes
        part = self.x.nbytes * (self.ranks - 1) // self.ranks
        return 2 * part if self.kind == "all_reduce" else part

    def __str__(self) -> str:
        return f"{self.kind} of {self.x.nbytes} bytes over {self.ranks} ranks"


Command = Launch | Matmul | Collective
C = TypeVar("C", bound=Command)


def beside(*branches: Iterable[C]) -> Iterator[C]:
    """The commands of several branches of a call, none of which reads or writes what another one writes.

    They come numbered from 1, one branch after the other. All of them start after the call's commands before them, and
    what follows starts after all of them. Where programs of two branches wait for an SM, those of the lower number go
    first: so a chain of short kernels comes before a long one that would keep it waiting. A branch that is alone stays
    unnumbered. Raises LaunchError for branches within a branch.
    """
    made = [commands for branch in branches if (commands := list(branch))]
    for number, commands in enumerate(made, start=1):
        for command in commands:
            if command.branch:
                raise LaunchError(
                    "a branch of a call has branches of its own; give all of them to one beside()"
                )
            yield command if len(made) == 1 else replace(command, branch=number)


def launch(
    module: str,
    function: str,
    grid: tuple[int, ...],
    args: Mapping[str, Arg],
    constants: Mapping[str, Any],
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    max_registers: int = 0,
    early: bool | None = None,
) -> Launch:
    """Make a launch record; types and alignments follow from the arguments.

    Ints travel as i32 (LaunchError where one does not fit), floats as fp32, tensors as pointers with 16-byte alignment
    assumed where their address has it. early: see Launch; unless None, it is also the constant EARLY of the kernel.
    """
    signature, divisible = [], []
    for name, arg in args.items():
        kind, aligned = _type_of(name, arg)
        signature.append((name, kind))
        if aligned:
            divisible.append(name)
    static = tuple(sorted((constants if early is None else {**constants, "EARLY": early}).items()))
    types, aligned_args = tuple(signature), tuple(divisible)
    spec = _spec(module, function, types, static, aligned_args, num_warps, num_stages, max_registers)
    x, y, z = (*grid, 1, 1)[:3]
    return Launch(spec, (x, y, z), tuple(args.values()), early=bool(early))


def launch_cuda(
    module: str,
    file: str,
    function: str,
    grid: tuple[int, ...],
    args: Mapping[str, Arg],
    constants: Mapping[str, int],
    *,
    threads: int,
    shared: int,
    early: bool = False,
) -> Launch:
    """Make a launch record of a kernel of CUDA C++ (see CudaSpec). It assumes tensors at multiples of 16 bytes.

    Raises LaunchError for a tensor elsewhere, and where an int does not fit an i32.
    """
    signature = []
    for name, arg in args.items():
        kind, aligned = _type_of(name, arg)
        if isinstance(arg, Tensor) and not aligned:
            raise LaunchError(f"{name} is {arg!r}; {file} takes tensors at multiples of 16 bytes")
        signature.append((name, kind))
    macros = tuple(sorted((name, int(value)) for name, value in constants.items()))
    x, y, z = (*grid, 1, 1)[:3]
    spec = _cuda_spec(module, file, function, tuple(signature), macros, threads, shared)
    return Launch(spec, (x, y, z), tuple(args.values()), early=early)


_spec, _cuda_spec = functools.cache(KernelSpec), functools.cache(CudaSpec)
"""One object a spec, so that looking it up compares identities: a process has hundreds of specs and millions of
launches."""


def _type_of(name: str, arg: Arg) -> tuple[str, bool]:
    kind = type(arg)
    if kind is Tensor:
        return _pointer(name, arg.dtype), arg.ptr % 16 == 0  # type: ignore[union-attr]
    if kind is int:
        return _int_type(name, arg), False  # type: ignore[arg-type]
    match arg:
        case Aligned(value):
            if value % 16:
                raise LaunchError(f"{name}={value} is said to be a multiple of 16")
            return _int_type(name, value), True
        case Scratch():
            return _pointer(name, arg.dtype), True
        case PeerTable():
            return "*i64", True
        case float():
            return "fp32", False
        case TensorMap(tensor, block):
            return f"tensordesc<{_pointer(name, tensor.dtype)[1:]}{list(block)}>", False
    raise LaunchError(
        f"{name} is a {kind.__name__}; a kernel takes tensors, scratch, tensor maps, ints and floats"
    )


def _pointer(name: str, dtype: np.dtype[Any]) -> str:
    kind = _POINTERS.get(dtype)
    if kind is None:
        raise LaunchError(f"{name} is {dtype}; a kernel takes {', '.join(TRITON_TYPES)}")
    return kind


def _int_type(name: str, value: int) -> str:
    if not -INT32_MAX <= value <= INT32_MAX:
        raise LaunchError(f"{name}={value} does not fit an i32 kernel argument")
    return "i32"
