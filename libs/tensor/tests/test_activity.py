"""ActivityRecorder over a stand-in for libcupti that writes records as CUPTI 13 lays them out."""

from __future__ import annotations

import ctypes
import struct
import time
from typing import Any

import pytest

from openinfer.tensor import ActivityNotAvailable, ActivityRecorder, activity

SIZES = {1: 96, 2: 88, 10: 216}  # of CUpti_ActivityMemcpy6, Memset4, Kernel10
EPOCH = 1_700_000_000_000_000_000


class FakeCupti:
    """Records wait in `pending`; a flush delivers them, several buffers if one is too small."""

    def __init__(self, *, refuse: str = "", room: int = 1 << 30) -> None:
        self.refuse, self.room = refuse, room
        self.enabled: list[int] = []
        self.pending: list[bytes] = []
        self.names: list[Any] = []
        self.buffers = 0

    def cuptiGetResultString(self, status: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"FAKE_ERROR"
        return 0

    def cuptiActivityRegisterCallbacks(self, requested: Any, completed: Any) -> int:  # noqa: N802
        self.requested, self.completed = requested, completed
        return 0

    def cuptiActivityEnable(self, kind: int) -> int:  # noqa: N802
        if self.refuse == "enable":
            return 999
        self.enabled.append(kind)
        return 0

    def cuptiActivityDisable(self, kind: int) -> int:  # noqa: N802
        self.enabled.remove(kind)
        return 0

    def cuptiGetTimestamp(self, stamp: Any) -> int:  # noqa: N802
        stamp._obj.value = self.now()
        return 0

    def now(self) -> int:
        return EPOCH + time.perf_counter_ns()

    def cuptiActivityFlushAll(self, flag: int) -> int:  # noqa: N802
        while self.pending:
            buffer, size, most = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
            self.requested(ctypes.byref(buffer), ctypes.byref(size), ctypes.byref(most))
            assert buffer.value is not None
            assert buffer.value % 8 == 0
            end = 0
            while self.pending and end + len(self.pending[0]) <= min(size.value, self.room):
                record = self.pending.pop(0)
                ctypes.memmove(buffer.value + end, record, len(record))
                end += len(record)
            self.buffers += 1
            self.completed(None, 0, buffer, size, end)
        return 0

    def cuptiActivityGetNextRecord(self, buffer: Any, valid: Any, record: Any) -> int:  # noqa: N802
        at = record._obj.value
        if at is None:
            at = buffer.value
        else:
            at += SIZES.get(ctypes.c_int32.from_address(at).value, 32)
        if at >= buffer.value + valid.value:
            return 12
        record._obj.value = at
        return 0

    def kernel(self, name: str, start: int, end: int, correlation: int) -> None:
        self.names.append(ctypes.create_string_buffer(name.encode()))
        record = bytearray(216)
        struct.pack_into("<i", record, 0, 10)
        struct.pack_into("<QQ", record, 16, start, end)
        struct.pack_into("<I", record, 48, 13)
        struct.pack_into("<IqQ", record, 92, correlation, 5, ctypes.addressof(self.names[-1]))
        self.pending.append(bytes(record))

    def copy(self, kind: int, start: int, end: int, correlation: int, copied: int = 0) -> None:
        record = bytearray(SIZES[kind])
        struct.pack_into("<iB", record, 0, kind, copied)
        struct.pack_into("<QQ", record, 16, start, end)
        struct.pack_into("<II", record, 40, 14, correlation)
        self.pending.append(bytes(record))


def test_records_are_read_in_order_on_the_hosts_clock() -> None:
    cupti = FakeCupti()
    recorder = ActivityRecorder(library=cupti)
    assert sorted(cupti.enabled) == [1, 2, 10]
    before, start = time.perf_counter_ns(), cupti.now()
    cupti.kernel("second", start + 3000, start + 4000, 7)
    cupti.kernel("first", start + 1000, start + 2000, 7)
    cupti.copy(1, start + 5000, start + 5500, 8, copied=2)
    cupti.copy(2, start + 6000, start + 6500, 9)
    cupti.pending.append(struct.pack("<i28x", 40))  # a kind that nobody asked for
    found = recorder.read()
    assert [(a.kind, a.name, a.stream, a.correlation) for a in found] == [
        ("kernel", "first", 13, 7), ("kernel", "second", 13, 7), ("copy", "copy to host", 14, 8),
        ("memset", "memset", 14, 9),
    ]  # fmt: skip
    assert [a.end_ns - a.start_ns for a in found] == [1000, 1000, 500, 500]
    assert abs(found[0].start_ns - before - 1000) < 5e7  # the same clock, not the epoch
    assert recorder.read() == []


def test_work_that_is_not_done_has_no_times_and_is_left_out() -> None:
    cupti = FakeCupti()
    recorder = ActivityRecorder(library=cupti)
    cupti.kernel("running", cupti.now(), 0, 1)
    cupti.kernel("queued", 0, 0, 2)
    assert recorder.read() == []


def test_only_the_newest_is_kept() -> None:
    cupti = FakeCupti(room=2 * 216)
    recorder = ActivityRecorder(keep_bytes=3 * activity.BUFFER_BYTES, library=cupti)
    start = cupti.now()
    for n in range(20):
        cupti.kernel(f"k{n}", start + 10 * n, start + 10 * n + 5, n)
    assert [a.name for a in recorder.read()] == [f"k{n}" for n in range(14, 20)]
    assert cupti.buffers == 10


def test_a_look_at_the_newest_reads_no_older_buffer() -> None:
    """64 buffers have 300,000 kernels, and to read all of them takes seconds."""
    cupti = FakeCupti(room=2 * 216)
    recorder = ActivityRecorder(library=cupti)
    start, far = cupti.now(), 2 * activity.DISORDER_NS
    for n in range(20):
        cupti.kernel(f"k{n}", start + n * far, start + n * far + 5, n)
    now = time.perf_counter_ns() - (cupti.now() - start)
    read, inner = [], recorder._records

    def counted(memory: Any, valid: int, offset: int) -> Any:
        read.append(memory)
        return inner(memory, valid, offset)

    recorder._records = counted  # type: ignore[method-assign]
    found = recorder.since(now + 16 * far - activity.DISORDER_NS // 2)
    assert [a.name for a in found] == ["k16", "k17", "k18", "k19"]
    assert len(read) == 3  # the two that have them, and the first that has none
    assert len(recorder.read()) == 20


def test_pause_stops_recording_and_resume_goes_on() -> None:
    cupti = FakeCupti()
    recorder = ActivityRecorder(library=cupti)
    recorder.pause()
    assert cupti.enabled == []
    recorder.resume()
    recorder.resume()
    assert sorted(cupti.enabled) == [1, 2, 10]
    recorder.close()
    assert cupti.enabled == []


def test_a_driver_that_refuses_is_named() -> None:
    cupti = FakeCupti(refuse="enable")
    with pytest.raises(ActivityNotAvailable, match=r"cuptiActivityEnable failed: FAKE_ERROR \(999\)"):
        ActivityRecorder(library=cupti)


def test_a_missing_library_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(ActivityNotAvailable, match=r"pip install 'openinfer-tensor\[cupti\]'"):
        ActivityRecorder()
