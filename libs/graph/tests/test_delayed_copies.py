"""Rows and Readback on a device that copies as late as it may: a buffer that is reused or read too early shows."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from openinfer.graph import Field, Readback, Rows
from openinfer.tensor import Arena, Device, Stream, Tensor
from openinfer.tensor.testing import FakeDriver, fake_driver

FIELDS = [Field("lengths", (9,)), Field("tables", (9, 5)), Field("state", (9,), device_written=True)]


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    """Work on a stream runs only when something waits for it."""
    with fake_driver() as fake:
        yield fake


def words(tensor: Tensor) -> np.ndarray:
    """Device memory of the fake, which is memory of the host, as int32."""
    return np.frombuffer((ctypes.c_int32 * (tensor.nbytes // 4)).from_address(tensor.ptr), np.int32)


def upload(rows: Rows, stream: Stream, driver: FakeDriver, *, in_place: bool = False) -> int:
    """Put a scatter behind each delta, as a captured kernel would be. Returns how many there were."""

    def scatter(source: Tensor) -> None:
        writes = words(source)
        count, capacity = int(writes[0]), (len(writes) - 1) // 2
        words(rows.words)[writes[1 : 1 + count]] = writes[1 + capacity : 1 + capacity + count]

    deltas = 0
    for _ in rows.uploads(stream, in_place=in_place):
        source = rows.rooms[rows.place] if in_place else rows.writes
        driver.streams[stream.handle].work.append(partial(scatter, source))
        deltas += 1
    return deltas


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("ring", [1, 2, 3])
def test_a_staging_buffer_is_not_written_before_it_is_read(
    ring: int, in_place: bool, driver: FakeDriver
) -> None:
    device, rng = Device("cuda"), random.Random(ring)
    with Stream(device) as stream:
        rows = Rows(Arena(device, 1 << 16), FIELDS, stream, capacity=7, ring=ring)
        expected = np.zeros((9, 5), np.int32)
        deltas = 0
        for _ in range(40):
            slot, values = rng.randrange(9), [rng.randrange(1000) for _ in range(5)]
            expected[slot] = values
            rows.write("tables", slot, values)
            deltas += upload(rows, stream, driver, in_place=in_place)
        assert deltas == 40
        queue = driver.streams[stream.handle]
        # The host waited for staging buffers, and for nothing else: a copy, its scatter and one scatter more.
        assert 0 < len(queue.work) - queue.done <= 2 * ring + 1
        stream.synchronize()
        np.testing.assert_array_equal(words(rows["tables"]).reshape(9, 5), expected)
        rows.close()


def test_many_deltas_of_one_upload_each_arrive_as_they_were(driver: FakeDriver) -> None:
    device = Device("cuda")
    with Stream(device) as stream:
        rows = Rows(Arena(device, 1 << 16), FIELDS, stream, capacity=4, ring=2)
        table = np.arange(1, 46, dtype=np.int32).reshape(9, 5)
        for slot in range(9):
            rows.write("tables", slot, table[slot])
        assert upload(rows, stream, driver) == 12
        stream.synchronize()
        np.testing.assert_array_equal(words(rows["tables"]).reshape(9, 5), table)
        rows.close()


def test_results_are_not_taken_before_their_copy_is_done(driver: FakeDriver) -> None:
    device = Device("cuda")
    with Stream(device) as stream:
        result = Tensor.empty((4,), "int32", device)
        readback = Readback(device, 256, depth=3)
        for step in (1, 2, 3):
            readback.begin(stream)
            stream.memset_async(result.ptr, step, result.nbytes)
            readback.enqueue(stream, [result])
        assert readback.take(wait=False) is None  # nothing has waited, so nothing has run
        for step in (1, 2, 3):
            taken = readback.take(wait=True)
            assert taken is not None
            assert taken[0].view(np.uint8).tolist() == [step] * 16
            queue = driver.streams[stream.handle]
            assert (len(queue.work) == queue.done) == (step == 3)  # and it waited for its own step only
        assert readback.take(wait=False) is None
        readback.close()


def test_a_buffer_of_the_ring_is_reused_only_for_results_that_come_later(driver: FakeDriver) -> None:
    device = Device("cuda")
    with Stream(device) as stream:
        result = Tensor.empty((4,), "int32", device)
        readback = Readback(device, 256, depth=2)
        launched = taken = 0
        while taken < 20:
            while len(readback) < 2:
                launched += 1
                stream.memset_async(result.ptr, launched, result.nbytes)
                readback.enqueue(stream, [result])
            arrays = readback.take(wait=True)
            taken += 1
            assert arrays is not None
            assert arrays[0].view(np.uint8).tolist() == [taken] * 16
        readback.close()
