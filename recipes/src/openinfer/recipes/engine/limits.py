"""The flags, checked against the model and the device: every size of an engine, decided before memory is taken."""

import dataclasses
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from openinfer.kernels.authoring import FP8_CACHE, AdapterSizes, CacheForm
from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.engine.options import Options
from openinfer.scheduler import GuardedDrafters
from openinfer.tensor import Device, bfloat16, dtypes, float32, format_bytes

if TYPE_CHECKING:
    from openinfer.recipes.engine.blueprint import Blueprint

log = logging.getLogger("openinfer.engine")

OUTSIDE_BYTES = 1 << 30
"""Device memory that is not in the arena: the context, cubins, cuBLASLt, graph executables."""
CPU_CACHE_BYTES = 2 << 30
LONE_TOKENS = ((4096,), (4096, 8192))
"""Chunks of a prompt that is alone in its step; and of mixtures, which read an expert's weights for few tokens each."""
LONE_STEPS = 8
"""A size of these stays where the cache has room for as many chunks of it."""
CACHE_FORMS = {"auto": None, "bfloat16": CacheForm(bfloat16), "fp8": FP8_CACHE, "fp8_e4m3": FP8_CACHE}
"""The forms of the cache by --kv-cache-dtype. None: numbers of --dtype."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes of an engine. page_size: tokens of an entry of a block table. max_drafts: of a row in a step. proposes:
    layers of the model make the drafts. lone_tokens: see Buckets."""

    max_model_len: int
    max_rows: int
    max_tokens: int
    page_size: int
    dtype: np.dtype[Any]
    cache: CacheForm
    adapters: AdapterSizes | None = None
    max_drafts: int = 0
    proposes: bool = False
    lone_tokens: tuple[int, ...] = ()

    @property
    def step_tokens(self) -> int:
        """Tokens of the largest step."""
        return max((self.max_tokens, *self.lone_tokens))

    @property
    def max_logits(self) -> int:
        """Rows of the buffer of logits: a row with drafts has logits after each of them."""
        return self.max_rows * (1 + self.max_drafts)

    @property
    def max_blocks(self) -> int:
        """Entries of a block table."""
        return -(-self.max_model_len // self.page_size)


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes for the cache and states, beside `fixed_bytes` of weights and buffers."""

    nbytes: int
    device: Device
    fixed_bytes: int

    @classmethod
    def on(cls, device: Device, options: Options, fixed_bytes: int) -> "Room":
        """The room that the flags give, or that the device's free memory leaves."""
        if options.kv_cache_memory_bytes is not None:
            return cls(options.kv_cache_memory_bytes, device, fixed_bytes)
        if device.kind == "cpu":
            return cls(CPU_CACHE_BYTES, device, fixed_bytes)
        taken = device.total_memory - device.free_memory
        alone = cls.alone(device.total_memory, options, fixed_bytes)
        return cls(alone.nbytes - taken, device, fixed_bytes)

    @classmethod
    def alone(cls, memory_bytes: float, options: Options, fixed_bytes: int) -> "Room":
        """The room that the flags leave on a GPU of so much memory if nothing else is on it."""
        share = int(memory_bytes * options.gpu_memory_utilization) - OUTSIDE_BYTES - fixed_bytes
        wanted = options.kv_cache_memory_bytes
        return cls(share if wanted is None else min(wanted, share), Device("cuda"), fixed_bytes)

    def pages(self, limits: Limits, page_bytes: int) -> int:
        """Pages of a cache of nothing but pages, the padding page included: no more than every row at full length uses.
        Raises SetupError where they are too few to run one sequence."""
        pages = min(self.nbytes // page_bytes, limits.max_rows * limits.max_blocks + 1)
        if pages < 3:
            raise self.refusal("the KV cache")
        return pages

    def refusal(self, what: str, detail: str = "") -> SetupError:
        """The error for a room that is too small for `what`."""
        return SetupError(
            f"no room for {what}: {format_bytes(self.nbytes)} are left on {self.device} beside "
            f"{format_bytes(self.fixed_bytes)} of weights and buffers; {detail}lower --max-num-seqs or "
            "--max-num-batched-tokens, or raise --gpu-memory-utilization or --kv-cache-memory-bytes"
        )


def decide(options: Options, device: Device, blueprint: "Blueprint[Any]") -> Limits:
    """Choose the sizes that the flags leave open. Raises SetupError for a flag that the model or device cannot have."""
    if device.kind == "null":
        raise SetupError("--device null plans and runs nothing; use cpu or cuda")
    default = bfloat16 if device.kind == "cuda" else float32
    dtype = default if options.dtype == "auto" else dtypes.of(options.dtype)
    if device.kind == "cuda" and dtype != bfloat16:
        raise SetupError(
            f"--dtype {options.dtype} is not possible on {device}: cuda runs bfloat16, cpu float32 or bfloat16"
        )
    cache = CACHE_FORMS[options.kv_cache_dtype] or CacheForm(dtype)
    if not cache.scaled and cache.dtype != dtype:
        raise SetupError(
            "--kv-cache-dtype bfloat16 needs --dtype bfloat16; give both, or fp8, or leave it out"
        )
    if cache.scaled and cache not in blueprint.cache_forms:
        raise SetupError("--kv-cache-dtype: this model's recipe has no FP8 cache; leave the flag out")
    usual, longest = blueprint.config.max_position_embeddings, blueprint.config.max_positions
    wanted = usual if options.max_model_len is None else options.max_model_len
    if not 2 <= wanted <= longest:
        raise SetupError(f"--max-model-len {wanted}: this model has positions for 2 to {longest} tokens")
    if options.max_model_len is None and wanted < longest:
        log.info("max-model-len is %d; with YaRN --max-model-len may be up to %d", wanted, longest)
    usual = 2048 if device.kind == "cuda" else 512
    tokens = options.max_num_batched_tokens or max(usual, options.max_num_seqs)
    if tokens < options.max_num_seqs:
        raise SetupError(
            f"--max-num-batched-tokens {tokens} must be at least --max-num-seqs {options.max_num_seqs}"
        )
    chosen = device.kind != "cuda" or options.max_num_batched_tokens is not None
    adapters = AdapterSizes(options.max_loras, options.max_lora_rank) if options.enable_lora else None
    speculation = options.speculation()
    drafts = (speculation.num_speculative_tokens or blueprint.trained_drafts) if speculation else 0
    if speculation is not None and speculation.method == "custom_class":
        GuardedDrafters.named(speculation.model, 1)  # to refuse a wrong class before weights load
    return Limits(
        wanted, options.max_num_seqs, tokens, blueprint.page_size, dtype, cache, adapters, drafts, options.proposes,
        lone_tokens=() if chosen else tuple(n for n in LONE_TOKENS[blueprint.mixture] if n > tokens),
    )  # fmt: skip


def fit(limits: Limits, options: Options, capacity: int) -> Limits:
    """Make sequences fit a cache of `capacity` tokens: shorten the default length, refuse a chosen one."""
    if capacity >= limits.max_model_len:
        return limits
    if options.max_model_len is not None:
        raise SetupError(
            f"--max-model-len {options.max_model_len} needs as many tokens of cache; there is room for {capacity}: "
            "lower it, or raise --kv-cache-memory-bytes or --gpu-memory-utilization"
        )
    log.warning(
        "max-model-len is lowered from %d to %d: the cache holds no more", limits.max_model_len, capacity
    )
    return dataclasses.replace(limits, max_model_len=capacity)
