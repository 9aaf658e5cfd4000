"""Checkpoint: a directory of safetensors files, opened with suspicion.

Everything that headers and the index claim is checked when the checkpoint is opened, before all else.
"""

import hashlib
import json
import mmap
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from openinfer.tensor import dtypes
from openinfer.tensor.device import Closing
from openinfer.tensor.dtypes import DType
from openinfer.tensor.errors import CheckpointError, ClosedError
from openinfer.tensor.headers import MAX_HEADER_BYTES, TensorInfo, read_header
from openinfer.tensor.parts import TensorPart

Expected = Mapping[str, tuple[tuple[int, ...], Collection[DType | type | str]]]
"""By name, a tensor's shape and the dtypes that it may have."""
_DIGEST_BYTES = 4 << 20
_OTHER_FORMATS = (".bin", ".gguf", ".pt", ".pth")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Checkpoint(Closing):
    """A directory with `model.safetensors`, or with `model.safetensors.index.json` and the shards it names. `single`:
    another name of the one file, as of an adapter's; there is no index then.

    Opening reads and checks every header: sizes, JSON, dtypes, shapes against bytes, data that overlaps or
    has holes, an index that names what a shard does not have. The index decides: tensors that it gives to another
    shard, or to none, are left out. Data is read only when asked for.
    Raises CheckpointError naming the file and the tensor. Threads may share a Checkpoint.
    """

    _in_files = True
    """Whether the values are in files that can be mapped; else `read_into` alone has them."""

    def __init__(self, directory: str | os.PathLike[str], single: str = _SINGLE) -> None:
        self.directory = Path(directory)
        self._single = single
        self._files: dict[Path, BinaryIO] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        self._tensors: dict[str, TensorInfo] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> list[str]:
        """Tensor names, file by file and in the order of their data."""
        return list(self._tensors)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, without headers."""
        return sum(info.nbytes for info in self._tensors.values())

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """A tensor's entry in the header. Raises CheckpointError for a name that is not there."""
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(self.directory, name, "is not in this checkpoint") from None

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """A read-only view of the mapped file: nothing is copied, pages are read on first touch.

        It stays valid after `close()`. Should someone truncate the file meanwhile, touching it kills the
        process with SIGBUS; `read_into` fails politely. A new array where no file has the values.
        """
        if not self._in_files:
            return self.part(name, ())
        info = self.info(name)
        mapped = self._maps.get(info.file)
        if mapped is None:
            # Two threads may both get here; each mapping is right, and the one not kept goes with its array.
            mapped = self._maps[info.file] = mmap.mmap(self._file(info).fileno(), 0, access=mmap.ACCESS_READ)
        raw = np.frombuffer(mapped, np.uint8, info.nbytes, info.offset)
        return raw.view(info.dtype).reshape(info.shape)

    def part(self, name: str, source: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        """The part `tensor[source]` of what `array` gives, without the rest. Slices are for the leading axes."""
        if self._in_files:
            return self.array(name)[source]
        part = TensorPart.of(self.info(name), source)
        raw = np.empty(part.nbytes, np.uint8)
        part.read_into(self, raw, 0)
        return raw.view(part.info.dtype).reshape(part.shape)

    def read_into(self, name: str, out: np.ndarray[Any, Any], start: int = 0) -> None:
        """Fill `out` (contiguous uint8) with the tensor's bytes from `start` on, by positional reads.

        Releases the GIL; threads may read different parts at once. Raises CheckpointError for a range
        outside the tensor or a file that ends early.
        """
        info = self.info(name)
        check_range(info, start, out.nbytes)
        fd, view, done = self._file(info).fileno(), out.data.cast("B"), 0
        while done < out.nbytes:
            got = os.preadv(fd, [view[done:]], info.offset + start + done)
            if not got:
                raise CheckpointError(info.file, name, "the file ended early; it was cut while open")
            done += got

    def digest(self) -> bytes:
        """SHA-256 of the names, dtypes, shapes and all bytes of the tensors, however they are divided among files.

        A thread on each of up to 16 cores reads and digests about 1 GB/s. Raises CheckpointError as `read_into` does.
        """
        pieces = [
            (info, start)
            for info in sorted(self._tensors.values(), key=lambda info: (str(info.file), info.offset))
            for start in range(0, info.nbytes, _DIGEST_BYTES)
        ]
        threads = min(16, os.cpu_count() or 1)

        def work(first: int) -> list[bytes]:
            found, buffer = [], np.empty(_DIGEST_BYTES, np.uint8)
            for info, start in pieces[first::threads]:  # side by side: a disk likes to be read in order
                room = buffer[: min(_DIGEST_BYTES, info.nbytes - start)]
                self.read_into(info.name, room, start)
                found.append(hashlib.sha256(room.data).digest())
            return found

        by_tensor: dict[str, list[bytes]] = {name: [] for name in sorted(self._tensors)}
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(work, range(threads)))
        for index, (info, _) in enumerate(pieces):
            by_tensor[info.name].append(found[index % threads][index // threads])
        whole = hashlib.sha256()
        for name, parts in by_tensor.items():
            info = self._tensors[name]
            whole.update(json.dumps([name, info.dtype.name, info.shape, len(parts)]).encode())
            whole.update(b"".join(parts))
        return whole.digest()

    def address(self, name: str) -> int | None:
        """The address of the tensor's data on the device, where they are there already; None: in a file."""
        return None

    def require(
        self, expected: Expected, optional: Collection[str] = (), ignore: Collection[str] = ()
    ) -> None:
        """Raise one CheckpointError that lists what is missing, of the wrong shape or dtype, or unexpected.

        `expected` maps a name to its shape and the dtypes it may have. `optional` names expected tensors
        that may be missing, `ignore` others that may be present; entries are exact names, prefixes ending in
        "*", or endings that begin with "*". A tensor of one value may be [] where it should be [1].
        """
        may_miss, may_be_there = _matcher(optional), _matcher(ignore)
        missing = [n for n in expected if n not in self._tensors and not may_miss(n)]
        shapes, types = [], []
        for name, (shape, allowed) in expected.items():
            info = self._tensors.get(name)
            if info is None:
                continue
            if (info.shape or (1,)) != tuple(shape or (1,)):
                shapes.append(f"{name} in {info.file.name} is {list(info.shape)}, must be {list(shape)}")
            if info.dtype not in (known := {dtypes.of(d) for d in allowed}):
                names = " or ".join(sorted(d.name for d in known))
                types.append(f"{name} in {info.file.name} is {info.dtype.name}, must be {names}")
        extra = [n for n in self._tensors if n not in expected and not may_be_there(n)]
        found = (("missing", missing), ("wrong shape", shapes), ("wrong dtype", types), ("unexpected", extra))
        if problems := [f"{kind}: {_first(items)}" for kind, items in found if items]:
            raise CheckpointError(self.directory, None, "; ".join(problems))

    def close(self) -> None:
        """Close the files. Arrays already taken stay valid. Calling it again does nothing."""
        for file in self._files.values():
            file.close()
        self._maps.clear()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.directory)!r}, {len(self)} tensors, {self.total_bytes} bytes)"

    def _file(self, info: TensorInfo) -> BinaryIO:
        file = self._files[info.file]
        if file.closed:
            raise ClosedError(f"this checkpoint of {self.directory} is closed; open it again")
        return file

    def _open(self) -> None:
        single, index = self.directory / self._single, self.directory / _INDEX
        if single.is_file():
            self._tensors = {one.name: one for one in self._add(single)}
        elif self._single != _SINGLE:
            raise CheckpointError(self.directory, None, f"has no {self._single}")
        elif index.is_file():
            weight_map = _read_index(index)
            for shard in sorted(set(weight_map.values())):
                found = self._add(self.directory / shard)
                self._tensors |= {one.name: one for one in found if weight_map.get(one.name) == shard}
            for name, shard in weight_map.items():
                if name not in self._tensors:
                    raise CheckpointError(index, name, f"is said to be in {shard}, which does not have it")
        else:
            raise CheckpointError(self.directory, None, self._why_not())

    def _why_not(self) -> str:
        if not self.directory.is_dir():
            kind = "is a file; give its folder" if self.directory.exists() else "is not there"
            return f"{kind}. A checkpoint is a folder with {_SINGLE} or {_INDEX}"
        others = sorted(one.name for one in self.directory.iterdir() if one.suffix in _OTHER_FORMATS)
        if others:
            return f"has {_first(others)}, and only safetensors are read: get or make the checkpoint as safetensors"
        return f"has neither {_SINGLE} nor {_INDEX}"

    def _add(self, path: Path) -> list[TensorInfo]:
        if path.exists() and not path.is_file():  # a FIFO would be waited for
            raise CheckpointError(path, None, "is no regular file")
        try:
            file = open(path, "rb")  # noqa: SIM115 (kept open, close() closes it)
        except OSError as e:
            raise CheckpointError(path, None, f"cannot be opened: {e.strerror}") from e
        self._files[path] = file
        return read_header(path, file)


def check_range(info: TensorInfo, start: int, nbytes: int) -> None:
    """Raise CheckpointError unless a tensor has these bytes."""
    if start < 0 or start + nbytes > info.nbytes:
        what = f"bytes {start} to {start + nbytes} are not there; it has {info.nbytes}"
        raise CheckpointError(info.file, info.name, what)


def _read_index(path: Path) -> dict[str, str]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
            raise CheckpointError(path, twice, "is named twice in one JSON object")
        return out

    if path.stat().st_size > MAX_HEADER_BYTES:
        raise CheckpointError(path, None, f"is larger than {MAX_HEADER_BYTES} bytes")
    try:
        parsed = json.loads(path.read_bytes().decode(), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as e:  # ValueError: bad UTF-8 and bad JSON both
        raise CheckpointError(path, None, f"is not valid JSON: {e}") from e
    if not isinstance(parsed, dict):
        raise CheckpointError(path, None, "JSON must be an object")
    weight_map = parsed.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(path, None, "weight_map must be an object that names tensors")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                path, name, f"shard {shard!r} must be a *.safetensors file in this directory"
            )
    return weight_map


def _matcher(patterns: Collection[str]) -> Callable[[str], bool]:
    exact = frozenset(patterns)
    prefixes = tuple(p[:-1] for p in patterns if p.endswith("*"))
    endings = tuple(p[1:] for p in patterns if p.startswith("*"))
    return lambda name: name in exact or name.startswith(prefixes) or name.endswith(endings)


def _first(items: list[str], limit: int = 4) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
