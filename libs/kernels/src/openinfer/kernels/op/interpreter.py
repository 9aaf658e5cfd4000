"""Triton's interpreter, repaired for bf16 and fp8, and the objects it takes in place of tensors.

As shipped (3.6 to 3.9), the interpreter multiplies raw bit patterns of bf16 and truncates in casts to bf16 and fp8.
That of 3.6 also fails on numpy >= 2.4 in loops with a tensor bound. Importing this module repairs these faults:

- element types become those of ml_dtypes;
- casts are numpy's `astype` (round to nearest even);
- `dot` adds up in float64, where sums of products of bf16 all but never depend on their order, as BLAS's do;
- memory is read and written as unsigned integers of the element's size.

It also shortens the time that the interpreter takes. It searches a part of the language for builtins once, not at every
call. It remembers the types of blocks and of operands, and sizes of elements that were in order, because every
operation makes or checks them anew. It leaves out checks for overflow that assert nothing, a broadcast that numpy does
in the operation, calls between an operator and what it means, the choice among casts of numbers, which are all
`astype`, and a look for constants in values that hold none.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language.semantic import TritonSemantic
from triton.tools.tensor_descriptor import TensorDescriptor

from openinfer.kernels.op.launch import DTYPES

CUSTOM = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
}


class Pointer:
    """An address in host memory with an element type, in the shape of the tensor object that the interpreter expects:
    it is its own storage and its own copy on the host."""

    def __init__(
        self, address: int, dtype: str, shape: Sequence[int] = (0,), strides: Sequence[int] = (1,)
    ) -> None:
        self._address = address
        self.dtype = DTYPES[dtype]  # str() of it is the name that Triton looks for
        self.shape = tuple(shape)
        self._strides = tuple(strides)

    def data_ptr(self) -> int:
        return self._address

    def size(self) -> tuple[int, ...]:
        return self.shape

    def stride(self, axis: int | None = None) -> Any:
        return self._strides if axis is None else self._strides[axis]

    def storage_offset(self) -> int:
        return 0

    def untyped_storage(self) -> "Pointer":
        return self

    def cpu(self) -> "Pointer":
        return self

    def copy_(self, other: "Pointer") -> None:
        """The host copy is the same memory."""

    def new_empty(self, size: int, device: str) -> "Pointer":
        return Pointer.__new__(Pointer)

    def set_(self, storage: "Pointer", offset: int, size: Sequence[int], stride: Sequence[int]) -> None:
        self.__dict__.update(storage.__dict__)


def descriptor(
    address: int, dtype: str, shape: list[int], strides: list[int], block: list[int]
) -> TensorDescriptor:
    """A host tensor descriptor over memory at `address`."""
    return TensorDescriptor(Pointer(address, dtype, shape, strides), shape, strides, block)


def _as_uint(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array = np.ascontiguousarray(array)
    return array.view(np.dtype(f"u{array.itemsize}")) if array.dtype in CUSTOM.values() else array


class _Memory:
    """libtriton's host loads and stores, which know plain numpy dtypes only."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        dtype, mask = np.dtype(dtype), np.asarray(mask, bool)
        if dtype in CUSTOM.values():
            plain = np.dtype(f"u{dtype.itemsize}")
            return self._raw.load(pointers, mask, _as_uint(other), plain).view(dtype)
        return self._raw.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        return self._raw.store(pointers, _as_uint(values), np.asarray(mask, bool))


def _repair() -> None:
    builder: Any = interpreter.InterpreterBuilder
    np_dtype_of, np_dtypes = interpreter._get_np_dtype, dict[str, Any]()
    fp_to_fp = builder.create_fp_to_fp
    patch_tensor, handle = interpreter._patch_lang_tensor, interpreter.TensorHandle

    def get_np_dtype(tt_dtype: Any) -> Any:
        name, element = tt_dtype.name, tt_dtype.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = CUSTOM[element] if element in CUSTOM else np_dtype_of(tt_dtype)
        return np_dtypes[name]

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        with np.errstate(all="ignore"):
            return handle(src.data.astype(interpreter._get_np_dtype(dst_type)), dst_type.scalar)

    def convert(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if tl.float8e4b15 in (src.dtype.scalar, dst_type.scalar):
            return fp_to_fp(self, src, dst_type, rounding_mode)
        return cast(self, src, dst_type)

    def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        wide = np.float64 if d.data.dtype == np.float32 else d.data.dtype
        product = np.matmul(a.data.astype(wide), b.data.astype(wide))
        return handle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._get_np_dtype = get_np_dtype
    interpreter._patch_lang_tensor = patch_lang_tensor
    interpreter._interpreter = _Memory(interpreter._interpreter)
    builder.cast_impl = cast
    builder.create_fp_to_fp = convert
    builder.create_dot = dot
    if not hasattr(builder, "get_bf16"):  # 3.6: tl.full(..., tl.bfloat16)
        builder.get_bf16 = lambda self, value: handle(np.array([value], ml_dtypes.bfloat16), tl.bfloat16)


def _remember() -> None:
    """Keep results that the interpreter would compute again and again."""
    make_block = tl.block_type.__init__
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    scalar = (tl.tuple([]), tl.constexpr(1))
    checked = tl.core.builtin(lambda: None).__code__

    @functools.cache
    def builtins_of(part: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(part) if tl.core.is_builtin(member)]

    def patch_builtins(part: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins_of(part):
            if getattr(part, name) is not member:
                return  # the launch that is under way has patched them all
            scope.set_attr(part, name, interpreted(member, builder))

    @functools.cache
    def interpreted(member: Any, builder: Any) -> Any:
        semantic = TritonSemantic(builder)
        if (name := member.__name__) in ("__add__", "__sub__", "__mul__"):
            meant = getattr(semantic, name.strip("_"))
            return lambda x, y: meant(x, tl.core._unwrap_if_constexpr(y), True)
        while member.__code__ is checked:  # it only asks for the `_semantic` that is given here
            member = member.__wrapped__
        return lambda *args, _semantic=None, **named: member(*args, _semantic=semantic, **named)

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            make_block(self, element_ty, shape)
            sizes = tl.tuple([tl.constexpr(size) for size in self.shape])
            blocks[key] = {**self.__dict__, "of_tensor": (sizes, tl.constexpr(self.numel))}
        self.__dict__.update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor if type.is_block() else scalar

    interpreter._patch_builtin = patch_builtins
    tl.block_type.__init__ = block
    tl.tensor.__init__ = tensor


def _leave_out() -> None:
    """Leave out work that changes no result."""
    builder: Any = interpreter.interpreter_builder
    if not builder.options.debug:  # without it, the checks are computed and then dropped
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_unlike(self: Any, lhs: Any, rhs: Any) -> Any:
        blocks = lhs.type.is_block() and rhs.type.is_block()
        alike = blocks and lhs.type.shape.values == rhs.type.shape.values
        return (lhs, rhs) if alike else broadcast(self, lhs, rhs)

    check = TritonSemantic.binary_op_type_checking_impl
    checked: dict[Any, tuple[Any, ...]] = {}
    tensor = tl.tensor

    def check_once(self: Any, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> Any:
        left = lhs.type.name if isinstance(lhs, tensor) else (type(lhs), lhs)
        right = rhs.type.name if isinstance(rhs, tensor) else (type(rhs), rhs)
        key = left, right, flags, *named.items()
        if key not in checked:
            pairs = tuple(zip((lhs, rhs), made := check(self, lhs, rhs, *flags, **named), strict=True))
            if any(isinstance(x, tensor) and x.dtype != new.dtype for x, new in pairs):
                return made
            # Of numbers their tensors, which nobody writes to. Of tensors the types, where they differ in shape.
            if len(checked) > 2_000:
                checked.clear()
            checked[key] = tuple(
                new if not isinstance(x, tensor) else new.type if new.type.name != x.type.name else None
                for x, new in pairs
            )
        left, right = checked[key]
        return shaped(self, lhs, left), shaped(self, rhs, right)

    def shaped(self: Any, x: Any, to: Any) -> Any:
        if to is None or isinstance(to, tensor):
            return x if to is None else to
        data = np.asarray(x.handle.data, interpreter._get_np_dtype(x.dtype))
        return self.tensor(interpreter.TensorHandle(data, x.dtype), to)  # the operation broadcasts its data

    unwrap: Any = tl.core._unwrap_if_constexpr
    bare = {tensor, bool, int, float, str, type(None)}

    def unwrap_others(value: Any) -> Any:
        return value if type(value) in bare else unwrap(value)

    cast = TritonSemantic.cast
    numbers = {*tl.dtype.SINT_TYPES, *tl.dtype.UINT_TYPES, *tl.dtype.STANDARD_FP_TYPES}

    def cast_unlike(self: Any, x: Any, to: Any, rounding: Any = None) -> Any:
        to = to.scalar
        if x.dtype is to:
            return x
        if rounding is not None or not {x.dtype.name, to.name} <= numbers:
            return cast(self, x, to, rounding)
        made = x.type.with_element_ty(to) if x.type.is_block() else to
        return self.tensor(self.builder.cast_impl(x.handle, to), made)

    make_handle = interpreter.TensorHandle.__init__
    largest: dict[str, int] = {}  # bytes of an element that passed the check, by the name of its type

    def handle(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > largest.get(dtype.name, 0):
            make_handle(self, data, dtype, self.attr)
            largest[dtype.name] = data.itemsize

    patch_lang, plain_load = interpreter._patch_lang, tl.load
    languages = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def patch_lang_once(fn: Any) -> Any:
        # A kernel whose launch has patched the language calls fn, or calls what does.
        return patch_lang(languages) if tl.load is plain_load else interpreter._LangPatchScope()

    TritonSemantic.broadcast_impl_value = broadcast_unlike
    TritonSemantic.binary_op_type_checking_impl = check_once
    TritonSemantic.cast = cast_unlike
    tl.core._unwrap_if_constexpr = unwrap_others
    interpreter.TensorHandle.__init__ = handle
    interpreter._patch_lang = patch_lang_once


_repair()
_remember()
_leave_out()
