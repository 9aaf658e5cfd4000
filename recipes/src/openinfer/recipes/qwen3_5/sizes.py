"""The flags of an engine, its limits as they follow, and how the memory is shared out."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.qwen3_5.buckets import Boundaries
from openinfer.recipes.qwen3_5.config import Config
from openinfer.recipes.qwen3_5.ops.gated_delta_net import STATE_CHUNK
from openinfer.scheduler import Policy
from openinfer.tensor import Device, bfloat16, dtypes, float32

log = logging.getLogger("openinfer.qwen3_5")

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
    block_size: int = 16
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    snapshot_interval: int = 512
    scheduling_policy: str | Policy = "fcfs"
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """The limits of an engine, all decided."""

    max_model_len: int
    max_rows: int
    max_tokens: int
    block_size: int
    dtype: np.dtype[Any]
    boundaries: Boundaries

    @property
    def max_blocks(self) -> int:
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, slots=True)
class Room:
    """Pages of the cache and blocks of state, the padding ones included."""

    pages: int
    states: int


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
    if options.block_size not in (16, 32, 64):
        raise SetupError(f"--block-size {options.block_size}: 16, 32 and 64 are possible")
    if options.snapshot_interval < STATE_CHUNK or options.snapshot_interval % STATE_CHUNK:
        raise SetupError(
            f"--snapshot-interval {options.snapshot_interval}: it must be a multiple of {STATE_CHUNK} tokens"
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
    boundaries = Boundaries(options.snapshot_interval)
    return Sizes(wanted, options.max_num_seqs, tokens, options.block_size, dtype, boundaries)


def states_wanted(options: Options) -> int:
    """Blocks of state where there is room: one a row, as many again for snapshots, and the padding block."""
    return options.max_num_seqs * (2 if options.enable_prefix_caching else 1) + 1


def room_for(config: Config, sizes: Sizes, options: Options, device: Device, fixed_bytes: int) -> Room:
    """Pages of cache and blocks of state that the memory leaves room for, the padding ones included. States get no more
    than half of the room; with fewer blocks than rows, rows wait for one as they do for pages."""
    page = config.kv_bytes_per_token(sizes.dtype.itemsize) * sizes.block_size
    state = config.state_bytes(sizes.dtype.itemsize)
    if options.kv_cache_memory_bytes is not None:
        room = options.kv_cache_memory_bytes
    elif device.kind == "cpu":
        room = CPU_KV_BYTES
    else:
        taken = device.total_memory - device.free_memory
        room = int(device.total_memory * options.gpu_memory_utilization) - taken - OUTSIDE_BYTES - fixed_bytes
    states = min(states_wanted(options), room // 2 // state)
    # More pages than every row at full length are never used.
    pages = min((room - states * state) // page, sizes.max_rows * sizes.max_blocks + 1)
    if pages < 3 or states < 2:
        raise SetupError(
            f"no room for the KV cache and the recurrent states: {room / 1e9:.2f} GB are left on {device} beside "
            f"{fixed_bytes / 1e9:.2f} GB of weights and buffers; lower --max-num-seqs or "
            "--max-num-batched-tokens, or raise --gpu-memory-utilization or --kv-cache-memory-bytes"
        )
    return Room(pages, states)


def fit(sizes: Sizes, options: Options, found: Room) -> Sizes:
    """A sequence must fit the cache: shorten the default length, refuse a chosen one."""
    room = (found.pages - 1) * sizes.block_size
    if room >= sizes.max_model_len:
        return sizes
    if options.max_model_len is not None:
        raise SetupError(
            f"--max-model-len {options.max_model_len} needs as many tokens of KV cache; there is room for {room}"
        )
    log.warning(
        "max-model-len is lowered from %d to %d: the KV cache holds no more", sizes.max_model_len, room
    )
    return dataclasses.replace(sizes, max_model_len=room)
