import ctypes
import gc
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest

from openinfer.tensor import (
    Device,
    DeviceError,
    DTypeError,
    ShapeError,
    Tensor,
    TensorError,
    bfloat16,
    dlpack,
    float8_e5m2,
)

CPU, CUDA = Device("cpu"), Device("cuda")


class _Producer:
    """Speaks the protocol of a device array that numpy does not know."""

    def __init__(self, tensor: Tensor, **forced: Any) -> None:
        self.tensor, self.forced = tensor, forced

    def __dlpack__(self, **request: Any) -> Any:
        return self.tensor.__dlpack__(**(request | self.forced))


def test_numpy_reads_our_memory() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensor = Tensor.from_numpy(array)
    theirs = np.from_dlpack(tensor[1:, 1:3])
    assert theirs.tolist() == [[5, 6], [9, 10]]
    tensor.zero_()
    assert not theirs.any()


@pytest.mark.parametrize(
    "kind", ["int8", "int16", "int32", "int64", "uint8", "uint64", "float16", "float64", "bool"]
)
def test_dtypes_go_both_ways_through_numpy(kind: str) -> None:
    array = np.array([0, 1, 1, 0]).astype(kind)
    tensor = Tensor.from_dlpack(array)
    assert tensor.dtype == array.dtype
    assert np.from_dlpack(tensor).dtype == array.dtype
    assert np.from_dlpack(tensor).tolist() == array.tolist()


def test_we_read_numpys_strided_memory() -> None:
    array = np.arange(24).reshape(2, 3, 4)
    tensor = Tensor.from_dlpack(array[:, 1:, ::2])
    assert tensor.strides == (12, 4, 2)
    assert (tensor.numpy() == array[:, 1:, ::2]).all()
    array[0, 1, 0] = -1
    assert tensor.numpy()[0, 0, 0] == -1
    assert Tensor.from_dlpack(np.zeros((0, 3))).shape == (0, 3)
    assert Tensor.from_dlpack(np.array(5)).numpy() == 5


@pytest.mark.parametrize("max_version", [None, (0, 8), (1, 0), (2, 3)])
def test_both_capsule_kinds_round_trip_bfloat16(max_version: tuple[int, int] | None) -> None:
    source = Tensor.empty((3, 5), bfloat16, CPU)
    source.copy_from(np.arange(15).reshape(3, 5).astype(bfloat16))
    taken = Tensor.from_dlpack(_Producer(source[1:], max_version=max_version))
    assert taken.dtype == bfloat16
    assert (taken.numpy() == source.numpy()[1:]).all()


class _Owner:
    """Weakly referable stand-in for whatever keeps memory alive."""


def _owned(count: int) -> tuple[Tensor, weakref.ref[_Owner]]:
    held = Tensor.empty((count,), "int64", CPU)
    held.copy_from(np.full(count, 3))
    owner = _Owner()
    owner.memory = held  # type: ignore[attr-defined]
    return Tensor(held.ptr, held.shape, held.dtype, CPU, owner=owner), weakref.ref(owner)


def test_memory_lives_until_the_last_holder_lets_go() -> None:
    tensor, alive = _owned(1000)
    theirs = np.from_dlpack(tensor)
    ours = Tensor.from_dlpack(tensor)
    del tensor
    assert (theirs == 3).all()
    del theirs
    part = ours[10:20]
    del ours
    assert (part.numpy() == 3).all()
    assert alive() is not None
    del part
    assert alive() is None


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_capsule_nobody_takes_frees_itself(version: tuple[int, int] | None) -> None:
    tensor, alive = _owned(4)
    capsule = tensor.__dlpack__(max_version=version)
    del tensor
    assert alive() is not None
    del capsule
    assert alive() is None


def test_capsules_die_quietly_while_an_exception_passes() -> None:
    tensor, alive = _owned(4)
    with pytest.raises(ZeroDivisionError):
        print(tensor.__dlpack__(), 1 / 0)
    with pytest.raises((RuntimeError, BufferError), match=r"[Uu]nsupported dtype"):
        np.from_dlpack(tensor.view_as("bfloat16"))
    del tensor
    gc.collect()
    assert alive() is None


def test_numpys_memory_is_given_back() -> None:
    class Array(np.ndarray):  # type: ignore[type-arg]
        pass

    array = np.zeros(8).view(Array)
    gone = weakref.ref(array)
    tensor = Tensor.from_dlpack(array)
    del array
    gc.collect()
    assert gone() is not None
    del tensor
    gc.collect()
    assert gone() is None


def test_capsules_and_arrays_may_outlive_the_library_at_exit() -> None:
    code = """
import builtins, sys
import numpy as np
from openinfer.tensor import Device, Tensor
t = Tensor.empty((4,), "int64", Device("cpu"))
for home in (sys, builtins, np):  # cleared late
    home.kept = [t.__dlpack__(), t.__dlpack__(max_version=(1, 0)), np.from_dlpack(t), Tensor.from_dlpack(t)]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stderr == ""


def test_export_refusals() -> None:
    tensor = Tensor.empty((4,), float8_e5m2, CPU)
    with pytest.raises(DTypeError, match=r"float8_e5m2.*view_as"):
        tensor.__dlpack__()
    plain = tensor.view_as("uint8")
    with pytest.raises(BufferError, match="copies nothing"):
        plain.__dlpack__(copy=True)
    with pytest.raises(DeviceError, match=r"\(2, 0\)"):
        plain.__dlpack__(dl_device=(2, 0))
    assert np.from_dlpack(plain).shape == (4,)
    assert plain.__dlpack_device__() == (1, 0)
    assert Tensor(256, (1,), plain.dtype, Device("cuda", 3)).__dlpack_device__() == (2, 3)


def test_import_refusals() -> None:
    with pytest.raises(TensorError, match="list has no __dlpack__"):
        Tensor.from_dlpack([1, 2])
    array = np.zeros(3)
    array.flags.writeable = False
    with pytest.raises(ShapeError, match=r"read-?only.*copy it"):
        Tensor.from_dlpack(array)
    with pytest.raises(ShapeError, match="negative"):
        Tensor.from_dlpack(np.zeros(3)[::-1])
    with pytest.raises(DTypeError, match="64 bits"):
        Tensor.from_dlpack(np.zeros(3, np.complex64))

    class Twice(_Producer):
        capsule: Any = None

        def __dlpack__(self, **request: Any) -> Any:
            self.capsule = self.capsule or super().__dlpack__(**request)
            return self.capsule

    twice = Twice(Tensor.empty((2,), "int8", CPU))
    Tensor.from_dlpack(twice)
    with pytest.raises(TensorError, match="taken once"):
        Tensor.from_dlpack(twice)


def test_refused_capsules_leak_nothing() -> None:
    tensor, alive = _owned(4)
    capsule = tensor.__dlpack__()
    dlpack._open(capsule)[1].tensor.device_type = 7

    class Vulkan:
        def __init__(self, capsule: Any) -> None:
            self.capsule = capsule

        def __dlpack__(self, **request: Any) -> Any:
            return self.capsule

    with pytest.raises(DeviceError, match="type 7"):
        Tensor.from_dlpack(Vulkan(capsule))
    del capsule, tensor
    gc.collect()
    assert alive() is None


def test_missing_strides_mean_row_major() -> None:
    tensor = Tensor.empty((2, 3), "int8", CPU)
    capsule = tensor.__dlpack__()
    dlpack._open(capsule)[1].tensor.strides = ctypes.POINTER(ctypes.c_int64)()

    class Old:
        def __dlpack__(self) -> Any:  # knows no max_version
            return capsule

    assert Tensor.from_dlpack(Old()).strides == (3, 1)


def test_cuda_exchange_waits_on_both_sides(fake: Any) -> None:
    source = Tensor.empty((4,), "int32", CUDA)
    source.copy_from(np.arange(4, dtype=np.int32))
    waits = fake.count("cuCtxSynchronize")
    taken = Tensor.from_dlpack(_Producer(source))
    assert fake.count("cuCtxSynchronize") == waits + 1
    assert taken.device == CUDA
    assert taken.ptr == source.ptr
    assert taken.numpy().tolist() == [0, 1, 2, 3]
    waits = fake.count("cuCtxSynchronize")
    source.__dlpack__(stream=-1)
    assert fake.count("cuCtxSynchronize") == waits
    del source
    assert fake.live()[0] == 1  # the importer still holds it
    del taken
    assert fake.live() == (0, 0, 0, 0)


@pytest.mark.gpu
def test_real_exchange(gpu: Device) -> None:
    source = Tensor.empty((1000,), "float32", gpu)
    source.copy_from(np.arange(1000, dtype=np.float32))
    taken = Tensor.from_dlpack(source)
    del source
    assert (taken.numpy() == np.arange(1000)).all()
