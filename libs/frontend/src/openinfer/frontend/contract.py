"""The contract of an engine: the messages and the Protocol between an engine and its driver.

Token ids cross this line, text never does: tokenizing, chat templates, stop strings and detokenizing belong to the
frontend. The messages travel between processes as msgpack, never as pickle.

The life of a request: the client mints an id and submits. The engine answers through the StepOutputs of its steps: at
most one Scheduled, then any number of tokens, then **exactly one terminal** (Finished, Rejected or Failed). After that
the id is never named again. A field that the engine cannot honour is Rejected by name.

Times are `time.monotonic()` seconds, which the processes of one Linux machine share.
"""

import importlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import msgspec

from openinfer.frontend.errors import EngineSpecError, InvalidRequest
from openinfer.sampler import SamplingParams
from openinfer.sampler.form import Grammar

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Block = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | str


class KVTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """kv_transfer_params of a request or an answer: how KV goes from the engine that prefills to the one that decodes.

    The keys are those of vLLM's NixlConnector, as its P/D proxies send them
    (https://docs.vllm.ai/en/stable/features/nixl_connector_usage/, and toy_proxy_server.py in vLLM's tests). A proxy
    sends a request to the prefill server with do_remote_decode and max_tokens 1, and puts the kv_transfer_params of
    that answer into the request to the decode server. Other keys are ignored.
    """

    do_remote_decode: bool | None = None
    """Another engine decodes: keep the prompt's blocks for it, and say in the answer where they are."""
    do_remote_prefill: bool | None = None
    """Another engine has computed the prompt: fetch its blocks."""
    remote_engine_id: str | None = None
    """The engine_id of that engine."""
    remote_request_id: str | None = None
    """The lease that keeps the blocks there."""
    remote_host: str | None = None
    remote_port: _Count | None = None
    """Where that engine can be asked for them."""
    remote_block_ids: list[list[_Block]] | None = None
    """By group, names of blocks. This engine names the last block alone: a name stands for all tokens before it."""
    remote_num_tokens: _Count | None = None
    """Tokens of the prompt that the blocks hold."""
    tp_size: _Count | None = None
    """Ranks of that engine."""


CONTRACT_VERSION = 1
"""Raised when a message changes meaning; both sides of a process driver must agree on it."""
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
"""The range of an integer of a message, because msgpack has no larger ones."""


class Request(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One sequence to generate (n > 1 is fanned out by the frontend into n requests with seeds seed + i)."""

    id: int
    """Minted by the client side of the driver; unique for the life of the engine."""
    prompt_token_ids: list[int]
    """At least one id, each in [0, vocab_size)."""
    sampling: SamplingParams
    """Temperature, filters, seed, stop ids, min_tokens, ignore_eos, number of top logprobs."""
    max_tokens: int
    """Most tokens to generate, >= 1; the frontend has checked prompt + max_tokens <= max_model_len."""
    arrival: float
    """When the frontend received the request (time.monotonic() seconds)."""
    priority: int = 0
    """Smaller is more urgent. An engine without a priority policy rejects a value other than 0."""
    tenant: str = ""
    """The user or group that the tokens are for; fairness policies may share by it."""
    cache_salt: str = ""
    """Requests share cached prefixes only under the same salt."""
    trace_parent: str | None = None
    """W3C traceparent of the caller, passed through for tracing."""
    grammar: Grammar | None = None
    """The form of the output, and the length of the thought at its start; EOS is drawn only where the output may end.
    Needs the feature "grammar" and a TokenTable."""
    adapter: str = ""
    """The name of an adapter (LoRA) that is loaded; empty for the model itself. Needs the feature "adapters"."""
    prompt_logprobs: int | None = None
    """Log-probabilities of the prompt's tokens: None for none, 0 for theirs alone, n for the n most likely
    alternatives' as well. Needs the feature "prompt_logprobs"."""
    disable_spec_decode: bool = False
    """The request gets no drafts (speculative decoding). It changes no token, only the request's speed."""
    kv_transfer: KVTransfer | None = None
    """Where the prompt's KV comes from or goes to. Needs the feature "kv_transfer"."""

    def __post_init__(self) -> None:
        """Raises InvalidRequest for an integer that no engine can be sent."""
        for name in ("id", "max_tokens", "priority", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not INT64_MIN <= value <= INT64_MAX:
                raise InvalidRequest(f"{name} is {value}, allowed is an integer of 64 bits with a sign")


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities (natural log, of the raw logits) at one position."""

    logprob: float
    """Log-probability of the token that was chosen, or that the prompt has."""
    top_token_ids: list[int]
    """The alternatives asked for with SamplingParams.logprobs, most probable first; the chosen one may be one."""
    top_logprobs: list[float]
    """Parallel to top_token_ids."""
    rank: int | None = None
    """1 and the number of likelier tokens; of prompt tokens only."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The next of a prompt's tokens: a request that asks gets its prompt_token_ids[1:], in order and in pieces."""

    id: int
    logprobs: list[TokenLogprobs]
    """With as many alternatives as Request.prompt_logprobs asks for."""


class Scheduled(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """The request left the queue for the first time (not repeated after a preemption)."""

    id: int
    cached_tokens: int
    """Prompt tokens taken from the prefix cache."""
    time: float
    """When (time.monotonic() seconds)."""


class Drafts(msgspec.Struct, frozen=True, array_like=True):
    """The drafts that a request's steps verified (speculative decoding)."""

    steps: int
    """Steps in which the request had drafts."""
    tokens: int
    """Drafts of all these steps."""
    accepted: list[int]
    """How often the first, second, ... draft of a step was accepted."""


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """Terminal: the request ended as it should."""

    id: int
    reason: Literal["stop", "length", "abort"]
    stop_token_id: int | None = None
    """With reason "stop": the EOS or stop id that ended it, the last of its tokens in these StepOutputs."""
    drafts: Drafts | None = None
    """None where no step verified a draft."""
    kv_transfer: KVTransfer | None = None  # where the prompt's KV is, after do_remote_decode


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """Terminal: the request was never run. `reason` is a sentence for the user naming what was refused."""

    id: int
    reason: str
    code: Literal["invalid", "too_long", "queue_full", "unsupported", "grammar"] = "invalid"
    """"grammar": the request's grammar is malformed or uses an unsupported feature."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="x"):
    """Terminal: the engine could not finish the request."""

    id: int
    message: str
    code: Literal["engine", "grammar", "invalid"] = "engine"
    """"engine": by no fault of the request. Otherwise its grammar, or its settings together, left no token."""


Terminal = Finished | Rejected | Failed
Update = Scheduled | Finished | Rejected | Failed
TERMINALS = (Finished, Rejected, Failed)


class StepOutputs(msgspec.Struct, array_like=True):
    """The results of one step, in columns; objects appear only for first and terminal updates. Read it so: Scheduled
    updates first, then prompt_logprobs, then the tokens in order, then the terminals."""

    request_ids: list[int] = msgspec.field(default_factory=list)
    """Owner of each token; a request may appear more than once (several tokens a step)."""
    token_ids: list[int] = msgspec.field(default_factory=list)
    """Parallel to request_ids. EOS and stop ids are included: the frontend leaves them out of the text."""
    logprobs: list[TokenLogprobs | None] | None = None
    """None when no request of the step asked; else parallel to request_ids (None for those that did not)."""
    updates: list[Update] = msgspec.field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = msgspec.field(default_factory=list)
    """Complete before the request's first token."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that are fixed once the engine is up."""

    model: str
    """Name of the model (the checkpoint's directory name, unless the engine knows better)."""
    max_model_len: int
    """Most tokens of one sequence, prompt and output together."""
    vocab_size: int
    """Token ids are in [0, vocab_size)."""
    eos_token_ids: list[int]
    """Ids that end a sequence unless SamplingParams.ignore_eos."""
    kv_capacity_tokens: int
    """Tokens of KV state that fit at once."""
    block_size: int
    """Tokens a KV block holds."""
    features: list[str] = []
    """The features of this engine beyond the bare contract: "logprobs", "prompt_logprobs", "prefix_cache", "priority",
    "grammar" (once it was sent a TokenTable), "adapters". Of SamplingParams: "penalties" (all three), "logit_bias",
    "allowed_token_ids", "bad_words". The frontend refuses the rest by name."""
    contract_version: int = CONTRACT_VERSION
    max_adapters: int = 0
    """Adapters (LoRA) that a step can have; 0 without the feature "adapters"."""
    hang_timeout_s: float = 60.0
    """With requests live, this long without a step means that the engine hangs, unless the server is told otherwise."""


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    """The sum of the times of all steps of one shape, beside the sum of their predictions."""

    key: str
    """The recorded step in words, as "64 tokens, 8 rows"."""
    steps: int
    predicted_s: float
    measured_s: float


class AdapterState(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that requests may name, and how many of its requests run or wait."""

    name: str
    path: str
    running: int
    waiting: int


class EngineStats(msgspec.Struct, kw_only=True, array_like=True):
    """A snapshot that costs O(1). The first three are gauges, the rest count up from the engine's start."""

    running: int = 0
    waiting: int = 0
    kv_used_tokens: int = 0
    """Tokens of EngineInfo.kv_capacity_tokens that live requests hold (cached blocks without a holder are free)."""
    prompt_tokens: int = 0
    """Prompt tokens of scheduled requests, cached ones included."""
    generation_tokens: int = 0
    prefix_query_tokens: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hit_tokens: int = 0
    """... and found there."""
    prefix_loaded_tokens: int = 0
    """... of which host memory or a disk brought these."""
    offload_bytes: dict[str, int] = {}
    """Bytes of cached prefixes by tier: "host", "disk"."""
    offload_blocks: dict[str, int] = {}
    """Blocks by what became of them; the names are those of openinfer.kvpool.tiers.TierStats."""
    preemptions: int = 0
    steps: int = 0
    compiles_after_ready: int = 0
    """Kernels compiled while serving; anything but 0 is a bug."""
    allocations_after_ready: int = 0
    """Driver calls that took memory of any kind while serving; anything but 0 is a bug."""
    host_waits_after_ready: int = 0
    """Driver calls in which the host may have waited for the device while serving, without the one a step that reads
    its results; anything but 0 is a bug."""
    outlier_steps: int = 0
    """Steps that took more than twice their prediction."""
    step_times: list[StepTimes] = []
    """Times of steps by shape. An engine may leave the list empty in most snapshots; the client keeps the last one."""
    adapters: list[AdapterState] = []
    """The adapters that are loaded, in the order of their loading."""
    weights_version: str = ""
    """The name that UpdateWeights gave; "" for the weights of the start."""
    asleep: bool = False
    weights_dropped: bool = False
    """Whether a sleep of level 2 dropped the weights, and none have come yet."""
    refusal: str = ""
    """Why the engine takes no request now; "" if it takes them."""
    slow_findings: int = 0
    """Traces of what was slow, as SlowTraces gives the last of."""
    drafts: int = 0
    """Rows of steps that verified drafts (speculative decoding)."""
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    accepted_by_position: list[int] = []
    """How often the first, second, ... draft of a row was accepted."""


class ResetPrefixCache(msgspec.Struct, frozen=True, array_like=True, tag="reset_prefix_cache"):
    """Forget every cached prefix that no live request holds."""


class TokenTable(msgspec.Struct, frozen=True, array_like=True, tag="token_table"):
    """The bytes of the token ids, which grammars need: sent at start to engines with the feature "grammar"."""

    tokens: list[bytes]
    """The bytes of token 0, 1, ...; empty where an id stands for nothing."""
    special_ids: list[int]
    """Ids that no text can be, such as the end of a turn; markers that count as text are not among them."""
    definition: str = ""
    """The tokenizer as JSON (tokenizer.json): it cuts text that a grammar forces. Empty: the model does."""


class SlowTraces(msgspec.Struct, frozen=True, array_like=True, tag="slow_traces"):
    """Ask for the traces of what was slow, as JSON: {"found": number, "traces": [{"kind", "line", "time",
    "otherData", "traceEvents"}]}, the newest last."""


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="load_adapter"):
    """Load an adapter (LoRA) from a folder that PEFT saved. in_place: it may replace one of the same name."""

    name: str
    path: str
    in_place: bool = False


class UnloadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="unload_adapter"):
    """Forget an adapter. Requests that have it run to their end."""

    name: str


class UpdateWeights(msgspec.Struct, frozen=True, array_like=True, tag="update_weights"):
    """Take all weights from another checkpoint of the model, and forget prefixes. Unsupported while requests run."""

    path: str
    """Its folder with safetensors, or the Unix socket of a process that shares them (tensor.SharedWeights)."""
    version: str
    """Answers name it."""


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag="sleep"):
    """Give memory back, and take no request until WakeUp. Unsupported while requests run."""

    level: int = 1
    """1: the weights wait in host memory. 2: they are dropped; after WakeUp must come UpdateWeights."""


class WakeUp(msgspec.Struct, frozen=True, array_like=True, tag="wake_up"):
    """Take the memory again."""


Command = (
    LoadAdapter | ResetPrefixCache | Sleep | SlowTraces | TokenTable | UnloadAdapter | UpdateWeights | WakeUp
)


@runtime_checkable
class Engine(Protocol):
    """An inference engine. A driver calls every method from one and the same thread: no locks needed."""

    @property
    def info(self) -> EngineInfo:
        """Fixed facts; valid as soon as the engine is built."""

    def submit(self, request: Request) -> None:
        """Take a request. Refusals come back as a Rejected update of the next step. If it raises all the same, the
        engine must not have kept the request: the driver reports it Failed."""

    def abort(self, request_id: int) -> None:
        """End a request: a later step says Finished("abort"), or the terminal that was already on its way. An id that
        is not live is no error: aborts race with endings."""

    def control(self, command: Command) -> Future[None] | str | None:
        """Carry out a command before the next step, or begin it and return its future. Returns the answer, if any.
        Raises errors.Unsupported for a command that cannot be carried out; a future may raise it too."""

    def step(self, wait: float) -> StepOutputs:
        """Do one step and return what is ready (perhaps nothing: an engine may run a step ahead).

        Called again and again while a request is live. With nothing to compute it blocks for at most `wait`
        seconds. With no live request it is not called at all, so an idle engine costs nothing. An exception
        means that the engine is lost: every live request gets Failed, and it is closed.
        """

    def stats(self) -> EngineStats:
        """Current numbers; O(1), called up to once a step, and now and then while no request is live. An exception
        means that the engine is lost, as in step()."""

    def close(self) -> None:
        """Release all resources. Called once; the driver calls no other method after it."""


class EngineSpec(msgspec.Struct, frozen=True):
    """How to build an engine in any process: call `target` ("package.module:function") with JSON `kwargs`."""

    target: str
    kwargs: dict[str, Any] = {}

    def build(self) -> Engine:
        """Import the module and call the function. Raises EngineSpecError, or what the function raises."""
        module_name, _, function_name = self.target.partition(":")
        if not module_name or not function_name:
            raise EngineSpecError(f"engine target {self.target!r} is not 'package.module:function'")
        module = importlib.import_module(module_name)
        function: Callable[..., Engine] | None = getattr(module, function_name, None)
        if function is None:
            raise EngineSpecError(f"engine target {self.target!r}: {module_name} has no {function_name!r}")
        return function(**self.kwargs)
