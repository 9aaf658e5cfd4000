from __future__ import annotations

import time

import numpy as np
import pytest

from openinfer.graph import GraphError, Readback, RingFull
from openinfer.tensor import Device, Stream, Tensor, bfloat16


def tensors(step: int) -> list[Tensor]:
    ids = np.arange(6, dtype=np.int32).reshape(2, 3) + 100 * step
    return [Tensor.from_numpy(ids), Tensor.from_numpy(np.full(5, step, np.float32).astype(bfloat16))]


def test_results_come_back_in_order_shape_and_dtype() -> None:
    device = Device("cpu")
    stream, readback = Stream(device), Readback(device, 256, depth=2)
    assert readback.take(wait=True) is None
    for step in range(2):
        readback.enqueue(stream, tensors(step))
    assert len(readback) == 2
    for step in range(2):
        results = readback.take(wait=True)
        assert results is not None
        for result, sent in zip(results, tensors(step), strict=True):
            assert result.dtype == sent.dtype
            np.testing.assert_array_equal(result, sent.numpy())
    assert len(readback) == 0
    assert readback.take(wait=False) is None
    readback.close()


def test_the_first_result_may_come_from_a_kernel() -> None:
    """The caller writes it to the room of the step; no copy engine touches it. Later tensors are copied."""
    device = Device("cpu")
    stream, readback = Stream(device), Readback(device, 256, depth=2, words=12)
    for step in range(3):
        room = readback.rooms[readback.place].numpy()
        room[:] = 7
        room[:6] = tensors(step)[0].numpy().reshape(-1)
        result = Tensor.from_numpy(np.full((2, 3), -1, np.int32))
        readback.enqueue(stream, [result, tensors(step)[1]])
        taken = readback.take(wait=True)
        assert taken is not None
        for got, sent in zip(taken, tensors(step), strict=True):
            np.testing.assert_array_equal(got, sent.numpy())
    readback.close()


def test_what_was_taken_is_not_overwritten_by_later_steps() -> None:
    device = Device("cpu")
    stream, readback = Stream(device), Readback(device, 256, depth=1)
    readback.enqueue(stream, tensors(0))
    first = readback.take(wait=True)
    assert first is not None
    readback.enqueue(stream, tensors(7))
    np.testing.assert_array_equal(first[0], tensors(0)[0].numpy())
    readback.close()


def test_a_full_ring_and_a_large_result_are_refused() -> None:
    device = Device("cpu")
    stream, readback = Stream(device), Readback(device, 128, depth=1)
    with pytest.raises(RingFull, match="more than 128 bytes"):
        readback.enqueue(stream, [*tensors(0), *tensors(1)])
    assert len(readback) == 0
    readback.enqueue(stream, tensors(0))
    with pytest.raises(RingFull, match="1 results are under way"):
        readback.enqueue(stream, tensors(1))
    assert readback.take(wait=True) is not None
    readback.enqueue(stream, tensors(1))
    assert issubclass(RingFull, GraphError)
    readback.close()


def test_the_time_from_begin_to_the_result_is_the_steps() -> None:
    device = Device("cpu")
    stream, readback = Stream(device), Readback(device, 256, depth=2)
    started = time.perf_counter()
    readback.begin(stream)
    time.sleep(0.002)
    readback.enqueue(stream, tensors(0))
    at_most = time.perf_counter() - started
    readback.enqueue(stream, tensors(1))  # without begin: not timed
    time.sleep(0.02)
    assert readback.take(wait=True) is not None
    assert readback.seconds is not None
    assert 0.002 <= readback.seconds <= at_most + 1e-3  # and not what passed until it was taken
    assert readback.take(wait=True) is not None
    assert readback.seconds is None
    assert readback.waits == 2
    assert readback.take(wait=True) is None
    assert readback.waits == 2
    readback.close()


@pytest.mark.gpu
def test_read_back_does_not_wait_for_the_device(gpu: Device) -> None:
    with Stream(gpu) as stream:
        big = Tensor.empty((1 << 28,), "uint8", gpu)
        small = Tensor.empty((4,), "int32", gpu)
        readback = Readback(gpu, 256, depth=4)
        late = 0
        for step in range(12):
            for _ in range(8):
                big.zero_(stream)  # 2 GiB written: the device is busy for a while
            stream.memset_async(small.ptr, step, small.nbytes)
            readback.enqueue(stream, [small])
            late += readback.take(wait=False) is None
            results = readback.take(wait=True) if len(readback) else None
            if results is not None:
                assert results[0].view(np.uint8).tolist() == [step] * 16
        assert late > 0
        readback.close()
