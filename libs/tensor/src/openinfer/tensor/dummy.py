"""DummyCheckpoint: random weights of any shapes, for measuring a model without its checkpoint."""

import functools
import json
import math
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from openinfer.tensor import dtypes
from openinfer.tensor.checkpoint import Checkpoint, Expected, check_range
from openinfer.tensor.dtypes import DType, bfloat16, float8_e4m3fn, float8_e8m0fnu
from openinfer.tensor.headers import TensorInfo

_BLOCK = 1 << 22  # elements that repeat, about, so that a tensor of any size costs a copy
_SPREAD = 0.02  # of a matrix' elements
_E8M0 = 121  # 2^-6: codes of one digit before the point become elements of that spread


class DummyCheckpoint(Checkpoint):
    """A checkpoint that has exactly the tensors that `require` first asks for, with random values.

    Matrices are normal with a small spread, and vectors are near 1. Codes of float8 are finite, and their scales give
    them the spread of a matrix. Integers of 64 bits count up along the last axis; others are codes of any bits, packed
    (products of alike numbers take a GPU less power, and less time). No file is read. The name of a tensor
    seeds its values, because alike layers bring all tokens to the same experts of a mixture.
    """

    _in_files = False

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files, self._maps = {}, {}
        self._tensors = {}

    def require(
        self, expected: Expected, optional: Collection[str] = (), ignore: Collection[str] = ()
    ) -> None:
        """Have these tensors, in bfloat16 where that is possible, else in the first of their dtypes."""
        for name, (shape, allowed) in expected.items():
            known = [dtypes.of(dtype) for dtype in allowed]
            dtype = bfloat16 if bfloat16 in known else known[0]
            nbytes = math.prod(shape) * dtype.itemsize
            self._tensors[name] = TensorInfo(name, dtype, tuple(shape), self.directory / "dummy", nbytes, 0)

    def digest(self) -> bytes:
        """SHA-256 of the names, dtypes and shapes, which decide on the values."""
        known = sorted((one.name, one.dtype.name, one.shape) for one in self._tensors.values())
        return sha256(json.dumps(["dummy", known]).encode()).digest()

    def read_into(self, name: str, out: np.ndarray[Any, Any], start: int = 0) -> None:
        info = self.info(name)
        check_range(info, start, out.nbytes)
        scale = "scale" in name
        block = _values(info.dtype, len(info.shape) > 1, info.shape[-1] if info.shape else 1, scale)
        counts = info.dtype.kind in "iu" and info.dtype.itemsize == 8
        begin = 0 if counts else crc32(name.encode()) * info.dtype.itemsize
        done = 0
        while done < out.nbytes:
            at = (begin + start + done) % block.nbytes
            count = min(block.nbytes - at, out.nbytes - done)
            out[done : done + count] = block[at : at + count]
            done += count


def _values(dtype: DType, matrix: bool, width: int, scale: bool) -> np.ndarray[Any, Any]:
    """Bytes that repeat in tensors of a kind; width: of the last axis."""
    # Odd: parts of a tensor, as heads and experts, must not be alike.
    size = (max(1, _BLOCK // max(width, 1) - 1) | 1) * max(width, 1)
    counts = dtype.kind in "iu" and dtype.itemsize == 8
    return _block(dtype, matrix, scale, max(size, _BLOCK), width * counts)[: size * dtype.itemsize]


@functools.lru_cache(maxsize=64)
def _block(dtype: DType, matrix: bool, scale: bool, size: int, width: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(0)
    if dtype == float8_e8m0fnu or (scale and dtype.itemsize == 1 and dtype.kind in "iu"):
        return np.full(size, _E8M0, np.uint8)
    if scale and (dtype.itemsize == 1 or dtype == np.float32):
        values = np.full(size, 1 if dtype.itemsize == 1 else _SPREAD, dtype)
    elif dtype == float8_e4m3fn:
        values = rng.standard_normal(size, np.float32).astype(dtype)
    elif width:
        values = (np.arange(size) % width).astype(dtype)
    elif dtype.kind in "iu":
        values = rng.integers(0, 256, size * dtype.itemsize, np.uint8)  # two codes of four bits in each byte
    else:
        spread, mean = (_SPREAD, 0) if matrix else (0.1, 1)
        values = (spread * rng.standard_normal(size, np.float32) + mean).astype(dtype)
    return values.view(np.uint8)
