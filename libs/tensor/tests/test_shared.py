"""Weights in the memory of another process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer.tensor import (
    Arena,
    Checkpoint,
    CheckpointError,
    Device,
    SharedCheckpoint,
    SharedWeights,
    Stream,
    Tensor,
    TensorInfo,
    TensorLoad,
    bfloat16,
    dtypes,
    float32,
    load_tensors,
)
from openinfer.tensor.handover import Giver, sealed_file

CPU, CUDA = Device("cpu"), Device("cuda")
SHAPES: dict[str, Any] = {"table": ((40, 33), bfloat16), "norm": ((17,), float32), "bias": ((3,), "bfloat16")}
GIVER = """
import sys
import numpy as np
from openinfer.tensor import Device, SharedWeights, Stream
shapes = {"table": ((40, 33), "bfloat16"), "norm": ((17,), "float32"), "bias": ((3,), "bfloat16")}
device = Device.parse(sys.argv[2])
with SharedWeights(sys.argv[1], shapes, device) as shared, Stream(device) as stream:
    for name, (shape, dtype) in shapes.items():
        values = np.random.default_rng(len(name)).normal(size=shape).astype(shared[name].dtype)
        shared[name].copy_from(values, stream)
        stream.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
"""


def values(name: str) -> np.ndarray[Any, Any]:
    shape, dtype = SHAPES[name]
    return np.random.default_rng(len(name)).normal(size=shape).astype(dtypes.of(dtype))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "weights.sock"


def given_by_another_process(path: Path, device: Device) -> None:
    giver = subprocess.Popen(
        [sys.executable, "-c", GIVER, str(path), str(device)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert giver.stdout is not None
    assert giver.stdout.readline() == "ready\n"
    with Stream(device) as stream, Arena(device, 1 << 16) as arena, SharedCheckpoint(path, device) as shared:
        shared.require({name: (shape, [dtype]) for name, (shape, dtype) in SHAPES.items()})
        assert (shared.address("norm") is None) == (device.kind == "cpu")
        for name in SHAPES:
            assert (shared.array(name) == values(name)).all()
        columns = arena.alloc((40, 5), bfloat16)
        wide = arena.alloc((17,), bfloat16)  # another dtype
        loads = [TensorLoad(name, arena.alloc(shape, dtype)) for name, (shape, dtype) in SHAPES.items()]
        part = TensorLoad("table", columns, (slice(None), slice(7, 12)))
        report = load_tensors(shared, [*loads, part, TensorLoad("norm", wide)], stream)
        assert {one.ptr for one in report.filled} >= {load.dst.ptr for load in loads}
        giver.communicate("\n")  # the tensors have what they need
        assert giver.returncode == 0
        for load in loads:
            assert (load.dst.numpy() == values(load.name)).all()
        assert (columns.numpy() == values("table")[:, 7:12]).all()
        assert (wide.numpy() == values("norm").astype(bfloat16)).all()
    assert not path.exists()


def test_a_cpu_takes_what_another_process_has(path: Path) -> None:
    given_by_another_process(path, CPU)


@pytest.mark.gpu
def test_a_gpu_takes_what_another_process_has(path: Path, gpu: Device) -> None:
    given_by_another_process(path, gpu)


def test_several_take_and_values_may_change_between(path: Path) -> None:
    with SharedWeights(path, SHAPES) as shared:
        for turn in (1.0, 2.0):
            shared["norm"].numpy()[:] = turn
            for _ in range(2):
                with SharedCheckpoint(path, CPU) as taken:
                    assert (taken.array("norm") == turn).all()
        assert path.stat().st_mode & 0o777 == 0o600
        kept = shared["bias"]
    kept.numpy()[:] = 1  # memory outlives the socket
    assert not [one for one in threading.enumerate() if one.name == "shared weights"]


def test_a_socket_in_use_is_refused(path: Path) -> None:
    with SharedWeights(path, SHAPES), pytest.raises(OSError, match="in use"):
        SharedWeights(path, SHAPES)


def test_no_giver_and_a_silent_one_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="No such file"):
        SharedCheckpoint(path, CPU)
    monkeypatch.setattr("openinfer.tensor.shared.CONNECT_S", 0.05)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        with pytest.raises(TimeoutError):
            SharedCheckpoint(path, CPU)


@pytest.mark.attack
@pytest.mark.parametrize(
    ("size", "files", "words"),
    [
        (b"\0" * 8, 1, "claims a header"),
        (b"@" + b"\0" * 7, 2, "in a GPU's memory, and the engine is on cpu"),
        (b"@" + b"\0" * 7, 1, "gave no weights"),
        (b"\0" * 3, 1, "gave no weights"),
        (b"\0" * 8, 0, "gave no memory"),
    ],
)
def test_nonsense_is_refused(path: Path, size: bytes, files: int, words: str) -> None:
    file = sealed_file("no checkpoint", 8)
    os.pwrite(file, b"12345678", 0)
    giver = Giver(str(path), lambda asking: socket.send_fds(asking, [size], [file] * files), "nonsense")
    with pytest.raises((CheckpointError, OSError), match=words):
        SharedCheckpoint(path, CPU)
    giver.close()
    os.close(file)


@pytest.mark.attack
def test_weights_that_could_become_shorter_are_refused(path: Path) -> None:
    file = os.memfd_create("weights", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 1 << 20)
    giver = Giver(str(path), lambda asking: socket.send_fds(asking, [b"\0" * 8], [file]), "weights")
    with pytest.raises(PermissionError, match="F_SEAL_SHRINK"):
        SharedCheckpoint(path, CPU)
    giver.close()
    os.close(file)


def test_parts_in_device_memory_are_copied_there(fake: Any, tmp_path: Path) -> None:
    """Without a byte through the host."""
    with Stream(CUDA) as stream:
        whole = Tensor.empty((8, 6), float32, CUDA)
        values = np.arange(48, dtype=np.float32).reshape(8, 6)
        whole.copy_from(values, stream)
        stream.synchronize()

        class There(Checkpoint):
            def _open(self) -> None:
                self._tensors = {"w": TensorInfo("w", float32, (8, 6), tmp_path, whole.nbytes, 0)}

            def address(self, name: str) -> int:
                return whole.ptr

        places = [Tensor.empty(shape, float32, CUDA) for shape in ((8, 6), (3, 6), (8, 2))]
        parts = ((), (slice(2, 5),), (slice(None), slice(1, 3)))
        before, seen = fake.count("cuMemcpyHtoDAsync"), []
        loads = [TensorLoad("w", place, part) for place, part in zip(places, parts, strict=True)]
        load_tensors(There(tmp_path), loads, stream, lambda *progress: seen.append(progress))
        assert fake.count("cuMemcpyHtoDAsync") == before
        for place, part in zip(places, parts, strict=True):
            assert (place.numpy() == values[part]).all()
        assert seen[-1][0] == seen[-1][1] > 0
