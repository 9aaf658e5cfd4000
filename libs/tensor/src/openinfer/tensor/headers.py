"""Headers of safetensors files: the `safetensors` package validates each, so no header is believed that it refuses.

The format: 8 bytes of little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
The package gives names in the order of their data, dtypes and shapes, but no offsets. A valid file has neither holes
nor overlaps, so each tensor begins where the one before it ends.
"""

import json
import math
import os
from pathlib import Path
from typing import BinaryIO, NamedTuple

from safetensors import SafetensorError, safe_open

from openinfer.tensor import dtypes
from openinfer.tensor.dtypes import DType
from openinfer.tensor.errors import CheckpointError, DTypeError

MAX_HEADER_BYTES = 100_000_000
"""The package's limit."""

_MAX_NDIM = 64  # numpy's


class TensorInfo(NamedTuple):
    """One tensor of a checkpoint. `offset` is in bytes from the start of `file`; the data is row-major."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    file: Path
    nbytes: int
    offset: int


def read_header(path: Path, file: BinaryIO) -> list[TensorInfo]:
    """The tensors of a file in the order of their data. `file`: `path`, open at its start.

    Raises CheckpointError for a header that the package refuses, and for dtypes and shapes that numpy cannot hold.
    """
    size = os.fstat(file.fileno()).st_size
    if size < 8:
        raise CheckpointError(path, None, f"has {size} bytes; a safetensors file has at least 8")
    start = file.read(8)
    if start == b"version ":
        raise CheckpointError(path, None, "is a pointer of git-lfs, not the weights; run git lfs pull")
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER_BYTES or 8 + length > size:
        why = f"claims a header of {length} bytes; the file has {size}, and {MAX_HEADER_BYTES} is the limit"
        raise CheckpointError(path, None, why)
    infos, end = [], 8 + length
    try:
        with safe_open(path, framework="numpy") as opened:
            for name in opened.offset_keys():
                view = opened.get_slice(name)
                infos.append(_info(path, name, view.get_dtype(), view.get_shape(), end))
                end += infos[-1].nbytes
    except SafetensorError as e:
        raise _refusal(path, file.read(length), size - 8 - length, str(e)) from e
    return infos


def _info(path: Path, name: str, tag: str, shape: list[int], offset: int) -> TensorInfo:
    try:
        dtype = dtypes.from_tag(tag)
    except DTypeError as e:
        raise CheckpointError(path, name, str(e)) from e
    if len(shape) > _MAX_NDIM or math.prod(n or 1 for n in shape) >= 2**63:
        raise CheckpointError(
            path, name, f"shape must be a list of at most {_MAX_NDIM} sizes with a product below 2**63"
        )
    return TensorInfo(name, dtype, tuple(shape), path, math.prod(shape) * dtype.itemsize, offset)


def _refusal(path: Path, raw: bytes, data_bytes: int, words: str) -> CheckpointError:
    """The error for a refused header. It names the tensor at fault, which the package's `words` often leave out."""
    if not raw.startswith(b"{"):
        return CheckpointError(path, None, "header does not start with '{'; this is no safetensors file")
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as e:  # ValueError: bad UTF-8 and bad JSON both
        return CheckpointError(path, None, f"is not valid JSON: {e}")
    ends: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            shape, (begin, end) = entry["shape"], entry["data_offsets"]
            nbytes, span = _info(path, name, str(entry["dtype"])[:40], shape, 0).nbytes, end - begin
        except CheckpointError as e:
            return e
        except (TypeError, KeyError, ValueError):
            return CheckpointError(path, name, f"its header entry is wrong: {words}")
        if span != nbytes:
            why = f"{entry['dtype']}{shape} is {nbytes} bytes, its data_offsets span {span}"
            return CheckpointError(path, name, why)
        ends.append((begin, end, name))
    # The first tensor that does not begin where the one before it ends, or the end of the file.
    last = 0
    for begin, end, name in sorted(ends):
        if begin != last:
            what = "overlaps the tensor before it" if begin < last else "leaves a hole before it"
            return CheckpointError(path, name, f"data at {begin} {what}, which ends at {last}")
        last = end
    if last != data_bytes:
        return CheckpointError(
            path, None, f"data ends at byte {last} of {data_bytes}; the file was cut, or padded"
        )
    return CheckpointError(path, None, f"has a wrong header. The safetensors package says: {words}")
