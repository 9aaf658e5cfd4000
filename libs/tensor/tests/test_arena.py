from typing import Any

import numpy as np
import pytest

from openinfer.tensor import Arena, ClosedError, Device, OutOfMemory, ShapeError

CPU, NULL, CUDA = Device("cpu"), Device("null"), Device("cuda")


@pytest.mark.parametrize("device", [CPU, NULL, CUDA])
def test_allocations_are_aligned_and_disjoint(fake: Any, device: Device) -> None:
    with Arena(device, 1 << 16) as arena:
        a = arena.alloc((3, 5), "bfloat16", "a")
        b = arena.alloc([7], np.float32)
        empty = arena.alloc((0, 4), "int8")
        c = arena.alloc((), "int64")
        assert [t.ptr - a.ptr for t in (a, b, empty, c)] == [0, 256, 512, 512]
        assert a.ptr % 256 == 0
        assert arena.used == 520
        assert arena.remaining == arena.capacity - 520 == (1 << 16) - 520
        assert (a.name, a.device, b.shape, c.shape) == ("a", device, (7,), ())
    assert fake.count("cuMemAlloc") == (device is CUDA)


@pytest.mark.parametrize("device", [CPU, NULL])
def test_a_full_arena_says_what_was_asked_used_and_there(device: Device) -> None:
    arena = Arena(device, 1000)
    arena.alloc((600,), "uint8")
    with pytest.raises(OutOfMemory, match=r"kv bfloat16\[250\] needs 500 bytes.*used 600 of 1000"):
        arena.alloc((250,), "bfloat16", "kv")
    assert arena.used == 600  # a refusal takes nothing
    assert arena.alloc((232,), "uint8").nbytes == 232
    assert arena.remaining == 0


def test_an_unbounded_null_arena_plans_any_engine() -> None:
    arena = Arena(NULL, None)
    big = arena.alloc((1 << 45,), "float32", "weights")
    assert arena.used == big.nbytes == 1 << 47
    assert arena.alloc((1,), "uint8").ptr < 1 << 63
    with pytest.raises(ShapeError, match="capacity in bytes"):
        Arena(CPU, None)


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_must_be_positive(capacity: int) -> None:
    with pytest.raises(ShapeError, match="at least one"):
        Arena(CPU, capacity)
    with pytest.raises(ShapeError, match="negative"):
        Arena(CPU, 10).alloc((-1,), "uint8")


def test_close_keeps_memory_for_tensors_still_held(fake: Any) -> None:
    for device in (CPU, CUDA):
        with Arena(device, 4096) as arena:
            kept = arena.alloc((4,), "int32")
            kept.copy_from(np.arange(4, dtype=np.int32))
        with pytest.raises(ClosedError, match="closed"):
            arena.alloc((1,), "uint8")
        assert kept.numpy().tolist() == [0, 1, 2, 3]
    assert fake.live()[0] == 1
    del kept
    assert fake.live() == (0, 0, 0, 0)


def test_a_device_too_small_refuses_at_once(fake: Any) -> None:
    with pytest.raises(OutOfMemory, match="cuMemAlloc"):
        Arena(CUDA, fake.total_memory + 1)
