"""GGUF files: every type's values, tensors under other names, and headers that lie."""

from __future__ import annotations

import resource
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from openinfer.tensor import (
    CheckpointError,
    Device,
    GgufCheckpoint,
    GgufEntry,
    GgufFile,
    Stream,
    Tensor,
    TensorLoad,
    load_tensors,
)
from openinfer.tensor.gguf import TYPES
from openinfer.tensor.testing import write_gguf as write

F32, Q4_0, Q8_0, BF16 = 0, 2, 8, 30
BLOCKS = load_file(Path(__file__).parent / "gguf_blocks.safetensors")
ROWS = np.arange(24 * 32, dtype=np.float32).reshape(24, 32)


def f32(array: Any) -> tuple[tuple[int, ...], int, bytes]:
    found = np.ascontiguousarray(array, np.float32)
    return found.shape, F32, found.tobytes()


@pytest.mark.parametrize("number", [number for number, kind in TYPES.items() if kind.name != "F32"])
def test_values_are_those_of_ggml(tmp_path: Path, number: int) -> None:
    kind = TYPES[number]
    raw, values = BLOCKS[f"{kind.name}.bytes"], BLOCKS[f"{kind.name}.values"]
    path = write(tmp_path / "a.gguf", {}, {"w": (values.shape, number, raw.tobytes())})
    with GgufCheckpoint(GgufFile(path), {"w": GgufEntry("w")}) as checkpoint:
        assert np.array_equal(checkpoint.array("w").astype(np.float32), values)
        assert not np.array_equal(checkpoint.array("w")[1].astype(np.float32), values[0])


def test_any_bytes_of_a_tensor_can_be_read(tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(24)
    path = write(tmp_path / "a.gguf", {}, {"w": f32(ROWS)})
    entry = GgufEntry("w", rows=order, columns=np.arange(31, -1, -1), change=lambda x: x - 1)
    with GgufCheckpoint(GgufFile(path), {"w": entry}) as checkpoint:
        whole = ROWS[order][:, ::-1] - 1
        assert np.array_equal(checkpoint.array("w"), whole)
        for start, stop in ((0, 7), (5, 131), (128, 256), (1000, 3072)):
            out = np.zeros(stop - start, np.uint8)
            checkpoint.read_into("w", out, start)
            assert out.tobytes() == np.ascontiguousarray(whole).tobytes()[start:stop]
        with pytest.raises(CheckpointError, match="are not there"):
            checkpoint.read_into("w", np.zeros(8, np.uint8), 3070)


def test_a_part_of_quantised_weights_goes_to_its_place(tmp_path: Path) -> None:
    raw = np.random.default_rng(1).integers(0, 256, (64, 2, 34), np.uint8)
    raw[..., :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    path = write(tmp_path / "a.gguf", {}, {"w": ((64, 64), Q8_0, raw.tobytes())})
    device = Device("cpu")
    place = Tensor.from_numpy(np.zeros((16, 64), np.float32))
    with GgufCheckpoint(GgufFile(path), {"w": GgufEntry("w")}) as checkpoint, Stream(device) as stream:
        load_tensors(checkpoint, [TensorLoad("w", place, (slice(16, 32),))], stream)
        assert np.array_equal(place.numpy(), checkpoint.array("w")[16:32])
    assert np.abs(place.numpy()).max() > 0


def test_a_model_in_parts(tmp_path: Path) -> None:
    for number in range(2):
        split = {"general.name": "x"} if not number else {}
        split |= {"split.count": 2, "split.no": number}
        write(tmp_path / f"m-{number + 1:05}-of-00002.gguf", split, {f"w{number}": f32(ROWS + number)})
    file = GgufFile(tmp_path / "m-00001-of-00002.gguf")
    assert file.metadata["general.name"] == "x"
    with GgufCheckpoint(file, {"a": GgufEntry("w0"), "b": GgufEntry("w1")}) as checkpoint:
        assert np.array_equal(checkpoint.array("b"), ROWS + 1)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"00002\.gguf: is not there"):
        GgufFile(tmp_path / "m-00001-of-00002.gguf")


@pytest.mark.parametrize(
    ("metadata", "tensors", "options", "message"),
    [
        ({}, {}, {"version": 1}, "GGUF version 1"),
        ({}, {}, {"version": 3 << 24}, "version 50331648"),
        ({}, {}, {"counts": (1 << 60, 0)}, "tensors; at most"),
        ({}, {}, {"counts": (0, 1 << 60)}, "pairs and 0 tensors"),
        ({"a": 1}, {}, {"counts": (0, 2)}, "has a key without a name"),
        ({"t": struct.pack("<IIQ", 9, 8, 1 << 40)}, {}, {}, "t has 1099511627776 values"),
        ({"t": struct.pack("<IIQ", 9, 9, 1)}, {}, {}, "t is an array of the type 9"),
        ({"t": struct.pack("<IQ", 8, 1 << 62)}, {}, {}, "t has 4611686018427387904 bytes"),
        ({"t": struct.pack("<I", 77)}, {}, {}, "unknown type 77"),
        ({"t": struct.pack("<IQ", 8, 2) + b"\xff\xff"}, {}, {}, "t is not UTF-8"),
        ({"general.alignment": 0}, {}, {}, "general.alignment is 0"),
        ({}, {"w": ((4, 32), 10, b"")}, {}, "'w': is of type Q2_K; these are read: F32"),
        ({}, {"w": ((4, 32), 99, b"")}, {}, "'w': is of type 99"),
        ({}, {"w": ((4, 31), Q4_0, b"")}, {}, "'w': has 31 columns; Q4_0 has blocks of 32"),
        ({}, {"w": ((4, 0), F32, b"")}, {}, r"'w': has shape \[4, 0\]"),
        ({}, {"w": ((1 << 39, 1 << 39), F32, b"")}, {}, "which no file can hold"),
        ({}, {"w": ((24, 32), F32, b"1234")}, {}, "'w': ends at byte .* the file has"),
        ({}, {"w": f32(ROWS), "v": f32(ROWS)}, {"places": {"v": 32}}, "'v': begins at byte .* w ends at"),
        ({}, {"w": f32(ROWS)}, {"places": {"w": 33}}, "'w': begins at byte"),
        ({}, {"w": f32(ROWS)}, {"places": {"w": 1 << 62}}, "'w': ends at byte"),
    ],
)
def test_a_header_that_lies_is_refused_in_a_line(
    tmp_path: Path, metadata: dict, tensors: dict, options: dict, message: str
) -> None:
    path = write(tmp_path / "a.gguf", metadata, tensors, **options)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=message) as caught:
        GgufFile(path)
    assert "\n" not in str(caught.value)
    assert "a.gguf" in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KB


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"GGUF", "too short"), (b"GGML" + bytes(40), "begins with b'GGML'"), (b"\0" * 4096, "begins with")],
)
def test_what_is_no_gguf_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        GgufFile(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match="is no regular file"):
        GgufFile(tmp_path)


def test_names_that_are_there_twice_are_refused(tmp_path: Path) -> None:
    pair = struct.pack("<Q", 1) + b"k" + struct.pack("<II", 4, 1)
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + pair + pair)
    with pytest.raises(CheckpointError, match="the key 'k' twice"):
        GgufFile(tmp_path / "a.gguf")


@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_a_scale_that_is_no_number_is_refused(tmp_path: Path, scale: float) -> None:
    raw = bytearray(24 * 18)
    raw[36:38] = np.float16(scale).tobytes()
    path = write(tmp_path / "a.gguf", {}, {"w": ((24, 32), Q4_0, bytes(raw))})
    checkpoint = GgufCheckpoint(GgufFile(path), {"w": GgufEntry("w")})
    with checkpoint, pytest.raises(CheckpointError, match="'w': has a scale that is infinite or no number"):
        checkpoint.array("w")


def test_tensors_that_nobody_takes_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", {}, {"w": f32(ROWS), "other": ((4, 4), BF16, bytes(32))})
    with pytest.raises(CheckpointError, match="'other': is not part of this architecture"):
        GgufCheckpoint(GgufFile(path), {"w": GgufEntry("w")})
    with pytest.raises(CheckpointError, match="'v': is not in this file"):
        GgufCheckpoint(GgufFile(path), {"w": GgufEntry("v")})
    GgufCheckpoint(GgufFile(path), {"w": GgufEntry("w")}, ["other"]).close()
