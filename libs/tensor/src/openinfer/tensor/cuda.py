"""The one door to the CUDA driver: `driver()` finds it, `check()` reads every status it returns."""

import importlib
import threading
from typing import Any, NamedTuple

from openinfer.tensor.errors import CudaError, DriverNotFound

# The driver and its contexts are one a process. testing.fake_driver replaces both.
_driver: Any = None
_contexts: dict[int, Any] = {}
_lock = threading.Lock()

# Calls that take memory, and calls in which the host may wait for a device: none of them belongs in a steady step.
_ALLOCATE = ("cuMemAlloc", "cuMemHostAlloc", "cuModuleLoadData", "cuGraphInstantiate")
_WAIT = ("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize", "cuMemFree", "cuMemFreeHost")
_counts = dict.fromkeys((*_ALLOCATE, *_WAIT), 0)


class DriverCounts(NamedTuple):
    """Counts of this process's calls to the driver so far.

    allocations: calls that take memory of any kind. waits: calls that may make the host wait for a device."""

    allocations: int
    waits: int

    @classmethod
    def now(cls) -> "DriverCounts":
        """All calls that went through check()."""
        return cls(sum(_counts[call] for call in _ALLOCATE), sum(_counts[call] for call in _WAIT))


def driver() -> Any:
    """The module `cuda.bindings.driver`, imported and `cuInit`-ed on the first call.

    Call nothing that reaches here in a process that will fork workers: CUDA does not survive a fork.
    Raises DriverNotFound where libcuda or the binding is missing, CudaError where the driver finds no device.
    """
    global _driver
    if _driver is None:
        try:
            module = importlib.import_module("cuda.bindings.driver")
            status = module.cuInit(0)
        except ImportError as e:
            raise DriverNotFound(
                f"cannot import cuda.bindings.driver ({e}); run: pip install 'cuda-bindings>=13,<14'"
            ) from e
        except RuntimeError as e:  # the binding opens libcuda at its first call
            raise DriverNotFound(
                f"no CUDA driver on this machine ({e}); install NVIDIA's driver (580 or newer), in a "
                'container start it with GPU access, or use the device "cpu" or "null"'
            ) from e
        _check(module, status, "cuInit")
        _driver = module
    return _driver


def check(result: tuple[Any, ...], call: str) -> Any:
    """Unpack what a driver function returned: `(status,)`, `(status, value)` or `(status, v1, v2, ...)`.

    `call` is the function's name, which DriverCounts goes by; more may follow it for a message.
    Returns None, the value, or the tuple of values. Raises CudaError naming `call` if status is not success.
    """
    if call in _counts:
        _counts[call] += 1
    if result[0]:
        _check(driver(), result, call)
    if len(result) == 2:
        return result[1]
    return result[1:] or None


def make_current(index: int) -> Any:
    """Make the primary context of device `index` current in this thread, and return it. Retained on first use."""
    cu = driver()
    context = _contexts.get(index)
    if context is None:
        with _lock:
            context = _contexts.get(index)
            if context is None:
                handle = check(cu.cuDeviceGet(index), "cuDeviceGet")
                context = check(cu.cuDevicePrimaryCtxRetain(handle), "cuDevicePrimaryCtxRetain")
                _contexts[index] = context
    check(cu.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    return context


def _check(cu: Any, result: tuple[Any, ...], call: str) -> None:
    if result[0]:
        code, text = (_text(f, result[0]) for f in (cu.cuGetErrorName, cu.cuGetErrorString))
        raise CudaError(call, code, text)


def _text(query: Any, status: Any) -> str:
    failed, raw = query(status)
    return str(status) if failed else bytes(raw).decode()
