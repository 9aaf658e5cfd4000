from typing import Any

import numpy as np
import pytest

from openinfer.tensor import (
    ClosedError,
    CudaError,
    Device,
    DeviceError,
    Event,
    PinnedBuffer,
    ShapeError,
    Stream,
    Tensor,
    TensorError,
)

CPU, NULL, CUDA = Device("cpu"), Device("null"), Device("cuda")


def test_cpu_stream_works_at_once() -> None:
    src, dst = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    with Stream(CPU) as stream:
        assert stream.handle == 0
        stream.copy_async(dst.ctypes.data, src.ctypes.data, 8, "d2d")
        assert dst.tolist() == src.tolist()
        stream.memset_async(dst.ctypes.data + 1, 0xFF, 2)
        assert dst.tolist() == [0, 255, 255, 3, 4, 5, 6, 7]
        stream.synchronize()


def test_null_stream_touches_nothing() -> None:
    stream = Stream(NULL)
    stream.copy_async(1 << 40, 1 << 41, 1 << 30, "h2d")
    stream.memset_async(1 << 40, 0, 1 << 30)
    stream.synchronize()


@pytest.mark.parametrize("device", [CPU, NULL])
def test_bad_requests_are_refused_on_every_device(device: Device) -> None:
    stream = Stream(device)
    with pytest.raises(DeviceError, match="h2h"):
        stream.copy_async(0, 0, 0, "h2h")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="-1"):
        stream.copy_async(0, 0, -1, "h2d")
    with pytest.raises(ShapeError, match="256"):
        stream.memset_async(0, 256, 1)


@pytest.mark.parametrize("device", [CPU, NULL])
def test_host_events_are_done_when_recorded(device: Device) -> None:
    stream, first, second = Stream(device), Event(device, timing=True), Event(device, timing=True)
    assert first.query()
    with pytest.raises(TensorError, match="record"):
        second.elapsed_s(first)
    first.record(stream)
    second.record(stream)
    stream.wait(first)
    assert second.query()
    assert 0 <= second.elapsed_s(first) < 5
    with pytest.raises(TensorError, match="timing=True"):
        second.elapsed_s(Event(device))


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_closed_things_refuse(fake: Any, device: Device) -> None:
    stream, event = Stream(device), Event(device)
    for thing in (stream, event):
        thing.close()
        thing.close()
    for call in (
        stream.synchronize,
        lambda: stream.memset_async(0, 0, 0),
        lambda: stream.copy_async(0, 0, 0, "d2d"),
        lambda: Event(device).record(stream),
        lambda: Stream(device).wait(event),
        event.query,
        event.synchronize,
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()


def test_cuda_streams_are_ordered_by_events_only(fake: Any) -> None:
    a, b, mark = Stream(CUDA), Stream(CUDA), Event(CUDA)
    x, y = Tensor.empty((64,), "uint8", CUDA), Tensor.empty((64,), "uint8", CUDA)
    x.copy_from(np.full(64, 7, np.uint8), a)
    mark.record(a)
    assert not mark.query()
    b.wait(mark)
    y.copy_from(x, b)
    b.synchronize()
    assert mark.query()
    assert y.numpy().tolist() == [7] * 64
    assert fake.count("cuStreamSynchronize") == 2  # ours, and the one inside numpy()


def test_a_streams_priority_is_the_drivers(fake: Any) -> None:
    assert [fake.streams[Stream(CUDA, priority).handle].priority for priority in (0, -1, -5)] == [0, -1, -5]
    assert fake.streams[Stream(CUDA).handle].priority == 0
    with pytest.raises(DeviceError, match="priority is 1; it is 0 or, for a higher one, negative"):
        Stream(CPU, 1)


def test_cuda_elapsed_is_in_seconds(fake: Any) -> None:
    stream, a, b = Stream(CUDA), Event(CUDA, timing=True), Event(CUDA, timing=True)
    a.record(stream)
    b.record(stream)
    assert b.elapsed_s(a) == 0.25


def test_errors_of_the_device_surface(fake: Any) -> None:
    stream, event = Stream(CUDA), Event(CUDA)
    for name in ("cuStreamSynchronize", "cuEventQuery", "cuMemsetD8Async"):
        fake.fail = {name: fake.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS}
        with pytest.raises(CudaError, match=f"{name} failed with CUDA_ERROR_ILLEGAL_ADDRESS"):
            {"cuStreamSynchronize": stream.synchronize, "cuEventQuery": event.query}.get(
                name, lambda: stream.memset_async(0, 0, 1)
            )()


def test_wrong_copy_direction_does_not_pass_the_fake(fake: Any) -> None:
    with PinnedBuffer(CUDA, 64) as host, Stream(CUDA) as stream:
        x = Tensor.empty((64,), "uint8", CUDA)
        stream.copy_async(x.ptr, host.ptr, 64, "h2d")
        with pytest.raises(CudaError, match="INVALID_VALUE"):
            stream.copy_async(x.ptr, host.ptr, 64, "d2h")


@pytest.mark.gpu
def test_real_streams_and_events(gpu: Device) -> None:
    n = 64 << 20
    with Stream(gpu) as a, Stream(gpu) as b, Event(gpu, timing=True) as t0, Event(gpu, timing=True) as t1:
        x, y = Tensor.empty((n,), "uint8", gpu), Tensor.empty((n,), "uint8", gpu)
        t0.record(a)
        for byte in range(8):
            a.memset_async(x.ptr, byte, n)
        t1.record(a)
        b.wait(t1)
        y.copy_from(x, b)
        b.synchronize()
        assert t1.query()
        assert 0 < t1.elapsed_s(t0) < 1
        assert (y.numpy() == 7).all()
