"""The flags of an engine, its limits as they follow, and how the memory is shared out."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from openinfer.recipes.deepseek_v4.config import Config
from openinfer.recipes.deepseek_v4.ops.common import PAGE
from openinfer.recipes.engine.errors import SetupError
from openinfer.scheduler import Policy
from openinfer.tensor import Device, bfloat16, dtypes, float32

log = logging.getLogger("openinfer.deepseek_v4")

OUTSIDE_BYTES = 1 << 30
"""Device memory that is not in the arena: the context, cubins, cuBLASLt, graph executables."""


CPU_KV_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Options:
    """The recipe's flags. Zero or None: chosen at start-up, and said in the log."""

    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    max_num_queued_reqs: int = 1024
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    activation_quantization: str = "on"
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    scheduling_policy: str | Policy = "fcfs"
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """The limits of an engine, all decided."""

    max_model_len: int
    max_rows: int
    max_tokens: int
    dtype: np.dtype[Any]
    quantized: bool

    @property
    def max_blocks(self) -> int:
        return -(-self.max_model_len // PAGE)


class Room(NamedTuple):
    """Pages of the window group and of the entries group, the padding ones included."""

    window: int
    entries: int


def decide_sizes(config: Config, options: Options, device: Device) -> Sizes:
    """Check the flags against the model and the device, and fill in what they leave open."""
    if device.kind == "null":
        raise SetupError("--device null plans and runs nothing; use cpu or cuda")
    default = bfloat16 if device.kind == "cuda" else float32
    dtype = default if options.dtype == "auto" else dtypes.of(options.dtype)
    if dtype not in (bfloat16, float32) or (device.kind == "cuda" and dtype != bfloat16):
        raise SetupError(
            f"--dtype {options.dtype} is not possible on {device}: cuda runs bfloat16, cpu float32 or bfloat16"
        )
    if options.activation_quantization not in ("on", "off"):
        raise SetupError(
            f"--activation-quantization {options.activation_quantization}: on and off are possible"
        )
    if options.max_num_seqs < 1 or options.max_num_queued_reqs < 1:
        raise SetupError("--max-num-seqs and --max-num-queued-reqs must be at least 1")
    if not 0 < options.gpu_memory_utilization <= 1:
        raise SetupError(f"--gpu-memory-utilization {options.gpu_memory_utilization}: it must be in (0, 1]")
    limit = config.max_position_embeddings
    wanted = limit if options.max_model_len is None else options.max_model_len
    if not 2 <= wanted <= limit:
        raise SetupError(f"--max-model-len {wanted}: this model has positions for 2 to {limit} tokens")
    tokens = options.max_num_batched_tokens or max(
        2048 if device.kind == "cuda" else 512, options.max_num_seqs
    )
    if tokens < options.max_num_seqs:
        raise SetupError(
            f"--max-num-batched-tokens {tokens} must be at least --max-num-seqs {options.max_num_seqs}"
        )
    return Sizes(wanted, options.max_num_seqs, tokens, dtype, options.activation_quantization == "on")


def room_for(config: Config, sizes: Sizes, options: Options, device: Device, fixed_bytes: int) -> Room:
    """Pages of both groups that the memory leaves room for, the padding ones included.

    Entries are kept as long as their sequence: there is room for the longest that --max-model-len asks for. Of the
    window group rows need few pages, but each place where a cached prefix can end is one, so with the prefix cache it
    gets half of the room (with which prefixes are found best: kvpool's bench_eviction.py)."""
    window, entry = (
        config.window_page_bytes(sizes.dtype.itemsize),
        config.entry_page_bytes(sizes.dtype.itemsize),
    )
    if options.kv_cache_memory_bytes is not None:
        room = options.kv_cache_memory_bytes
    elif device.kind == "cpu":
        room = CPU_KV_BYTES
    else:
        taken = device.total_memory - device.free_memory
        room = int(device.total_memory * options.gpu_memory_utilization) - taken - OUTSIDE_BYTES - fixed_bytes
    most = sizes.max_rows * sizes.max_blocks + 1  # every row at full length
    least = min(3, most)  # the window may lie on two pages
    longest = sizes.max_blocks + 1 if options.max_model_len is not None else 0
    windows = max(least, min(most, room // 2 // window, (room - longest * entry) // window))
    two_steps = 2 * sizes.max_tokens
    busy = window_pages(sizes.max_rows, two_steps, sizes.max_model_len) + 1
    if not options.enable_prefix_caching:
        windows = min(windows, busy)
    entries = min(most, (room - windows * window) // entry) if entry else most
    if room < windows * window or entries < least:
        raise SetupError(
            f"no room for the cache: {room / 1e9:.2f} GB are left on {device} beside {fixed_bytes / 1e9:.2f} GB of "
            f"weights and buffers; a page for windows takes {window / 1e6:.1f} MB, one for entries "
            f"{entry / 1e6:.1f} MB, and {least} of each are needed; lower --max-num-seqs or --max-num-batched-tokens, "
            "or raise --gpu-memory-utilization or --kv-cache-memory-bytes"
        )
    windows = min(windows, entries)
    if windows < busy:
        log.warning(
            "%d pages for windows, where %d sequences in full steps use %d: some will wait or be preempted",
            windows - 1, sizes.max_rows, busy - 1,
        )  # fmt: skip
    return Room(windows, entries)


def window_pages(rows: int, tokens: int, longest: int) -> int:
    """Pages of the window group that are enough for rows of at most `longest` tokens, `tokens` of them being written:
    of each row the two that the window may lie on and one that it writes, and those that prompts write beyond that."""
    return min(3 * rows + -(-tokens // PAGE), rows * -(-longest // PAGE))


def fit(sizes: Sizes, options: Options, found: Room) -> Sizes:
    """A sequence must fit the cache: shorten the default length, refuse a chosen one."""
    room = (found.entries - 1) * PAGE
    if room >= sizes.max_model_len:
        return sizes
    if options.max_model_len is not None:
        raise SetupError(
            f"--max-model-len {options.max_model_len} needs entries for as many tokens; beside {found.window} pages "
            f"for windows there is room for {room}: lower it, or raise --kv-cache-memory-bytes or "
            "--gpu-memory-utilization"
        )
    log.warning(
        "max-model-len is lowered from %d to %d: the KV cache holds no more", sizes.max_model_len, room
    )
    return dataclasses.replace(sizes, max_model_len=room)
