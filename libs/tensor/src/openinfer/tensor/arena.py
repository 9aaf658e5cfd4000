"""Arena: one allocation, cut up front to back and never given back piece by piece."""

import sys
from collections.abc import Sequence

from openinfer.tensor import dtypes
from openinfer.tensor.device import Device
from openinfer.tensor.dtypes import DType
from openinfer.tensor.errors import ClosedError, DeviceError, OutOfMemory, ShapeError
from openinfer.tensor.mapped import MappedMemory
from openinfer.tensor.memory import ALIGNMENT, Allocation, num_elements
from openinfer.tensor.tensor import Tensor

_UNBOUNDED = sys.maxsize // 2  # leaves every null address below 2**63


class Arena:
    """`capacity` bytes of device memory, handed out in order at stable addresses. Not thread-safe.

    On null the addresses are made up and `capacity_bytes` may be None for no bound: run an engine's
    allocations there and `used` is the memory it needs. (`capacity` is then a number no plan reaches.)
    Raises OutOfMemory at once where the device cannot give the whole capacity.

    mapped: `give_back` and `take_back` are possible, while addresses and tensors stay.

    `close()` (or leaving the `with` block) gives up the arena's hold; the memory goes back to the device
    when the last tensor that views it is gone.
    """

    __slots__ = ("_memory", "capacity", "device", "used")

    def __init__(self, device: Device, capacity_bytes: int | None, *, mapped: bool = False) -> None:
        if capacity_bytes is None and device.kind != "null":
            raise ShapeError(f"an arena on {device} needs a capacity in bytes; only null may be unbounded")
        if capacity_bytes is not None and capacity_bytes <= 0:
            raise ShapeError(f"an arena of {capacity_bytes} bytes; ask for at least one")
        self.device = device
        self.capacity = _UNBOUNDED if capacity_bytes is None else capacity_bytes
        self.used = 0
        reserve = 1 << 46 if capacity_bytes is None else capacity_bytes
        self._memory: Allocation | None = (MappedMemory if mapped else Allocation)(device, reserve)

    @property
    def remaining(self) -> int:
        """Bytes not handed out. The next allocation may lose up to 255 of them to alignment."""
        return self.capacity - self.used

    def alloc(self, shape: Sequence[int], dtype: DType | type | str, name: str = "") -> Tensor:
        """An uninitialised tensor at the next 256-byte boundary. Raises OutOfMemory, ClosedError, ShapeError."""
        memory = self._open()
        dtype, shape = dtypes.of(dtype), tuple(shape)
        nbytes = num_elements(shape) * dtype.itemsize
        start = -(-self.used // ALIGNMENT) * ALIGNMENT
        if start + nbytes > self.capacity:
            raise OutOfMemory(
                f"{name or 'tensor'} {dtype}{list(shape)} needs {nbytes} bytes; the arena on {self.device} "
                f"has used {self.used} of {self.capacity}; plan with a null arena, or make this one larger"
            )
        self.used = start + nbytes
        return Tensor(memory.ptr + start, shape, dtype, self.device, None, memory, name)

    @property
    def mapped(self) -> bool:
        """Whether the memory can be given back."""
        return isinstance(self._memory, MappedMemory)

    @property
    def base(self) -> int:
        """The address of the first byte. Raises ClosedError."""
        return self._open().ptr

    def give_back(self) -> None:
        """Give the device's memory back. Tensors keep their addresses and lose what they held. The device must be idle,
        and no tensor may be used until `take_back`. Raises DeviceError, ClosedError."""
        self._mapped().give_back()

    def take_back(self) -> None:
        """Take memory again for the same addresses. The content of tensors is not defined. Raises OutOfMemory,
        DeviceError."""
        self._mapped().take_back()

    def _mapped(self) -> MappedMemory:
        memory = self._open()
        if not isinstance(memory, MappedMemory):
            raise DeviceError(f"this arena on {self.device} cannot be given back; make it with mapped=True")
        return memory

    def _open(self) -> Allocation:
        if self._memory is None:
            raise ClosedError(f"this arena on {self.device} is closed; make a new one")
        return self._memory

    def close(self) -> None:
        """Give up the memory; see the class. Calling it again does nothing."""
        self._memory = None

    def __enter__(self) -> "Arena":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Arena({self.device}, {self.used} of {self.capacity} bytes used)"
