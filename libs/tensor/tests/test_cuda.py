import importlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from openinfer.tensor import (
    CudaError,
    Device,
    DriverNotFound,
    Event,
    OutOfMemory,
    PinnedBuffer,
    Stream,
    check,
    cuda,
    driver,
)
from openinfer.tensor.memory import Allocation


def _import_gives(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    def import_module(name: str) -> Any:
        assert name == "cuda.bindings.driver"
        if isinstance(module, Exception):
            raise module
        return module

    monkeypatch.setattr(cuda, "_driver", None)
    monkeypatch.setattr(importlib, "import_module", import_module)


def _no_libcuda(flags: int) -> tuple[Any, ...]:
    raise RuntimeError("Failed to dlopen libcuda.so.1")


def test_check_unpacks_what_the_binding_returns(fake: Any) -> None:
    ok = fake.CUresult.CUDA_SUCCESS
    assert check((ok,), "f") is None
    assert check((ok, 7), "f") == 7
    assert check((ok, 7, 8), "f") == (7, 8)


def test_check_names_call_code_and_text(fake: Any) -> None:
    with pytest.raises(
        CudaError, match="cuThis failed with CUDA_ERROR_ILLEGAL_ADDRESS: fake text of 700"
    ) as e:
        check((fake.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, None), "cuThis")
    assert (e.value.call, e.value.code) == ("cuThis", "CUDA_ERROR_ILLEGAL_ADDRESS")
    assert isinstance(e.value, RuntimeError)


def test_missing_binding_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    _import_gives(monkeypatch, ImportError("No module named 'cuda'"))
    with pytest.raises(DriverNotFound, match="pip install 'cuda-bindings"):
        driver()


def test_missing_libcuda_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    _import_gives(monkeypatch, SimpleNamespace(cuInit=_no_libcuda))
    with pytest.raises(DriverNotFound, match=r"libcuda\.so\.1.*install NVIDIA's driver.*\"cpu\" or \"null\""):
        Device("cuda").activate()


def test_a_driver_without_a_device_is_an_error_of_cuInit(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: N802
    no_device = fake.CUresult.CUDA_ERROR_INVALID_VALUE
    broken = SimpleNamespace(
        cuInit=lambda flags: (no_device,),
        cuGetErrorName=fake.cuGetErrorName,
        cuGetErrorString=fake.cuGetErrorString,
    )
    _import_gives(monkeypatch, broken)
    with pytest.raises(CudaError, match="cuInit failed"):
        driver()
    with pytest.raises(CudaError, match="cuInit failed"):  # and it is asked again, not remembered as found
        driver()


def test_driver_is_initialised_once(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[int] = []
    module = SimpleNamespace(cuInit=lambda f: (flags.append(f), (0,))[1])
    _import_gives(monkeypatch, module)
    assert driver() is module
    assert driver() is module
    assert flags == [0]


def test_context_is_retained_once_and_made_current_in_each_thread(fake: Any) -> None:
    def work() -> None:
        Device("cuda").activate()
        check(driver().cuCtxSynchronize(), "cuCtxSynchronize")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert fake.count("cuDevicePrimaryCtxRetain") == 1
    assert fake.count("cuCtxSetCurrent") == 4
    with pytest.raises(CudaError, match="INVALID_CONTEXT"):  # this thread activated nothing
        check(driver().cuCtxSynchronize(), "cuCtxSynchronize")


def test_calls_that_take_memory_or_may_wait_are_counted(fake: Any) -> None:
    device = Device("cuda", 0)
    start = cuda.DriverCounts.now()
    stream, event, memory = Stream(device), Event(device), Allocation(device, 64)
    stream.memset_async(memory.ptr, 0, 64)
    event.record(stream)
    assert not event.query()
    assert cuda.DriverCounts.now() == (start.allocations + 1, start.waits)  # asking is not waiting
    event.synchronize()
    stream.close()
    assert cuda.DriverCounts.now() == (start.allocations + 1, start.waits + 2)
    fake.fail["cuMemHostAlloc"] = 2
    with pytest.raises(OutOfMemory):
        PinnedBuffer(device, 64)
    assert cuda.DriverCounts.now().allocations == start.allocations + 2  # a refused call was a call
