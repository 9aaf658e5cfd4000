"""The options of each of several engines of one model: its devices, and its part of host memory and disk."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from openinfer.recipes.engine.devices import devices_of
from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.engine.options import O, flag_of


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
    events = _events(options.kv_events_config, count)
    return [
        dataclasses.replace(
            _replica(options, index, count, devices[index * size : (index + 1) * size]),
            kv_events_config=events[index],
        )
        for index in range(count)
    ]


def _events(config: str | None, count: int) -> list[str | None]:
    """--kv-events-config of each replica."""
    if config is None:
        return [None] * count
    try:
        from openinfer.kvpool.publisher import EventsConfig
    except ImportError as error:
        raise SetupError(f"--kv-events-config: {error}") from None
    return [json.dumps(dataclasses.asdict(one)) for one in EventsConfig.parse(config).split(count)]


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
