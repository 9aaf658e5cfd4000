"""Arenas whose memory goes back while their addresses stay."""

from __future__ import annotations

import numpy as np
import pytest

from openinfer.tensor import Arena, Device, DeviceError, Stream, float32

MANY = 1 << 20


def round_trip(device: Device) -> None:
    with Stream(device) as stream, Arena(device, 8 * MANY, mapped=True) as arena:
        x = arena.alloc((MANY,), float32)
        address, values = x.ptr, np.arange(MANY, dtype=np.float32)
        x.copy_from(values, stream)
        stream.synchronize()
        arena.give_back()
        with pytest.raises(DeviceError, match="given back already"):
            arena.give_back()
        arena.take_back()
        with pytest.raises(DeviceError, match="was not given back"):
            arena.take_back()
        stream.memset_async(arena.base, 0, arena.used)
        stream.synchronize()
        assert not x.numpy().any()
        x.copy_from(values, stream)
        stream.synchronize()
        assert (x.numpy() == values).all()
        assert x.ptr == address == arena.base


def test_memory_of_the_host_goes_back_and_comes_again() -> None:
    round_trip(Device("cpu"))


def test_pages_of_the_host_have_gone() -> None:
    with Arena(Device("cpu"), 8 * MANY, mapped=True) as arena:
        x = arena.alloc((MANY,), float32)
        x.numpy()[:] = 1.0
        arena.give_back()
        assert not x.numpy().any()


def test_other_arenas_cannot_be_given_back() -> None:
    with Arena(Device("cpu"), 64) as arena:
        assert not arena.mapped
        with pytest.raises(DeviceError, match="mapped=True"):
            arena.give_back()
    with pytest.raises(DeviceError, match="null device"):
        Arena(Device("null"), 64, mapped=True)


@pytest.mark.gpu
def test_memory_of_a_gpu_goes_back_and_comes_again(gpu: Device) -> None:
    round_trip(gpu)


@pytest.mark.gpu
def test_a_gpu_has_the_memory_while_it_is_given_back(gpu: Device) -> None:
    size = 1 << 30
    before = gpu.free_memory
    with Arena(gpu, size, mapped=True) as arena:
        assert gpu.free_memory <= before - size
        arena.give_back()
        assert gpu.free_memory > before - size // 2
        arena.take_back()
        assert gpu.free_memory <= before - size
