import gc
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer.tensor import (
    Arena,
    Checkpoint,
    CheckpointError,
    CudaError,
    Device,
    DeviceError,
    LoadReport,
    Places,
    ShapeError,
    Stream,
    Tensor,
    TensorLoad,
    bfloat16,
    dtypes,
    load_tensors,
    loading,
)

CPU, NULL, CUDA = Device("cpu"), Device("null"), Device("cuda")


@pytest.fixture
def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    sizes = {"norm": (17,), "q": (40, 33), "k": (10, 33), "empty": (0, 3), "embed": (300, 41), "tail": (3,)}
    return {name: rng.standard_normal(shape).astype(bfloat16) for name, shape in sizes.items()}


def _write(folder: Path, arrays: dict[str, Any]) -> None:
    header, at = {}, 0
    for name, array in arrays.items():
        offsets = [at, at + array.nbytes]
        header[name] = {"dtype": dtypes.tag(array.dtype), "shape": list(array.shape), "data_offsets": offsets}
        at += array.nbytes
    raw = json.dumps(header).encode()
    data = b"".join(a.tobytes() for a in arrays.values())
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data)


@pytest.fixture
def ckpt(tmp_path: Path, arrays: dict[str, Any]) -> Any:
    _write(tmp_path, arrays)
    with Checkpoint(tmp_path) as opened:
        yield opened


def _places(arrays: dict[str, Any], device: Device, dtype: Any = bfloat16) -> list[TensorLoad]:
    """Every tensor has a place, q and k two halves of one; given in an order that is not the file's."""
    with Arena(device, 1 << 20) as arena:
        qk = arena.alloc((50, 33), dtype, "qk")
        loads = [TensorLoad("q", qk[:40]), TensorLoad("k", qk[40:])]
        return loads[::-1] + [
            TensorLoad(n, arena.alloc(a.shape, dtype)) for n, a in arrays.items() if n not in ("q", "k")
        ]


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize(("buffer", "piece"), [(4096, 512), (1000, 999), (64, 64), (1 << 20, 1 << 16)])
def test_every_byte_arrives(
    fake: Any, monkeypatch: Any, ckpt: Any, arrays: Any, device: Device, buffer: int, piece: int
) -> None:
    """The fake uploads as late as it may, so a buffer refilled too early would show."""
    monkeypatch.setattr(loading, "BUFFER_BYTES", buffer)
    monkeypatch.setattr(loading, "_PIECE_BYTES", piece)
    loads, seen = _places(arrays, device), []
    with Stream(device) as stream:
        report = load_tensors(ckpt, loads, stream, lambda done, total: seen.append((done, total)))
        for load in loads:
            assert (load.dst.numpy() == arrays[load.name]).all(), load.name
    assert report.bytes == ckpt.total_bytes
    assert report.gbytes_per_s == pytest.approx(report.bytes / report.seconds / 1e9)
    assert seen == sorted(seen)
    assert seen[-1] == (ckpt.total_bytes, ckpt.total_bytes)
    del loads, load, report
    assert fake.live() == (0, 0, 0, 0)


def test_cpu_converts_between_floats(ckpt: Any, arrays: Any) -> None:
    loads = _places(arrays, CPU, dtypes.float32)
    load_tensors(ckpt, loads, Stream(CPU))
    for load in loads:
        assert (load.dst.numpy() == arrays[load.name].astype(np.float32)).all()


def test_null_checks_and_moves_nothing(ckpt: Any, arrays: Any) -> None:
    loads = _places(arrays, NULL)
    assert load_tensors(ckpt, loads, Stream(NULL)) == LoadReport(0, 0.0, 0.0)
    with pytest.raises(CheckpointError, match="has shape"):
        load_tensors(ckpt, [TensorLoad("norm", loads[0].dst)], Stream(NULL))


def test_no_loads(fake: Any, ckpt: Any) -> None:
    for device in (CPU, CUDA):
        with Stream(device) as stream:
            assert load_tensors(ckpt, [], stream).bytes == 0


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_all_loads_are_checked_before_a_byte_moves(fake: Any, ckpt: Any, arrays: Any, device: Device) -> None:
    good = TensorLoad("norm", Tensor.empty((17,), bfloat16, device))
    good.dst.zero_()
    wide = Tensor.empty((40, 66), bfloat16, device)
    other = CPU if device == CUDA else NULL
    bad: list[tuple[TensorLoad, type[Exception], str]] = [
        (TensorLoad("zz", good.dst), CheckpointError, "'zz': is not in"),
        (TensorLoad("tail", good.dst), CheckpointError, r"'tail': has shape \[3\], its place \[17\]"),
        (
            TensorLoad("tail", Tensor.empty((3,), "int16", device)),
            CheckpointError,
            "has dtype bfloat16, its place int16",
        ),
        (TensorLoad("q", wide[:, :33]), ShapeError, "contiguous"),
        (TensorLoad("tail", Tensor.empty((3,), bfloat16, other)), DeviceError, f"goes to {other}"),
    ]
    with Stream(device) as stream:
        for load, error, why in bad:
            with pytest.raises(error, match=why):
                load_tensors(ckpt, [good, load], stream)
    assert not good.dst.numpy().any()


@pytest.mark.parametrize(("buffer", "piece"), [(4096, 512), (1000, 999), (64, 64), (1 << 20, 1 << 16)])
@pytest.mark.parametrize("to", dtypes.WEIGHTS)
def test_cuda_converts_between_the_dtypes_of_weights(
    fake: Any, monkeypatch: Any, tmp_path: Any, buffer: int, piece: int, to: Any
) -> None:
    """Odd bytes before a tensor must not split one of its values between two pieces."""
    monkeypatch.setattr(loading, "BUFFER_BYTES", buffer)
    monkeypatch.setattr(loading, "_PIECE_BYTES", piece)
    rng = np.random.default_rng(2)
    arrays = {f"of {d}": rng.standard_normal((37, 11)).astype(d) for d in dtypes.WEIGHTS}
    arrays["odd"] = rng.integers(0, 255, 13).astype(np.uint8)
    _write(tmp_path, arrays)
    places = {n: Tensor.empty(a.shape, a.dtype if n == "odd" else to, CUDA) for n, a in arrays.items()}
    seen = []
    with Checkpoint(tmp_path) as ckpt, Stream(CUDA) as stream:
        loads = [TensorLoad(name, place) for name, place in places.items()]
        report = load_tensors(ckpt, loads, stream, lambda done, total: seen.append((done, total)))
        part = Tensor.empty((5, 3), to, CUDA)
        load_tensors(ckpt, [TensorLoad("of float32", part, (slice(3, 8), slice(2, 5)))], stream)
        assert seen[-1] == (ckpt.total_bytes, ckpt.total_bytes)
        assert report.bytes == ckpt.total_bytes
    for name, place in places.items():
        assert (place.numpy() == arrays[name].astype(place.dtype)).all(), name
    assert (part.numpy() == arrays["of float32"][3:8, 2:5].astype(to)).all()


def test_cuda_converts_no_packed_weights(fake: Any, ckpt: Any) -> None:
    with (
        Stream(CUDA) as stream,
        pytest.raises(CheckpointError, match="has dtype bfloat16, its place float8_e4m3fn"),
    ):
        load_tensors(ckpt, [TensorLoad("tail", Tensor.empty((3,), "float8_e4m3fn", CUDA))], stream)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_file_cut_while_loading_is_an_error(fake: Any, ckpt: Any, arrays: Any, device: Device) -> None:
    os.truncate(ckpt.info("q").file, ckpt.info("embed").offset + 5)
    loads = _places(arrays, device)
    with Stream(device) as stream, pytest.raises(CheckpointError, match="ended early"):
        load_tensors(ckpt, loads, stream)
    del loads
    gc.collect()  # a failed future and its traceback refer to each other
    assert fake.live() == (0, 0, 0, 0)


def test_a_failing_device_is_an_error_and_leaks_nothing(fake: Any, ckpt: Any, arrays: Any) -> None:
    loads = _places(arrays, CUDA)
    stream = Stream(CUDA)
    fake.fail["cuMemcpyHtoDAsync"] = fake.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(CudaError, match="cuMemcpyHtoDAsync"):
        load_tensors(ckpt, loads, stream)
    stream.close()
    del loads
    assert fake.live() == (0, 0, 0, 0)


@pytest.mark.gpu
def test_real_load(gpu: Device, monkeypatch: Any, ckpt: Any, arrays: Any) -> None:
    monkeypatch.setattr(loading, "BUFFER_BYTES", 4096)
    monkeypatch.setattr(loading, "_PIECE_BYTES", 1024)
    loads = _places(arrays, gpu)
    with Stream(gpu) as stream:
        load_tensors(ckpt, loads, stream)
        for load in loads:
            assert (load.dst.numpy() == arrays[load.name]).all(), load.name


def test_progress_counts_what_is_converted(ckpt, arrays):
    places = Places(Arena(CPU, 1 << 20), np.dtype(bfloat16))
    places.plain("embed", 300, 41)
    top = places.converted("q", 8, 33, convert=lambda q: -q, source=(slice(8),))
    seen = []
    places.load(ckpt, Stream(CPU), lambda *progress: seen.append(progress))
    total = arrays["embed"].nbytes + 8 * 33 * 2
    assert {whole for _, whole in seen} == {total}
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert [done for done, _ in seen][-2:] == [arrays["embed"].nbytes, total]
    np.testing.assert_array_equal(top.numpy(), -arrays["q"][:8])
