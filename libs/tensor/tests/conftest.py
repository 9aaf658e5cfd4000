"""`fake` replaces the driver; `gpu` is a real device, or the test is skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from openinfer.tensor import CudaError, Device, DriverNotFound
from openinfer.tensor.testing import FakeDriver, fake_driver


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    with fake_driver() as driver:
        yield driver


@pytest.fixture
def gpu() -> Device:
    device = Device("cuda", 0)
    try:
        device.activate()
    except (DriverNotFound, CudaError) as e:
        pytest.skip(f"no usable CUDA device: {e}")
    return device
