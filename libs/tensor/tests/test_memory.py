import gc
import mmap
from typing import Any

import numpy as np
import pytest

from openinfer.tensor import (
    ClosedError,
    CudaError,
    Device,
    OutOfMemory,
    PinnedBuffer,
    ShapeError,
    Stream,
    Tensor,
    memory_fence,
)
from openinfer.tensor.memory import contiguous_strides

CPU, NULL, CUDA = Device("cpu"), Device("null"), Device("cuda")


@pytest.mark.parametrize("device", [CPU, NULL])
def test_pinned_buffer_off_cuda_is_plain_memory(device: Device) -> None:
    with PinnedBuffer(device, 1000) as buffer:
        assert buffer.array.shape == (1000,)
        assert buffer.array.dtype == np.uint8
        assert buffer.ptr == buffer.array.ctypes.data
        assert buffer.ptr % 256 == 0
        buffer.array[:] = 5
        kept = buffer.array[10:20]
    assert kept.tolist() == [5] * 10
    with pytest.raises(ClosedError, match="closed"):
        buffer.array  # noqa: B018


def test_pinned_buffer_size_must_be_positive() -> None:
    with pytest.raises(ShapeError, match="0 bytes"):
        PinnedBuffer(CPU, 0)


def test_memory_that_exists_is_locked_in_place(fake: Any) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 8192), np.uint8)
    with PinnedBuffer.over(CPU, memory) as plain, PinnedBuffer.over(CUDA, memory) as buffer:
        plain.array[7] = 3
        assert buffer.array[7] == 3
        assert buffer.ptr == plain.ptr == memory.ctypes.data
        assert buffer.ptr in fake.pinned
    gc.collect()
    assert not fake.pinned


def test_pinned_memory_lives_as_long_as_its_views(fake: Any) -> None:
    with PinnedBuffer(CUDA, 4096) as buffer:
        assert buffer.ptr in fake.pinned
        view = buffer.array[8:16].view(np.int64)
    view[0] = 3
    assert fake.count("cuMemFreeHost") == 0
    del view
    gc.collect()
    assert fake.live() == (0, 0, 0, 0)


def test_device_memory_is_freed_with_its_last_view(fake: Any) -> None:
    whole = Tensor.empty((4, 4), "float32", CUDA)
    row = whole[1]
    del whole
    assert fake.count("cuMemFree") == 0
    del row
    assert fake.count("cuMemFree") == 1
    assert fake.live() == (0, 0, 0, 0)


def test_freeing_in_a_thread_without_context_works(fake: Any) -> None:
    import threading

    box = [Tensor.empty((4,), "uint8", CUDA)]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert fake.live() == (0, 0, 0, 0)


def test_out_of_device_memory_says_how_much_is_free(fake: Any) -> None:
    held = Tensor.empty((1 << 20,), "uint8", CUDA)
    with pytest.raises(
        OutOfMemory, match=f"{1 << 31} bytes on cuda:0: .* of {1 << 30} device bytes are free"
    ) as e:
        Tensor.empty((1 << 31,), "uint8", CUDA)
    assert isinstance(e.value, MemoryError)
    assert held.nbytes == 1 << 20


def test_other_failures_of_an_allocation_stay_what_they_are(fake: Any) -> None:
    fake.fail["cuMemAlloc"] = fake.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(CudaError, match="cuMemAlloc failed with CUDA_ERROR_ILLEGAL_ADDRESS"):
        Tensor.empty((1,), "uint8", CUDA)


def test_host_out_of_memory_is_our_error() -> None:
    with pytest.raises(OutOfMemory, match="host"):
        Tensor.empty((1 << 60,), "uint8", CPU)


def test_null_memory_has_addresses_nobody_shares() -> None:
    a, b = Tensor.empty((1000,), "float32", NULL), Tensor.empty((3,), "uint8", NULL)
    assert a.ptr % 256 == b.ptr % 256 == 0
    assert a.ptr > 0
    assert b.ptr >= a.ptr + a.nbytes


@pytest.mark.gpu
def test_real_pinned_memory_round_trip(gpu: Device) -> None:
    n = 1 << 20
    with PinnedBuffer(gpu, n) as up, PinnedBuffer(gpu, n) as down, Stream(gpu) as stream:
        up.array[:] = np.random.default_rng(0).integers(0, 256, n, np.uint8)
        x = Tensor.empty((n,), "uint8", gpu)
        stream.copy_async(x.ptr, up.ptr, n, "h2d")
        stream.copy_async(down.ptr, x.ptr, n, "d2h")
        stream.synchronize()
        assert (up.array == down.array).all()


@pytest.mark.gpu
def test_real_memory_comes_back(gpu: Device) -> None:
    before = gpu.free_memory
    x = Tensor.empty((1 << 30,), "uint8", gpu)
    assert gpu.free_memory <= before - (1 << 30)
    del x
    assert gpu.free_memory == before
    with pytest.raises(OutOfMemory):
        Tensor.empty((gpu.total_memory + 1,), "uint8", gpu)


def test_a_fence_of_processors_that_keep_no_order(monkeypatch):
    """A lock is let go and taken again, and nobody else can hold it."""
    monkeypatch.setattr("openinfer.tensor.memory._IN_ORDER", False)
    for _ in range(3):
        memory_fence()


def test_strides_are_ints_also_of_a_shape_of_numpy_ints() -> None:
    given = (np.int64(211), np.int64(223), np.int64(227))  # of no other test: strides are kept by shape
    found = contiguous_strides(given), contiguous_strides((211, 223, 227))
    assert found[0] == found[1] == (223 * 227, 227, 1)
    assert {type(stride) for strides in found for stride in strides} == {int}
