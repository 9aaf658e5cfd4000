"""Device: which memory and which processor is meant."""

from dataclasses import dataclass
from typing import Any, Literal, Self, cast, get_args

from openinfer.tensor import cuda
from openinfer.tensor.errors import DeviceError

Kind = Literal["cuda", "cpu", "null"]


class Closing:
    """A context manager whose end is `close()`."""

    __slots__ = ()

    def close(self) -> None:
        """Give everything back. Calling it again does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Device:
    """A device: `Device("cuda", 0)`, `Device("cpu")` or `Device("null")`. Frozen and hashable.

    "null" has addresses and no memory: engines plan memory and trace their kernels on it without a device.
    Making a Device touches no driver. Raises DeviceError for an unknown kind or an index that cannot be.
    """

    kind: Kind
    index: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise DeviceError(f'unknown device kind {self.kind!r}; use "cuda", "cpu" or "null"')
        if self.index < 0 or (self.index and self.kind != "cuda"):
            raise DeviceError(f"no device {self.kind}:{self.index}; only cuda devices are numbered, from 0")

    @staticmethod
    def parse(text: str) -> "Device":
        """The device that `str()` wrote: "cuda:1", "cuda" (the first), "cpu", "null"."""
        kind, colon, index = text.partition(":")
        if colon and not (index.isascii() and index.isdigit()):
            raise DeviceError(f'cannot read device {text!r}; write "cuda", "cuda:1", "cpu" or "null"')
        return Device(cast(Kind, kind), int(index or 0))

    def __str__(self) -> str:
        return f"cuda:{self.index}" if self.kind == "cuda" else self.kind

    def activate(self) -> None:
        """cuda: make this device's primary context current in the calling thread; cpu and null: nothing.

        Making a Stream, Event, Arena or PinnedBuffer does this. A thread that only uses some must call it once.
        """
        if self.kind == "cuda":
            cuda.make_current(self.index)

    @property
    def name(self) -> str:
        """The product's name ("NVIDIA H200"); "cpu" and "null" for those."""
        if self.kind != "cuda":
            return self.kind
        raw = cuda.check(cuda.driver().cuDeviceGetName(256, self._handle("name")), "cuDeviceGetName")
        return bytes(raw).split(b"\0")[0].decode()

    @property
    def arch(self) -> int:
        """Compute capability as one number: 90 for 9.0, 120 for 12.0."""
        major = self._attribute("arch", "COMPUTE_CAPABILITY_MAJOR")
        return 10 * major + self._attribute("arch", "COMPUTE_CAPABILITY_MINOR")

    @property
    def num_sms(self) -> int:
        """Streaming multiprocessors."""
        return self._attribute("num_sms", "MULTIPROCESSOR_COUNT")

    @property
    def shared_memory_per_block(self) -> int:
        """Bytes of shared memory one block can opt in to."""
        return self._attribute("shared_memory_per_block", "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")

    @property
    def total_memory(self) -> int:
        """Bytes of device memory."""
        handle = self._handle("total_memory")
        return int(cuda.check(cuda.driver().cuDeviceTotalMem(handle), "cuDeviceTotalMem"))

    @property
    def free_memory(self) -> int:
        """Free bytes of device memory: no process has taken these. Activates the device."""
        self._handle("free_memory")
        self.activate()
        return int(cuda.check(cuda.driver().cuMemGetInfo(), "cuMemGetInfo")[0])

    def _handle(self, wanted: str) -> Any:
        if self.kind != "cuda":
            raise DeviceError(f"{wanted} has no meaning on device {self}; only a cuda device knows it")
        return cuda.check(cuda.driver().cuDeviceGet(self.index), "cuDeviceGet")

    def _attribute(self, wanted: str, attribute: str) -> int:
        handle = self._handle(wanted)
        cu = cuda.driver()
        key = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
        return int(cuda.check(cu.cuDeviceGetAttribute(key, handle), "cuDeviceGetAttribute"))
