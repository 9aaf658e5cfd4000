"""The dtypes this library moves, their names and their safetensors tags.

A dtype is a `np.dtype`; the ones numpy lacks (bfloat16, the float8 family) come from ml_dtypes.
"""

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from openinfer.tensor.errors import DTypeError

DType: TypeAlias = np.dtype[Any]

bool_: DType = np.dtype(np.bool_)
int8: DType = np.dtype(np.int8)
int16: DType = np.dtype(np.int16)
int32: DType = np.dtype(np.int32)
int64: DType = np.dtype(np.int64)
uint8: DType = np.dtype(np.uint8)
uint16: DType = np.dtype(np.uint16)
uint32: DType = np.dtype(np.uint32)
uint64: DType = np.dtype(np.uint64)
float16: DType = np.dtype(np.float16)
float32: DType = np.dtype(np.float32)
float64: DType = np.dtype(np.float64)
bfloat16: DType = np.dtype(ml_dtypes.bfloat16)
float8_e4m3fn: DType = np.dtype(ml_dtypes.float8_e4m3fn)
float8_e5m2: DType = np.dtype(ml_dtypes.float8_e5m2)
float8_e8m0fnu: DType = np.dtype(ml_dtypes.float8_e8m0fnu)

FLOATS = frozenset({float16, float32, float64, bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu})

WEIGHTS = (bfloat16, float16, float32)
"""Dtypes that weights are published in without scales. load_tensors converts between them."""

_OF_NUMPY = (int8, int16, int32, int64, uint8, uint16, uint32, uint64, float16, float32, float64)
_BY_TAG: dict[str, DType] = {
    "BOOL": bool_,
    **{f"{dtype.kind.upper()}{8 * dtype.itemsize}": dtype for dtype in _OF_NUMPY},
    "BF16": bfloat16,
    "F8_E4M3": float8_e4m3fn,
    "F8_E5M2": float8_e5m2,
    "F8_E8M0": float8_e8m0fnu,
}
ALL = tuple(_BY_TAG.values())
_TAGS: dict[DType, str] = {dtype: tag for tag, dtype in _BY_TAG.items()}
_BY_NAME: dict[str, DType] = {dtype.name: dtype for dtype in _TAGS}


def of(dtype: DType | type | str) -> DType:
    """The np.dtype for a name ("bfloat16"), a numpy or ml_dtypes scalar type, or a np.dtype.

    Raises DTypeError for what this library does not move (complex, big-endian, structured, ...).
    """
    if isinstance(dtype, str):
        found = _BY_NAME.get(dtype)
    else:
        try:
            found = np.dtype(dtype)
        except TypeError:
            found = None
    if found is None or found not in _TAGS:
        raise DTypeError(f"unknown dtype {dtype!r}; known: {', '.join(sorted(_BY_NAME))}")
    return found


def from_tag(tag: str) -> DType:
    """The dtype of a safetensors tag such as "BF16". Raises DTypeError for an unknown one."""
    try:
        return _BY_TAG[tag]
    except KeyError:
        raise DTypeError(f"unknown safetensors dtype {tag!r}; known: {', '.join(sorted(_BY_TAG))}") from None


def tag(dtype: DType) -> str:
    """The safetensors tag of a dtype; `from_tag(tag(d)) == d`."""
    return _TAGS[of(dtype)]
