"""`gpu` is a real device, or the test is skipped."""

from __future__ import annotations

import pytest

from openinfer.tensor import CudaError, Device, DriverNotFound


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


@pytest.fixture
def gpu() -> Device:
    device = Device("cuda", 0)
    try:
        device.activate()
    except (DriverNotFound, CudaError) as e:
        pytest.skip(f"no usable CUDA device: {e}")
    return device
