"""Options: an engine's flags in one place. Parser, help, refusals and the flag reference are made from the fields."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from openinfer.frontend.flag_parser import NOT_POSSIBLE
from openinfer.frontend.flag_types import number, tokens
from openinfer.recipes.engine.errors import SetupError

if TYPE_CHECKING:
    from openinfer.graph import Buckets, StepPace
    from openinfer.graph.runner import Drafting, NoDrafts
    from openinfer.kvpool import Eviction, Group
    from openinfer.recipes.engine.speculation import SpeculativeConfig
    from openinfer.scheduler import Policy

T = TypeVar("T")


def option(
    default: T, text: str, *, kind: Callable[[str], Any] | None = None, choices: Sequence[T] | None = None,
    metavar: str | None = None, many: bool = False, within: tuple[float, float] | None = None,
) -> T:  # fmt: skip
    """A field of Options. text: its help. kind: the type of the command line's word, else that of the default, or str;
    bool makes a flag without a word, with `--no-` where the default is True. many: of one word or more. within: the
    least and the greatest number."""
    kind = kind or (type(default) if isinstance(default, bool | int | float) else str)
    given = {"kind": kind, "choices": choices, "metavar": metavar, "many": many, "within": within}
    made: Any = dataclasses.field(default=default, metadata={"text": text, **given})
    return cast(T, made)


@dataclass(frozen=True, slots=True)
class Options:
    """The flags of every engine. None: chosen at start-up, and logged.

    A recipe adds flags in a subclass. `refused` maps fields that its models cannot have to the reason. `draft_methods`
    are the methods of --speculative-config that its models can have.
    """

    refused: ClassVar[Mapping[str, str]] = {
        "quantization": "its weights are taken as they are published",
        "activation_quantization": "its checkpoints have no quantised activations",
    }
    draft_methods: ClassVar[tuple[str, ...]] = ("ngram", "suffix", "custom_class")

    device: str = option("auto", "auto (a GPU if there is one), cuda, cuda:N or cpu")
    tensor_parallel_size: int = option(1, "GPUs that share the model, or processes on a CPU", within=(1, 64))
    device_ids: str | None = option(
        None, "GPUs that share the model, as in 0,1; default: the first", metavar="LIST"
    )
    dtype: str = option(
        "auto", "auto: bfloat16 on a GPU, float32 on a CPU", choices=("auto", "bfloat16", "float32")
    )
    kv_cache_dtype: str = option(
        "auto",
        "auto: that of --dtype; fp8 (or fp8_e4m3): half of bfloat16's bytes, a scale for each head of a token",
        choices=("auto", "bfloat16", "fp8", "fp8_e4m3"),
    )
    quantization: str | None = option(
        None,
        "fp8: make FP8 of a plain checkpoint's projections, by row (experts: by block); packed ones need no flag",
        choices=("fp8",),
    )
    activation_quantization: str = option(
        "on",
        "on: quantise activations to FP8 where config.json or --quantization fp8 says so; off: multiply FP8 weights "
        "with activations of --dtype, which is slower from 8 rows on",
        choices=("on", "off"),
    )
    load_format: str = option(
        "safetensors", "dummy: random weights, config.json is enough", choices=("safetensors", "dummy")
    )
    max_model_len: int | None = option(
        None, "tokens of prompt and output; default: what model and cache allow", kind=tokens
    )
    max_num_seqs: int = option(256, "sequences that run at once", within=(1, 1 << 16))
    max_num_batched_tokens: int | None = option(
        None,
        "tokens of a step; default: 512 on a CPU, 2048 on a GPU (4096 of a lone prompt, 8192 with experts)",
        kind=number,
        within=(1, 1 << 20),
    )
    max_num_queued_reqs: int = option(1024, "requests that may wait", within=(1, 1 << 30))
    gpu_memory_utilization: float = option(0.9, "part of the GPU's memory to take")
    kv_cache_memory_bytes: int | None = option(
        None,
        "bytes for cache and states; default: what is left (cpu: 2 GiB)",
        kind=number,
        within=(1, 1 << 50),
    )
    block_size: int = option(16, "tokens of a cache page", choices=(16, 32, 64))
    enforce_eager: bool = option(False, "launch kernels one by one instead of replaying graphs")
    enable_prefix_caching: bool = option(True, "share cached prefixes")
    scheduling_policy: "str | Policy" = option(  # noqa: RUF009
        "fcfs",
        "fcfs, priority, fair-share, deadline, longest-prefix, or your own as MODULE:FUNCTION (called with "
        "max_batched_tokens=N); options behind commas, as in deadline,ttft_s=0.2,tpot_s=0.02",
    )
    eviction_policy: "str | Callable[[Group], Eviction]" = option(  # noqa: RUF009
        "auto",
        "order of eviction: lru, lineage, priority, s3fifo, or MODULE:CLASS (called with a group); auto: lru, s3fifo "
        "for windows",
    )
    batch_invariant: bool = option(
        False,
        "one kernel an op and no splits, so that other rows of a step change no bit of a row's logits; slower, "
        "on a CPU two to four times",
    )
    enable_lora: bool = option(False, "serve adapters (LoRA) of the model beside it")
    max_loras: int = option(1, "adapters of a step, each with a place on the device", within=(1, 1024))
    max_lora_rank: int = option(16, "the largest rank of an adapter", choices=(8, 16, 32, 64, 128, 256, 512))
    lora_modules: Sequence[str] = option(
        (), "adapters to load first: folders of PEFT by the names of requests", metavar="NAME=PATH", many=True
    )
    speculative_config: str | None = option(
        None,
        "verify drafts, which changes no token; JSON with vLLM's keys, as in "
        '{"method": "ngram", "num_speculative_tokens": 3}',
        metavar="JSON",
    )
    kv_events_config: str | None = option(
        None,
        "publish KV events, with token ids of prompts, for routers, as in "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}',
        metavar="JSON",
    )
    kv_offload_gb: float | None = option(
        None, "GB of host memory for cached prefixes that leave the device's memory", kind=float
    )
    kv_offload_dir: str | None = option(
        None,
        "folder for such prefixes, which survive a restart; its files tell of the prompts, so protect them alike",
        metavar="DIR",
    )
    kv_offload_disk_gb: float | None = option(None, "GB of --kv-offload-dir to use at most", kind=float)
    kv_transfer_config: str | None = option(
        None,
        "share KV with other engines; JSON with vLLM's keys, as in "
        '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}; TcpConnector needs no other package',
        metavar="JSON",
    )
    kv_peer: Sequence[str] = option(
        (),
        "engines with --kv-transfer-config to ask for prefixes of prompts; HOST:* or NETWORK/BITS:* allows requests to "
        "name peers",
        metavar="HOST:PORT",
        many=True,
    )
    enable_sleep_mode: bool = option(
        False, "allow /sleep, which gives the device's memory back, and /wake_up"
    )
    trace: str | None = option(
        None,
        "write the last 256 steps here at the end, for ui.perfetto.dev: host phases, kernels (by CUPTI); slower",
        metavar="FILE",
    )

    def check(self, recipe: str) -> None:
        """Raise SetupError for a flag that the recipe's models cannot have, or a value that no engine takes."""
        for field in dataclasses.fields(self):
            value, flag = getattr(self, field.name), flag_of(field.name)
            if field.name in self.refused and value != field.default:
                raise SetupError(
                    f"{flag} is not possible with {recipe}: {self.refused[field.name]}; leave the flag out"
                )
            choices, bounds = field.metadata["choices"], field.metadata["within"]
            if choices is not None and value not in (field.default, *choices):
                raise SetupError(f"{flag} {value}: {', '.join(map(str, choices))} are possible")
            if bounds and value is not None and not bounds[0] <= value <= bounds[1]:
                raise SetupError(f"{flag} {value}: it must be from {bounds[0]} to {bounds[1]}")
        if self.lora_modules and not self.enable_lora:
            raise SetupError("--lora-modules needs --enable-lora")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise SetupError(f"--gpu-memory-utilization {self.gpu_memory_utilization}: it must be in (0, 1]")
        self.speculation()

    @property
    def head_folder(self) -> Path | None:
        """The checkpoint of the head that drafts; None without one of its own."""
        speculation = self.speculation()
        own = speculation is not None and speculation.method == "eagle3"
        return Path(speculation.model) if speculation is not None and own else None

    def speculation(self) -> "SpeculativeConfig | None":
        """The value of --speculative-config. Raises SetupError."""
        if self.speculative_config is None:
            return None
        from openinfer.recipes.engine.speculation import SpeculativeConfig

        return SpeculativeConfig.parse(self.speculative_config, self.draft_methods)

    @property
    def proposes(self) -> bool:
        """Whether layers of the model draft. Raises SetupError."""
        speculation = self.speculation()
        return speculation is not None and speculation.proposes

    def drafting(self, buckets: "Buckets", pace: "StepPace", vocab_size: int) -> "Drafting | NoDrafts":
        """The choice of drafts, for steps of these shapes and times. Raises SetupError."""
        from openinfer.graph.runner import NoDrafts

        speculation = self.speculation()
        return NoDrafts(buckets) if speculation is None else speculation.drafting(buckets, pace, vocab_size)


O = TypeVar("O", bound=Options)

SHORT = {"tensor_parallel_size": ("-tp",)}
"""Short names of flags, as users of vLLM know them."""


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_arguments(options: type[Options], parser: argparse.ArgumentParser, recipe: str) -> None:
    add = parser.add_argument_group(f"engine ({recipe})").add_argument
    for field in dataclasses.fields(options):
        given: dict[str, Any] = {"default": field.default, "help": help_of(options, field)}
        if field.metadata["kind"] is bool:
            given["action"] = argparse.BooleanOptionalAction if field.default else "store_true"
        else:
            given |= {key: field.metadata[key] for key in ("choices", "metavar")}
            given |= {"type": field.metadata["kind"], **({"nargs": "+"} if field.metadata["many"] else {})}
        add(*SHORT.get(field.name, ()), flag_of(field.name), **given)


def help_of(options: type[Options], field: dataclasses.Field[Any]) -> str:
    """The text of a field, with its default or the reason why it is refused."""
    if field.name in options.refused:
        return NOT_POSSIBLE + options.refused[field.name]
    shown = field.default not in (None, ()) and field.metadata["kind"] is not bool
    return str(field.metadata["text"]) + ("; default: %(default)s" if shown else "")
