"""DeviceClock: how fast a GPU's multiprocessors run now, and what slows them, by NVML."""

import logging
from typing import Any, NamedTuple

from openinfer.tensor import cuda
from openinfer.tensor.cuda import check
from openinfer.tensor.device import Device

log = logging.getLogger("openinfer.tensor")

_IDLE = 1
"""The bit of ClocksEventReasons that says that nothing runs."""
_REASONS = {
    0x2: "set by an application",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "temperature",
    0x40: "temperature (hardware)",
    0x80: "power brake",
    0x100: "display clock",
}


class ClockReading(NamedTuple):
    """The clock of the multiprocessors and its most, in MHz, and what keeps it down."""

    mhz: int
    most_mhz: int
    reasons: tuple[str, ...]


class DeviceClock:
    """Reads the clock of a CUDA device. Make it by `of`. A reading waits for no kernel."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._sm = nvml.ClockType.CLOCK_SM
        self._most = int(nvml.device_get_max_clock_info(handle, self._sm))

    @classmethod
    def of(cls, device: Device) -> "DeviceClock | None":
        """The clock of a device; None for a CPU, and where NVML does not work, which the log says."""
        if device.kind != "cuda":
            return None
        try:
            from cuda.bindings import nvml

            cu = cuda.driver()
            number = check(cu.cuDeviceGet(device.index), "cuDeviceGet")
            bus = bytes(check(cu.cuDeviceGetPCIBusId(32, number), "cuDeviceGetPCIBusId"))
            nvml.init_v2()
            return cls(nvml, nvml.device_get_handle_by_pci_bus_id_v2(bus.split(b"\0")[0].decode()))
        except Exception as error:  # clocks are no reason not to serve, whatever NVML raises
            log.info("no clocks in traces of slow steps: %s: %s", type(error).__name__, error)
            return None

    def read(self) -> ClockReading:
        """The clock now."""
        nvml, handle = self._nvml, self._handle
        bits = int(nvml.device_get_current_clocks_event_reasons(handle)) & ~_IDLE
        reasons = tuple(text for bit, text in _REASONS.items() if bits & bit)
        return ClockReading(int(nvml.device_get_clock_info(handle, self._sm)), self._most, reasons)
