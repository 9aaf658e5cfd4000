"""The recipe as the command line sees it. Importing this imports no model code."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openinfer.frontend.contract import EngineSpec


class Qwen35Recipe:
    """Serves the text model of Qwen3.5 checkpoints, dense and mixtures of experts."""

    name = "qwen3_5"

    def matches(self, config: Mapping[str, object]) -> bool:
        """Whether config.json is a Qwen3.5's, with or without a vision tower."""
        return config.get("model_type") in ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The engine's flags, named as users of vLLM know them."""
        add = parser.add_argument_group("engine (qwen3_5)").add_argument
        add(
            "--device",
            default="auto",
            help="auto (a GPU if there is one), cuda, cuda:N or cpu; default: %(default)s",
        )
        add(
            "--dtype",
            choices=("auto", "bfloat16", "float32"),
            default="auto",
            help="auto, bfloat16 or (cpu only) float32; auto: bfloat16 on a GPU, else float32",
        )
        add(
            "--max-model-len",
            type=int,
            help="tokens of a sequence, prompt and output; default: what the model and the cache allow",
        )
        add("--max-num-seqs", type=int, default=256, help="sequences that run at once; default: %(default)s")
        add(
            "--max-num-batched-tokens",
            type=int,
            help="tokens of a step; default: 2048 on a GPU, 512 on a CPU",
        )
        add(
            "--max-num-queued-reqs",
            type=int,
            default=1024,
            help="requests that may wait; default: %(default)s",
        )
        self._add_memory(add)

    def _add_memory(self, add: Callable[..., argparse.Action]) -> None:
        """What memory is used for, and how steps are run."""
        add(
            "--gpu-memory-utilization",
            type=float,
            default=0.9,
            help="part of the GPU's memory to take; default: %(default)s",
        )
        add(
            "--kv-cache-memory-bytes",
            type=int,
            help="KV cache and recurrent states in bytes, instead of what the memory leaves (cpu: 2 GiB)",
        )
        add(
            "--block-size",
            type=int,
            default=16,
            help="tokens of a cache page: 16, 32 or 64; default: %(default)s",
        )
        add(
            "--enforce-eager",
            action="store_true",
            help="launch kernels one by one instead of replaying graphs",
        )
        add(
            "--enable-prefix-caching",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="share cached prefixes",
        )
        add(
            "--snapshot-interval",
            type=int,
            default=512,
            help="tokens between snapshots of a prompt's recurrent state, where a cached prefix can end (besides "
            "the prompt's end and the powers of two below): a multiple of 64; default: %(default)s",
        )
        add(
            "--scheduling-policy",
            default="fcfs",
            help="fcfs, priority, fair-share, deadline, longest-prefix, or your own as MODULE:FUNCTION (called with "
            "max_batched_tokens=N); options behind commas, as in deadline,ttft_s=0.2,tpot_s=0.02; default: %(default)s",
        )
        add(
            "--batch-invariant",
            action="store_true",
            help="not possible with this model: how a prompt is cut into steps changes the rounding of its states",
        )
        add(
            "--trace",
            metavar="FILE",
            help="write the last 256 steps there at the end, for chrome://tracing or ui.perfetto.dev: host phases and "
            "kernels (through CUPTI, where it is installed); steps get slower",
        )

    def engine_spec(self, model_dir: Path, args: argparse.Namespace) -> EngineSpec:
        """All the flags above, by name. Raises ValueError for the one that this model cannot have."""
        if args.batch_invariant:
            raise ValueError(
                "--batch-invariant is not possible with qwen3_5: how a prompt is cut into steps changes what the delta "
                "rule's kernels round; leave the flag out"
            )
        names = (
            "device", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_num_queued_reqs",
            "gpu_memory_utilization", "kv_cache_memory_bytes", "block_size", "enforce_eager", "enable_prefix_caching",
            "snapshot_interval", "scheduling_policy", "trace",
        )  # fmt: skip
        kwargs = {"model_dir": str(model_dir), **{name: getattr(args, name) for name in names}}
        from openinfer.frontend.contract import EngineSpec

        return EngineSpec("openinfer.recipes.qwen3_5.startup:build", kwargs)


RECIPE = Qwen35Recipe()
