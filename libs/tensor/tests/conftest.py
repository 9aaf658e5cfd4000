"""`fake` replaces the driver by fake_driver.FakeDriver; `gpu` is a real device, or the test is skipped."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from openinfer.tensor import CudaError, Device, DriverNotFound, cuda

_path = Path(__file__).with_name("fake_driver.py")  # test folders are no packages: load it by its path
_spec = importlib.util.spec_from_file_location("tensor_fake_driver", _path)
assert _spec is not None
assert _spec.loader is not None
_fake_driver = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fake_driver)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    driver = _fake_driver.FakeDriver()
    monkeypatch.setattr(cuda, "_driver", driver)
    monkeypatch.setattr(cuda, "_contexts", {})
    return driver


@pytest.fixture
def gpu() -> Device:
    device = Device("cuda", 0)
    try:
        device.activate()
    except (DriverNotFound, CudaError) as e:
        pytest.skip(f"no usable CUDA device: {e}")
    return device
