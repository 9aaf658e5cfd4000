"""The clock of a GPU."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from openinfer.tensor import ClockReading, Device, DeviceClock


def test_a_reading_names_what_slows_the_clock() -> None:
    nvml: Any = SimpleNamespace(
        ClockType=SimpleNamespace(CLOCK_SM=1),
        device_get_max_clock_info=lambda handle, kind: 1980,
        device_get_clock_info=lambda handle, kind: 1200,
        device_get_current_clocks_event_reasons=lambda handle: 0x1 | 0x4 | 0x20,
    )
    assert DeviceClock(nvml, 7).read() == ClockReading(1200, 1980, ("power cap", "temperature"))


def test_a_cpu_and_a_broken_nvml_have_no_clock(fake: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert DeviceClock.of(Device("cpu")) is None
    with caplog.at_level(logging.INFO, "openinfer.tensor"):
        assert DeviceClock.of(Device("cuda")) is None  # the fake driver has no bus
    assert "no clocks in traces" in caplog.text


@pytest.mark.gpu
def test_a_gpu_has_a_clock(gpu: Device) -> None:
    clock = DeviceClock.of(gpu)
    assert clock is not None
    reading = clock.read()
    assert 100 < reading.mhz <= reading.most_mhz < 5000
