"""The recipe as the command line sees it. Importing this imports no model code."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openinfer.frontend.contract import EngineSpec


class DeepseekV4Recipe:
    """Serves DeepSeek-V4 checkpoints."""

    name = "deepseek_v4"

    def matches(self, config: Mapping[str, object]) -> bool:
        """Whether config.json is a DeepSeek-V4's."""
        return config.get("model_type") == "deepseek_v4"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The engine's flags, named as users of vLLM know them."""
        add = parser.add_argument_group("engine (deepseek_v4)").add_argument
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
            help="both groups of the cache in bytes, instead of what the memory leaves (cpu: 2 GiB)",
        )
        add(
            "--activation-quantization",
            choices=("on", "off"),
            default="on",
            help="on: round activations, cached vectors and the indexer to FP8 and FP4 where the published code does, "
            "for which the weights were trained; default: %(default)s",
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
            "--scheduling-policy",
            default="fcfs",
            help="fcfs, priority, fair-share, deadline, longest-prefix, or your own as MODULE:FUNCTION (called with "
            "max_batched_tokens=N); options behind commas, as in deadline,ttft_s=0.2,tpot_s=0.02; default: %(default)s",
        )
        add(
            "--trace",
            metavar="FILE",
            help="write the last 256 steps there at the end, for chrome://tracing or ui.perfetto.dev: host phases and "
            "kernels (through CUPTI, where it is installed); steps get slower",
        )

    def engine_spec(self, model_dir: Path, args: argparse.Namespace) -> EngineSpec:
        """All the flags above, by name."""
        names = (
            "device", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_num_queued_reqs",
            "gpu_memory_utilization", "kv_cache_memory_bytes", "activation_quantization", "enforce_eager",
            "enable_prefix_caching", "scheduling_policy", "trace",
        )  # fmt: skip
        kwargs = {"model_dir": str(model_dir), **{name: getattr(args, name) for name in names}}
        from openinfer.frontend.contract import EngineSpec

        return EngineSpec("openinfer.recipes.deepseek_v4.startup:build", kwargs)


RECIPE = DeepseekV4Recipe()
