"""The devices of an engine: one, or one a rank; and what each of several engines of one model gets."""

import dataclasses
import json
import logging
from pathlib import Path

from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.engine.options import O, Options, flag_of
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


def split(options: O, count: int) -> list[O]:
    """The options of `count` engines. Raises SetupError for options that only one engine can have, InvalidConfig for
    events whose ports overlap."""
    for name, why in (
        ("kv_transfer_config", "peers find an engine by its address, so start a server for each replica"),
        ("trace", "the file is of one engine"),
    ):
        if getattr(options, name):
            raise SetupError(f"{flag_of(name)} is not possible with --data-parallel-size: {why}")
    size = options.tensor_parallel_size
    devices = devices_of(dataclasses.replace(options, tensor_parallel_size=count * size))
    events: list[str | None] = [None] * count
    if options.kv_events_config is not None:
        try:
            from openinfer.kvpool.publisher import EventsConfig
        except ImportError as error:
            raise SetupError(f"--kv-events-config: {error}") from None
        each = EventsConfig.parse(options.kv_events_config).split(count)
        events = [json.dumps(dataclasses.asdict(one)) for one in each]
    return [_replica(options, n, count, devices[n * size : (n + 1) * size], events[n]) for n in range(count)]


def _replica(options: O, index: int, count: int, devices: list[str], events: str | None) -> O:
    host, folder, disk = options.kv_offload_gb, options.kv_offload_dir, options.kv_offload_disk_gb
    ranks = len(devices) > 1 and devices[0] != "cpu"
    return dataclasses.replace(
        options,
        device="cuda" if ranks else devices[0],
        device_ids=",".join(device.removeprefix("cuda:") for device in devices) if ranks else None,
        kv_offload_gb=None if host is None else host / count,
        kv_offload_dir=None if folder is None else str(Path(folder) / f"replica-{index}"),
        kv_offload_disk_gb=None if disk is None else disk / count,
        kv_events_config=events,
    )
