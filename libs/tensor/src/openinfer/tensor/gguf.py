"""GGUF: a file's header read with suspicion, and its tensors as float32, float16 or bfloat16.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): metadata pairs, the tensors' names, sizes, types
and places, then the data. Quantised tensors are rows of blocks. A block has codes of 32 or 256 neighbouring values, and
the scales that make values of them.
"""

import math
import mmap
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from openinfer.tensor.checkpoint import Checkpoint, check_range
from openinfer.tensor.dtypes import DType, bfloat16, float16, float32
from openinfer.tensor.errors import CheckpointError
from openinfer.tensor.headers import TensorInfo

Array = np.ndarray[Any, Any]

MAX_HEADER_BYTES = 256 << 20
MAX_PAIRS, MAX_TENSORS, MAX_ITEMS = 1 << 16, 1 << 20, 1 << 22
"""Metadata pairs and tensors of a file, and values of an array such as a vocabulary: far above every published file."""
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_DEQUANTIZED_BYTES = 64 << 20  # of values at a time


def _halves(blocks: Array, at: int) -> Array:
    """The float16 numbers at a byte of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(codes: Array) -> Array:
    """Low halves of all bytes, then high halves."""
    return np.concatenate([codes & 15, codes >> 4], axis=1)


def _fifth_bits(blocks: Array, at: int) -> Array:
    bits = np.ascontiguousarray(blocks[:, at : at + 4]).view("<u4")
    return ((bits >> np.arange(32, dtype=np.uint32)) & 1).astype(np.uint8) << 4


def _q4(b: Array, fifth: bool = False, offset: bool = False) -> Array:
    at = 4 if offset else 2
    codes = _nibbles(b[:, at + 4 :]) | _fifth_bits(b, at) if fifth else _nibbles(b[:, at:])
    if offset:
        return _halves(b, 0) * codes + _halves(b, 2)
    return _halves(b, 0) * (codes.astype(np.float32) - (16 if fifth else 8))


def _q8_0(b: Array) -> Array:
    return _halves(b, 0) * b[:, 2:].view(np.int8)


def _scales_of_k(b: Array) -> tuple[Array, Array]:
    """Scale and offset of each of the eight sub-blocks, from 12 bytes of 6-bit numbers: float32 [blocks, 8, 1]."""
    s = b[:, 4:16]
    low, high = s[:, :4], s[:, 4:8]
    scales = np.concatenate([low & 63, (s[:, 8:] & 15) | (low >> 6) << 4], axis=1)
    offsets = np.concatenate([high & 63, s[:, 8:] >> 4 | (high >> 6) << 4], axis=1)
    return (_halves(b, 0) * scales)[..., None], (_halves(b, 2) * offsets)[..., None]


def _q4_k(b: Array, fifth: Array | None = None) -> Array:
    scales, offsets = _scales_of_k(b)
    codes = b[:, -128:].reshape(-1, 4, 1, 32) >> np.array([0, 4], np.uint8)[:, None] & 15
    codes = codes.reshape(-1, 8, 32)
    codes = codes if fifth is None else codes | fifth
    values: Array = scales * codes - offsets
    return values.reshape(len(b), 256)


def _q5_k(b: Array) -> Array:
    bits = b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _q4_k(b, bits << 4)


def _q6_k(b: Array) -> Array:
    # [blocks, half, nibble, 64]
    low = b[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & 15
    high = b[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = low.reshape(-1, 2, 4, 32) | high << 4
    scales = b[:, 192:208].view(np.int8).reshape(-1, 16, 1) * _halves(b, 208)[..., None]
    return ((codes.reshape(-1, 16, 16).astype(np.float32) - 32) * scales).reshape(len(b), 256)


class _Type(NamedTuple):
    """How values are stored: `width` of them in `nbytes`. values: of blocks [n, nbytes] as float32 [n, width]; None for
    numbers of `dtype`. scales: the bytes of a block at which float16 scales lie."""

    name: str
    width: int
    nbytes: int
    dtype: DType
    values: Callable[[Array], Array] | None = None
    scales: tuple[int, ...] = ()


TYPES: Mapping[int, _Type] = {
    0: _Type("F32", 1, 4, float32),
    1: _Type("F16", 1, 2, float16),
    2: _Type("Q4_0", 32, 18, float32, _q4, (0,)),
    3: _Type("Q4_1", 32, 20, float32, partial(_q4, offset=True), (0, 2)),
    6: _Type("Q5_0", 32, 22, float32, partial(_q4, fifth=True), (0,)),
    7: _Type("Q5_1", 32, 24, float32, partial(_q4, fifth=True, offset=True), (0, 2)),
    8: _Type("Q8_0", 32, 34, float32, _q8_0, (0,)),
    12: _Type("Q4_K", 256, 144, float32, _q4_k, (0, 2)),
    13: _Type("Q5_K", 256, 176, float32, _q5_k, (0, 2)),
    14: _Type("Q6_K", 256, 210, float32, _q6_k, (208,)),
    30: _Type("BF16", 1, 2, bfloat16),
}
_REFUSED = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip


class GgufTensor(NamedTuple):
    """A tensor of a file. shape: row-major, the reverse of the file's order. offset: in bytes from the file's start."""

    name: str
    type: _Type
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row along the last axis."""
        return self.shape[-1] // self.type.width * self.type.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape[:-1]) * self.row_bytes


class _Header:
    """The bytes of a header, taken one after the other. Raises CheckpointError for what the file does not have."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self._data, self.at = path, data, 0
        self.end = min(len(data), MAX_HEADER_BYTES)

    def wrong(self, name: str | None, why: str) -> CheckpointError:
        return CheckpointError(self.path, name, why)

    def skip(self, count: int, what: str) -> int:
        """Where the next `count` bytes begin."""
        at = self.at
        if count > self.end - at:
            raise self.wrong(None, f"{what} has {count} bytes at byte {at}; the header may end at {self.end}")
        self.at += count
        return at

    def number(self, code: str, what: str) -> Any:
        return struct.unpack_from(f"<{code}", self._data, self.skip(struct.calcsize(f"<{code}"), what))[0]

    def string(self, what: str) -> str:
        count = self.number("Q", what)
        at = self.skip(count, what)
        try:
            return self._data[at : at + count].decode()
        except UnicodeDecodeError as error:
            raise self.wrong(None, f"{what} is not UTF-8: {error}") from None

    def value(self, kind: int, what: str) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            raise self.wrong(None, f"{what} has the unknown type {kind}")
        inner, count = self.number("I", what), self.number("Q", what)
        if count > MAX_ITEMS:
            raise self.wrong(None, f"{what} has {count} values; at most {MAX_ITEMS} are read")
        if inner == _STRING:
            return [self.string(what) for _ in range(count)]
        if inner not in _NUMBERS:
            raise self.wrong(None, f"{what} is an array of the type {inner}; numbers and strings are read")
        code = _NUMBERS[inner]
        at = self.skip(count * struct.calcsize(f"<{code}"), what)
        return list(struct.unpack_from(f"<{count}{code}", self._data, at))


class GgufFile:
    """The metadata and the tensors of a GGUF file, or of all parts of one that was split. Only headers are read.

    metadata: the pairs of the first part. tensors: by name. Raises CheckpointError, which names the file and the field
    at fault: sizes that the file does not have, names that occur twice, tensors that overlap, types that are not read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        parts = self._parts()
        try:
            for number, part in enumerate(parts):
                metadata = self._read(part)
                self.metadata = self.metadata or metadata
                said = metadata.get("split.no", 0), metadata.get("split.count", 1)
                if said != (number, len(parts)):
                    why = f"part and count are {said}; by the files' names {(number, len(parts))}"
                    raise CheckpointError(part, None, f"split.no: {why}")
        except BaseException:
            self.close()
            raise

    def rows(self, tensor: GgufTensor, rows: slice | Array) -> Array:
        """Rows of a tensor seen as [rows, columns], as values of its type's dtype.

        Raises CheckpointError for scales that are not finite.
        """
        whole = np.frombuffer(self._maps[tensor.file], np.uint8, tensor.nbytes, tensor.offset)
        raw = whole.reshape(-1, tensor.row_bytes)[rows]
        kind = tensor.type
        if kind.values is None:
            return np.ascontiguousarray(raw).view(kind.dtype)
        blocks = np.ascontiguousarray(raw).reshape(-1, kind.nbytes)
        for at in kind.scales:
            if not np.isfinite(_halves(blocks, at)).all():
                raise CheckpointError(tensor.file, tensor.name, "has a scale that is infinite or no number")
        return kind.values(blocks).reshape(len(raw), tensor.shape[-1])

    def close(self) -> None:
        """Forget the files. Arrays already taken stay valid."""
        self._maps.clear()

    def _parts(self) -> list[Path]:
        match = _SPLIT.search(self.path.name)
        if match is None:
            return [self.path]
        stem, parts = self.path.name[: match.start()], range(1, int(match[2]) + 1)
        return [self.path.with_name(f"{stem}-{part:05}-of-{match[2]}.gguf") for part in parts]

    def _read(self, path: Path) -> dict[str, Any]:
        if not path.is_file():  # a FIFO would be waited for
            raise CheckpointError(path, None, "is no regular file" if path.exists() else "is not there")
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < 24:
                raise CheckpointError(path, None, "is too short for a GGUF file")
            data = self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header = _Header(path, data)
        if data[:4] != b"GGUF":
            raise header.wrong(None, f"begins with {data[:4]!r}; a GGUF file begins with b'GGUF'")
        header.skip(4, "the magic")
        version, tensors, pairs = (header.number(code, "the header") for code in "IQQ")
        if version not in (2, 3):
            raise header.wrong(None, f"is GGUF version {version}; 2 and 3 (little-endian) are read")
        if pairs > MAX_PAIRS or tensors > MAX_TENSORS:
            most = f"at most {MAX_PAIRS} and {MAX_TENSORS} are read"
            raise header.wrong(None, f"claims {pairs} pairs and {tensors} tensors; {most}")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = header.string("a key")
            if key in metadata or not key:
                raise header.wrong(None, f"has the key {key!r} twice" if key else "has a key without a name")
            metadata[key] = header.value(header.number("I", key), key)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 16 or alignment % 8:
            raise header.wrong(None, f"general.alignment is {alignment!r}; it must be a multiple of 8")
        found = [self._tensor(header) for _ in range(tensors)]
        start = end = -(-header.at // alignment) * alignment
        before = "the header"
        for one in sorted(found, key=lambda tensor: tensor.offset):
            begin = start + one.offset
            if one.offset % alignment or begin < end:
                why = f"begins at byte {begin}; {before} ends at {end}, and the alignment is {alignment}"
                raise header.wrong(one.name, why)
            end, before = begin + one.nbytes, one.name
            if end > len(data):
                raise header.wrong(one.name, f"ends at byte {end}; the file has {len(data)}")
            self.tensors[one.name] = one._replace(offset=begin)
        return metadata

    def _tensor(self, header: _Header) -> GgufTensor:
        """The offset counts from the end of the header."""
        name = header.string("a tensor's name")
        if name in self.tensors:
            raise header.wrong(name, "is there twice")
        dims = header.number("I", name)
        if not 1 <= dims <= 4:
            raise header.wrong(name, f"has {dims} dimensions; 1 to 4 are read")
        shape = tuple(header.number("Q", name) for _ in range(dims))[::-1]
        kind, offset = header.number("I", name), header.number("Q", name)
        if kind not in TYPES:
            known = ", ".join(one.name for one in TYPES.values())
            raise header.wrong(name, f"is of type {_REFUSED.get(kind, kind)}; these are read: {known}")
        if not all(1 <= size < 1 << 40 for size in shape) or math.prod(shape) >= 1 << 60:
            raise header.wrong(name, f"has shape {list(shape)}, which no file can hold")
        if shape[-1] % TYPES[kind].width:
            raise header.wrong(
                name, f"has {shape[-1]} columns; {TYPES[kind].name} has blocks of {TYPES[kind].width}"
            )
        found = self.tensors[name] = GgufTensor(name, TYPES[kind], shape, header.path, offset)
        return found


class GgufEntry(NamedTuple):
    """A checkpoint's tensor within one of a GGUF file.

    rows: which rows of the file's tensor, seen as [rows, columns], in which order; None: all of them.
    columns: in which order, likewise. shape: of the result; None: as in the file. change: made with the float32 values.
    """

    tensor: str
    rows: Array | None = None
    columns: Array | None = None
    shape: tuple[int, ...] | None = None
    change: Callable[[Array], Array] | None = None


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF file under the names of a published checkpoint. Quantised ones are read as float32: blocks
    become values where they are asked for, so no second file and no copy of the model is made.

    file: is closed with this. entries: what each name is made of. Raises CheckpointError for a tensor that the file
    lacks, and for one of the file that no entry takes and `ignore` does not name.
    """

    _in_files = False

    def __init__(self, file: GgufFile, entries: Mapping[str, GgufEntry], ignore: Sequence[str] = ()) -> None:
        self.directory, self._gguf, self._entries = file.path, file, dict(entries)
        self._files, self._maps, self._tensors = {}, {}, {}
        for name, entry in entries.items():
            tensor = file.tensors.get(entry.tensor)
            if tensor is None:
                raise CheckpointError(file.path, entry.tensor, "is not in this file")
            shape = entry.shape or tensor.shape
            dtype = float32 if entry.change else tensor.type.dtype
            nbytes = math.prod(shape) * dtype.itemsize
            self._tensors[name] = TensorInfo(name, dtype, shape, tensor.file, nbytes, tensor.offset)
        taken = {entry.tensor for entry in entries.values()} | set(ignore)
        if left := [name for name in file.tensors if name not in taken]:
            raise CheckpointError(file.path, left[0], f"is not part of this architecture ({len(left)} such)")

    def read_into(self, name: str, out: Array, start: int = 0) -> None:
        """See Checkpoint. Only the rows that hold these bytes are dequantised."""
        info, entry = self.info(name), self._entries[name]
        check_range(info, start, out.nbytes)
        tensor = self._gguf.tensors[entry.tensor]
        columns = len(entry.columns) if entry.columns is not None else tensor.shape[-1]
        row_bytes = columns * info.dtype.itemsize
        together, done = max(1, _DEQUANTIZED_BYTES // row_bytes), 0
        while done < out.nbytes:
            row, skip = divmod(start + done, row_bytes)
            count = min(together, -(-(skip + out.nbytes - done) // row_bytes))
            wanted = slice(row, row + count) if entry.rows is None else entry.rows[row : row + count]
            values = self._gguf.rows(tensor, wanted)
            if entry.columns is not None:
                values = values[:, entry.columns]
            if entry.change is not None:
                values = entry.change(values.astype(np.float32))
            raw = np.ascontiguousarray(values, info.dtype).reshape(-1).view(np.uint8)[skip:]
            nbytes = min(len(raw), out.nbytes - done)
            out[done : done + nbytes] = raw[:nbytes]
            done += nbytes

    def close(self) -> None:
        self._gguf.close()
