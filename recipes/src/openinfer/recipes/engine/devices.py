"""The devices of an engine: one, or one a rank."""

from __future__ import annotations

import logging

from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.engine.options import Options
from openinfer.tensor import CudaError, Device, DriverNotFound

log = logging.getLogger("openinfer.engine")


def open_device(name: str) -> Device:
    """The device of a flag; auto: a GPU if there is one."""
    if name != "auto":
        return Device.parse(name)
    try:
        device = Device("cuda", 0)
        log.info("device: %s, %s", device, device.name)
        return device
    except DriverNotFound:
        log.info("device: cpu, as there is no NVIDIA driver; --device cuda says what is missing")
        return Device("cpu")
    except CudaError as e:
        log.info("device: cpu (no usable GPU: %s)", e)
        return Device("cpu")


def devices_of(options: Options) -> list[str]:
    """The device of each rank. Raises SetupError."""
    size, given = options.tensor_parallel_size, options.device_ids
    if given is None and size == 1:
        return [options.device]
    if options.device == "cpu":
        if given is not None:
            raise SetupError(f"--device-ids {given} names GPUs; leave it out with --device cpu")
        return ["cpu"] * size
    if options.device not in ("auto", "cuda"):
        raise SetupError(f"--device {options.device} names one GPU: name them by --device-ids alone")
    if options.device == "auto" and given is None and open_device("auto").kind == "cpu":
        return ["cpu"] * size
    ids = list(map(str, range(size))) if given is None else given.split(",")
    if len(set(ids)) != size or not all(part.isdecimal() for part in ids):
        wanted = "one GPU by number" if size == 1 else f"{size} different GPUs by number, as in 0,1"
        raise SetupError(f"--device-ids {given}: name {wanted}")
    return [f"cuda:{part}" for part in ids]
