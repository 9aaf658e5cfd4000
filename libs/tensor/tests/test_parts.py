"""Loads of parts of tensors: the right bytes arrive, no others are read, and wrong slices are refused."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openinfer.tensor import (
    Checkpoint,
    CheckpointError,
    Device,
    Stream,
    Tensor,
    TensorLoad,
    load_tensors,
    loading,
    parts,
)

CPU, CUDA = Device("cpu"), Device("cuda")


def write(folder: Path, **arrays: np.ndarray[Any, Any]) -> Path:
    header, at = {}, 0
    tags = {"float32": "F32", "int16": "I16", "uint8": "U8"}
    for name, array in arrays.items():
        offsets = [at, at + array.nbytes]
        header[name] = {"dtype": tags[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
        at += array.nbytes
    raw = json.dumps(header).encode()
    data = b"".join(array.tobytes() for array in arrays.values())
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return folder


@pytest.fixture
def read_ranges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The (start, bytes) of every read of a tensor."""
    ranges: list[tuple[int, int]] = []
    read_into = Checkpoint.read_into

    def recorded(self: Checkpoint, name: str, out: Any, start: int = 0) -> None:
        ranges.append((start, out.nbytes))
        read_into(self, name, out, start)

    monkeypatch.setattr(Checkpoint, "read_into", recorded)
    return ranges


CASES = [
    ((), (6, 4, 10)),
    ((slice(2, 5),), (3, 4, 10)),
    ((slice(None), slice(1, 3)), (6, 2, 10)),
    ((slice(None), slice(None), slice(3, 10)), (6, 4, 7)),
    ((slice(5, 6), slice(0, 2), slice(9, 10)), (1, 2, 1)),
    ((slice(2, 2),), (0, 4, 10)),
    ((slice(None, 4), slice(2, None)), (4, 2, 10)),
]


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize(("source", "shape"), CASES)
@pytest.mark.parametrize("piece", [7, 64, 1 << 20])
def test_a_part_arrives(
    fake: Any, monkeypatch: Any, tmp_path: Path, device: Device, source: Any, shape: Any, piece: int
) -> None:
    monkeypatch.setattr(loading, "_PIECE_BYTES", piece)
    monkeypatch.setattr(parts, "_GAP_BYTES", 16)
    whole = np.arange(240, dtype=np.int16).reshape(6, 4, 10)
    with Checkpoint(write(tmp_path, pad=np.zeros(3, np.int16), x=whole)) as ckpt, Stream(device) as stream:
        dst = Tensor.empty(shape, "int16", device)
        report = load_tensors(ckpt, [TensorLoad("x", dst, source)], stream)
        assert report.bytes == dst.nbytes
        np.testing.assert_array_equal(dst.numpy(), whole[source])


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_part_is_what_numpy_takes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    source = []
    for size in shape[: data.draw(st.integers(0, len(shape)))]:
        start = data.draw(st.integers(0, size))
        source.append(slice(start, data.draw(st.integers(start, size))))
    whole = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    with Checkpoint(write(tmp_path_factory.mktemp("any"), x=whole)) as ckpt:
        part = parts.TensorPart.of(ckpt.info("x"), tuple(source))
        out = np.empty(part.nbytes, np.uint8)
        first = data.draw(st.integers(0, part.nbytes))
        part.read_into(ckpt, out[:first], 0)
        part.read_into(ckpt, out[first:], first)
    want = whole[tuple(source)]
    assert part.shape == want.shape
    np.testing.assert_array_equal(out, want.reshape(-1))


def test_rows_are_read_alone(tmp_path: Path, read_ranges: list[tuple[int, int]]) -> None:
    whole = np.zeros((64, 100), np.uint8)
    with Checkpoint(write(tmp_path, x=whole)) as ckpt:
        load_tensors(
            ckpt, [TensorLoad("x", Tensor.empty((16, 100), "uint8", CPU), (slice(16, 32),))], Stream(CPU)
        )
    assert read_ranges == [(1600, 1600)]


@pytest.mark.parametrize(("width", "reads"), [(1 << 17, 3), (1 << 10, 1)])
def test_columns_are_read_one_by_one_where_they_lie_far_apart(
    tmp_path: Path, read_ranges: list[tuple[int, int]], width: int, reads: int
) -> None:
    whole = np.arange(3 * width, dtype=np.float32).reshape(3, width)
    dst, half = Tensor.empty((3, width // 2), "float32", CPU), slice(width // 2, width)
    with Checkpoint(write(tmp_path, x=whole)) as ckpt:
        load_tensors(ckpt, [TensorLoad("x", dst, (slice(None), half))], Stream(CPU))
    np.testing.assert_array_equal(dst.numpy(), whole[:, half])
    assert len(read_ranges) == reads
    if reads == 3:
        assert sum(nbytes for _, nbytes in read_ranges) == dst.nbytes


def test_a_part_is_converted_between_floats_on_a_cpu(tmp_path: Path) -> None:
    whole = np.arange(12, dtype=np.float32).reshape(3, 4)
    dst = Tensor.empty((3, 2), "bfloat16", CPU)
    with Checkpoint(write(tmp_path, x=whole)) as ckpt:
        load_tensors(ckpt, [TensorLoad("x", dst, (slice(None), slice(2, 4)))], Stream(CPU))
    np.testing.assert_array_equal(dst.numpy().astype(np.float32), whole[:, 2:])


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ((slice(0, 4),), r"axis 0 cannot give 0:4:None. Take 0 <= start <= stop <= 3 and a step of 1"),
        ((slice(-2, None),), r"axis 0 cannot give -2:None:None"),
        ((slice(2, 1),), r"axis 0 cannot give 2:1:None"),
        ((slice(None), slice(0, 4, 2)), r"axis 1 cannot give 0:4:2"),
        ((slice(None),) * 3, r"has shape \[3, 4\]; 3 slices were given"),
        ((slice(0, 2),), r"has shape \[3, 4\], its part \[2, 4\], its place \[3, 4\]"),
    ],
)
def test_wrong_slices_are_refused_before_a_byte_moves(tmp_path: Path, source: Any, why: str) -> None:
    with Checkpoint(write(tmp_path, x=np.ones((3, 4), np.float32))) as ckpt:
        dst = Tensor.empty((3, 4), "float32", CPU)
        dst.zero_()
        with pytest.raises(CheckpointError, match=why):
            load_tensors(ckpt, [TensorLoad("x", dst), TensorLoad("x", dst, source)], Stream(CPU))
        assert not dst.numpy().any()
