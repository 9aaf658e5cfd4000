"""cuBLASLt through ctypes: the Matmul command."""

import ctypes
import functools
import importlib.util
from collections.abc import Sequence
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from openinfer.kernels.errors import LaunchError, MissingExtra
from openinfer.kernels.op.launch import Matmul

DATA_TYPES = {"bfloat16": 14, "float32": 0, "float8_e4m3fn": 28}
"""cudaDataType_t by numpy's name."""

COMPUTE_F32 = 68
DESC_TRANSA, DESC_TRANSB = 3, 4
DESC_SCALES, DESC_SCALE_MODES = (17, 18), (31, 32)
LAYOUT_BATCH_COUNT, LAYOUT_BATCH_OFFSET = 5, 6
OUTER_VECTORS, VECTORS_OF_128, BLOCKS_OF_128 = 3, 4, 5
"""cublasLtMatmulMatrixScale_t: scales of rows, of 128 numbers of a row, and of 128 x 128 numbers."""
PREF_MAX_WORKSPACE, PREF_MIN_ALIGNMENTS = 1, (5, 6, 7, 8)

PROTOTYPES: dict[str, list[Any]] = {
    "cublasLtCreate": [c_void_p],
    "cublasLtDestroy": [c_void_p],
    "cublasLtMatmulDescCreate": [c_void_p, c_int, c_int],
    "cublasLtMatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatmulDescDestroy": [c_void_p],
    "cublasLtMatrixLayoutCreate": [c_void_p, c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatrixLayoutSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatrixLayoutDestroy": [c_void_p],
    "cublasLtMatmulPreferenceCreate": [c_void_p],
    "cublasLtMatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatmulPreferenceDestroy": [c_void_p],
    "cublasLtMatmulAlgoGetHeuristic": [c_void_p] * 7 + [c_int, c_void_p, c_void_p],
    "cublasLtMatmul": [c_void_p] * 14 + [c_size_t, c_void_p],
}


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class _Key(NamedTuple):
    """The kind of a product, n columns a group. modes: of the scales of the weight and of x; empty for bf16."""

    m: int
    n: int
    k: int
    out: str
    accumulate: bool
    alignment: int
    room: int
    modes: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, command: Matmul, alignment: int) -> "_Key":
        (m, n), k = command.out.shape, command.weight.shape[1]
        modes: tuple[int, ...] = ()
        if command.scales is not None:
            rows = command.scales[1].shape[-1] == 1
            modes = (OUTER_VECTORS, OUTER_VECTORS) if rows else (BLOCKS_OF_128, VECTORS_OF_128)
        out, room = command.out.dtype.name, command.workspace.nbytes
        n //= command.groups
        return cls(m, n, k, out, command.accumulate, alignment, room, modes, command.groups)


class _Plan:
    """Descriptors and algorithm of one kind of product."""

    __slots__ = ("desc", "left", "out", "result", "right")

    def __init__(self) -> None:
        self.desc, self.left, self.right, self.out = c_void_p(), c_void_p(), c_void_p(), c_void_p()
        self.result = _Heuristic()


@functools.cache
def library_path() -> str | None:
    """Where libcublasLt is: in the nvidia wheels, else wherever cuda.pathfinder finds one. None if nowhere."""
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia.submodule_search_locations or []) if nvidia else []:
        found = sorted(Path(folder).glob("*/lib/libcublasLt.so.13"))
        if found:
            return str(found[0])
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        found_path: str | None = load_nvidia_dynamic_lib("cublasLt").abs_path
    except (ImportError, RuntimeError, OSError):
        return None
    return found_path


def cublas_available() -> bool:
    """Whether cuBLASLt is installed. Needs no device, and calls no function of the library."""
    return library_path() is not None


def load_library() -> Any:
    """libcublasLt with its prototypes set. Raises MissingExtra if it is not installed."""
    path = library_path()
    if path is None:
        raise MissingExtra("cuBLASLt is not installed: pip install 'openinfer-kernels[cublas]'")
    library = ctypes.CDLL(path)
    for name, arguments in PROTOTYPES.items():
        getattr(library, name).argtypes = arguments
    return library


class CublasLt:
    """A cuBLASLt handle of the current device.

    Use it from one thread, with the device activated before it is made. A product may be launched while a stream is
    captured: it only enqueues, and asks for its workspace from the caller. The algorithm is the heuristic's first
    answer for the sizes, kept for the handle's life: the same product runs the same kernel. Raises MissingExtra without
    the library, LaunchError where it answers with an error. `close()` frees it.
    """

    def __init__(self) -> None:
        self._lib = load_library()
        self._handle = c_void_p()
        self._plans: dict[_Key, _Plan] = {}
        self._one, self._zero = c_float(1), c_float(0)
        self._call("cublasLtCreate", byref(self._handle))

    def matmul(self, command: Matmul, operands: Sequence[int], workspace: int, stream: int) -> None:
        """Enqueue the product on `stream`; operands: the addresses of the command's (16-byte aligned)."""
        out, x, weight, *scales = operands
        # some algorithms want more than the 16 bytes that are promised
        key = _Key.of(command, 256 if (out | x | weight) % 256 == 0 else 16)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(key, scales)
        self._point(plan, scales)
        status = self._lib.cublasLtMatmul(
            self._handle, plan.desc, byref(self._one), weight, plan.left, x, plan.right,
            byref(self._one if command.accumulate else self._zero), out, plan.out, out, plan.out,
            byref(plan.result.algo), workspace, key.room, stream,
        )  # fmt: skip
        if status:
            raise LaunchError(f"cublasLtMatmul gave status {status} for {_shown(key)}")

    def _point(self, plan: _Plan, scales: Sequence[int]) -> None:
        """Say where the scales are: of x, then of the weight, which is cuBLAS's first operand."""
        for attribute, address in zip(DESC_SCALES, reversed(scales), strict=False):
            self._call("cublasLtMatmulDescSetAttribute", plan.desc, attribute, byref(c_uint64(address)), 8)

    def close(self) -> None:
        """Free the handle and the descriptors; later calls of `matmul` fail. Closing twice does nothing."""
        for plan in self._plans.values():
            self._destroy(plan)
        self._plans.clear()
        if self._handle:
            self._call("cublasLtDestroy", self._handle)
            self._handle = c_void_p()

    def _destroy(self, plan: _Plan) -> None:
        for layout in (plan.left, plan.right, plan.out):
            self._lib.cublasLtMatrixLayoutDestroy(layout)
        self._lib.cublasLtMatmulDescDestroy(plan.desc)

    def _plan(self, key: _Key, scales: Sequence[int]) -> _Plan:
        """cuBLAS is column-major: there out^T [n, m] = weight [k, n]^T x^T [k, m]."""
        plan = _Plan()
        m, n, k, out, *_ = key
        kind = DATA_TYPES["float8_e4m3fn" if key.modes else "bfloat16"]
        self._call("cublasLtMatmulDescCreate", byref(plan.desc), COMPUTE_F32, DATA_TYPES["float32"])
        set_attribute = "cublasLtMatmulDescSetAttribute"
        modes = zip(DESC_SCALE_MODES, key.modes, strict=False)
        for attribute, value in ((DESC_TRANSA, 1), (DESC_TRANSB, 0), *modes):
            self._call(set_attribute, plan.desc, attribute, byref(c_int32(value)), 4)
        self._point(plan, scales)
        for layout, dtype, rows, columns, stride, offset in (
            (plan.left, kind, k, n, k, n * k),
            (plan.right, kind, k, m, k * key.groups, k),
            (plan.out, DATA_TYPES[out], n, m, n * key.groups, n),
        ):
            self._call("cublasLtMatrixLayoutCreate", byref(layout), dtype, rows, columns, stride)
            if key.groups > 1:
                set_layout = partial(self._call, "cublasLtMatrixLayoutSetAttribute", layout)
                set_layout(LAYOUT_BATCH_COUNT, byref(c_int32(key.groups)), 4)
                set_layout(LAYOUT_BATCH_OFFSET, byref(c_int64(offset)), 8)
        preference, answers = c_void_p(), c_int()
        self._call("cublasLtMatmulPreferenceCreate", byref(preference))
        set_preference = "cublasLtMatmulPreferenceSetAttribute"
        self._call(set_preference, preference, PREF_MAX_WORKSPACE, byref(c_uint64(key.room)), 8)
        for attribute in PREF_MIN_ALIGNMENTS:
            self._call(set_preference, preference, attribute, byref(c_uint32(key.alignment)), 4)
        status = self._lib.cublasLtMatmulAlgoGetHeuristic(
            self._handle, plan.desc, plan.left, plan.right, plan.out, plan.out, preference, 1,
            byref(plan.result), byref(answers),
        )  # fmt: skip
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        if status or not answers.value:
            self._destroy(plan)
            raise LaunchError(f"cuBLASLt has no algorithm (status {status}) for {_shown(key)}")
        return plan

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._lib, name)(*args)
        if status:
            raise LaunchError(f"{name} gave status {status}")


def _shown(key: _Key) -> str:
    groups = f"{key.groups} groups of " if key.groups > 1 else ""
    return f"{groups}M={key.m} N={key.n} K={key.k}{' of float8' if key.modes else ''} into {key.out}"
