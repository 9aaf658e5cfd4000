from typing import Any

import pytest

from openinfer.tensor import CudaError, Device, DeviceError


@pytest.mark.parametrize(
    ("text", "kind", "index"), [("cuda", "cuda", 0), ("cuda:12", "cuda", 12), ("cpu", "cpu", 0)]
)
def test_parse(text: str, kind: str, index: int) -> None:
    device = Device.parse(text)
    assert (device.kind, device.index) == (kind, index)
    assert Device.parse(str(device)) == device


@pytest.mark.parametrize(
    "text", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1:2", "cpu:1", "null:3", "CUDA", "cuda:²"]
)
def test_parse_refuses(text: str) -> None:
    with pytest.raises(DeviceError, match="cuda"):
        Device.parse(text)


def test_devices_are_values() -> None:
    assert {Device("cuda", 1): "a"}[Device.parse("cuda:1")] == "a"
    assert Device("cpu") != Device("null")
    with pytest.raises(AttributeError):
        Device("cpu").index = 1  # type: ignore[misc]
    with pytest.raises(DeviceError, match="unknown device kind"):
        Device("tpu")  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="numbered"):
        Device("cuda", -1)


def test_properties_come_from_the_driver(fake: Any) -> None:
    device = Device("cuda", 1)
    assert device.name == "Fake 1"
    assert (device.arch, device.num_sms, device.shared_memory_per_block) == (90, 132, 232448)
    assert device.total_memory == device.free_memory == fake.total_memory
    with pytest.raises(CudaError, match="cuDeviceGet"):
        Device("cuda", 7).activate()


@pytest.mark.parametrize("kind", ["cpu", "null"])
def test_other_devices_have_no_such_properties(kind: str) -> None:
    device = Device.parse(kind)
    device.activate()
    assert device.name == kind
    for name in ("arch", "num_sms", "total_memory", "free_memory", "shared_memory_per_block"):
        with pytest.raises(DeviceError, match=f"{name} has no meaning on device {kind}"):
            getattr(device, name)


@pytest.mark.gpu
def test_real_properties(gpu: Device) -> None:
    assert gpu.name.startswith("NVIDIA")
    assert 70 <= gpu.arch < 200
    assert 0 < gpu.free_memory <= gpu.total_memory
    assert gpu.num_sms > 0
    assert gpu.shared_memory_per_block >= 48 << 10
