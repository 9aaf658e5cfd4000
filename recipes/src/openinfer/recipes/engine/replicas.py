"""The options of each of several engines of one model: its devices, and its part of host memory and disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from openinfer.recipes.engine.devices import devices_of
from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.engine.options import O, flag_of


def split(options: O, count: int) -> list[O]:
    """The options of `count` engines. Raises SetupError for options that only one engine can have."""
    for name, why in (
        ("kv_events_config", "routers follow servers, so start a server for each replica"),
        ("kv_transfer_config", "peers find an engine by its address, so start a server for each replica"),
        ("trace", "the file is of one engine"),
        ("enable_sleep_mode", "a replica that is restarted would be awake, among others that sleep"),
    ):
        if getattr(options, name):
            raise SetupError(f"{flag_of(name)} is not possible with --data-parallel-size: {why}")
    size = options.tensor_parallel_size
    devices = devices_of(dataclasses.replace(options, tensor_parallel_size=count * size))
    return [
        _replica(options, index, count, devices[index * size : (index + 1) * size]) for index in range(count)
    ]


def _replica(options: O, index: int, count: int, devices: list[str]) -> O:
    host, folder, disk = options.kv_offload_gb, options.kv_offload_dir, options.kv_offload_disk_gb
    ranks = len(devices) > 1 and devices[0] != "cpu"
    return dataclasses.replace(
        options,
        device="cuda" if ranks else devices[0],
        device_ids=",".join(device.removeprefix("cuda:") for device in devices) if ranks else None,
        kv_offload_gb=None if host is None else host / count,
        kv_offload_dir=None if folder is None else str(Path(folder) / f"replica-{index}"),
        kv_offload_disk_gb=None if disk is None else disk / count,
    )
