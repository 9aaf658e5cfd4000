"""What can be asked of an engine, of a server and in a request, and what each promises whatever else is asked.

`python tests/combinations/features.py` writes the table in docs/features.md; test_combinations.py tries every cell.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openinfer.frontend.http import Tokenizer

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "goldens"
TEXT = (
    "Say why the sky is blue, and then in what way the sea and the ice take the blue from it, with a number for each "
    "of them; say too which of the three was blue before the other two, and how anyone could know."
)
Body = dict[str, Any]
WRITTEN = tempfile.TemporaryDirectory(prefix="openinfer-models-")
"""Checkpoints of DeepSeek that test_combinations.py writes, with the tokenizer of the other models."""


@dataclass(frozen=True)
class Model:
    """A recipe's golden checkpoint, and two prompts that begin alike. flags: of all its engines. others: checkpoints of
    the same model by the feature that needs them."""

    path: Path
    prompts: tuple[str, str]
    flags: Body = field(default_factory=dict)
    others: dict[str, Path] = field(default_factory=dict)

    def path_for(self, names: Iterable[str]) -> Path:
        """The checkpoint of an engine with these features."""
        return next((self.others[name] for name in names if name in self.others), self.path)


MODELS = {
    # 36 and 47 tokens: a page of 32 is shared
    "qwen3": Model(GOLDENS / "qwen3-tiny", (TEXT[:66], TEXT[:84])),
    # 76 and 83 tokens: the first snapshot, where a cached prefix may end, is at 64
    "qwen3_5": Model(GOLDENS / "qwen3_5-tiny", (TEXT[:140], TEXT[:152])),
    # V3.2's form, which does what V3's does, and chooses 16 of the tokens that a token sees
    "deepseek_v3": Model(Path(WRITTEN.name) / "v3", (TEXT[:66], TEXT[:90])),
    # 139 and 150 tokens: a page of 128 is shared. A last bit would become another FP8 code.
    "deepseek_v4": Model(
        Path(WRITTEN.name) / "plain",
        (f"{TEXT} {TEXT[9:49]}", f"{TEXT} {TEXT[9:69]}"),
        {"activation_quantization": "off", "max_model_len": 192},
        {name: Path(WRITTEN.name) / name for name in ("MTP drafts", "DSpark drafts")},
    ),
}


@dataclass
class Choice:
    """One of an answer's n."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None
    logprobs: list[float] = field(default_factory=list)
    tops: list[dict[str, float]] = field(default_factory=list)
    of_prompt: list[float] = field(default_factory=list)


@dataclass
class Answer:
    """To one request; `chunks` is 0 where it was not streamed."""

    choices: list[Choice]
    chunks: int

    @property
    def first(self) -> Choice:
        return self.choices[0]


@dataclass(frozen=True)
class Asked:
    """A feature of a request: how users write it, and what to put into a body, from the answer without it."""

    how: str
    body: Callable[[Answer], Body]
    passive: bool = False
    """It changes no token of the first choice."""


@dataclass(frozen=True)
class Flag:
    """A feature of an engine or a server: the flag as users write it, and as keyword arguments of an engine."""

    how: str
    kwargs: Body = field(default_factory=dict)


def drafts_by(method: str, **keys: Any) -> Flag:
    config = json.dumps({"method": method, "num_speculative_tokens": 3, **keys})
    return Flag(f"`--speculative-config`, `{method}`", {"speculative_config": config})


REGEX = "[a-e]{2,4}!"
ALLOWED = list(range(300))
PENALTIES = {"repetition_penalty": 1.8, "frequency_penalty": 1.5, "presence_penalty": 1.0}
EVENTS = '{"enable_kv_cache_events": true, "endpoint": "inproc://events"}'
HEAD = tempfile.TemporaryDirectory(prefix="openinfer-head-")
FOLDER = tempfile.TemporaryDirectory(prefix="openinfer-kv-", ignore_cleanup_errors=True)
TRANSFER = '{"kv_connector": "TcpConnector", "kv_port": 0, "kv_buffer_size": 5e7}'
RANDOM = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.01, "seed": 11}

REQUEST = {
    "log-probabilities": Asked("`logprobs`", lambda plain: {"logprobs": 2}, passive=True),
    "prompt log-probabilities": Asked(
        "`prompt_logprobs`", lambda plain: {"prompt_logprobs": 1}, passive=True
    ),
    "penalties": Asked("`repetition_penalty` and the other two", lambda plain: PENALTIES),
    "biases": Asked("`logit_bias`", lambda plain: {"logit_bias": {str(favourite()): 30}}),
    "allowed tokens": Asked("`allowed_token_ids`", lambda plain: {"allowed_token_ids": ALLOWED}),
    "bad words": Asked("`bad_words`", lambda plain: {"bad_words": [word_in(plain)]}),
    "sampling": Asked("`temperature`, `top_p`, `top_k`, `min_p`, `seed`", lambda plain: RANDOM),
    "a least length": Asked("`min_tokens`", lambda plain: {"min_tokens": 5}),
    "stop tokens": Asked("`stop_token_ids`", lambda plain: {"stop_token_ids": [plain.first.tokens[3]]}),
    "stop strings": Asked("`stop`", lambda plain: {"stop": [letters_in(plain)]}),
    "structured output": Asked(
        "`structured_outputs`", lambda plain: {"structured_outputs": {"regex": REGEX}}
    ),
    "echo": Asked("`echo`", lambda plain: {"echo": True}, passive=True),
    "several choices": Asked("`n`", lambda plain: {"n": 2}, passive=True),
    "no drafts": Asked("`disable_spec_decode`", lambda plain: {"disable_spec_decode": True}, passive=True),
    "streaming": Asked("`stream`", lambda plain: {"stream": True}, passive=True),
}
METHODS = {
    "n-gram drafts": drafts_by("ngram", prompt_lookup_min=1),
    "suffix drafts": drafts_by("suffix"),
    "MTP drafts": drafts_by("mtp"),
    "DSpark drafts": drafts_by("dspark"),
    "EAGLE-3 drafts": drafts_by("eagle3", model=HEAD.name),
}
"""Who drafts: an engine has one."""

ENGINE = {
    "prefix cache": Flag("`--enable-prefix-caching` (the default)", {"enable_prefix_caching": True}),
    "chunked prefill": Flag("`--max-num-batched-tokens`", {"max_num_batched_tokens": 24}),
    "no graphs": Flag("`--enforce-eager`", {"enforce_eager": True}),
    "preemption": Flag("what the pool or the policy does"),  # here the policy: engine.testing.Restless
    "large pages": Flag("`--block-size`", {"block_size": 32}),
    "priorities": Flag("`--scheduling-policy priority`, `priority`", {"scheduling_policy": "priority"}),
    "KV events": Flag("`--kv-events-config`", {"kv_events_config": EVENTS, "enable_prefix_caching": True}),
    **METHODS,
    "batch invariance": Flag("`--batch-invariant`", {"batch_invariant": True}),
    "adapters": Flag("`--enable-lora`, `model`", {"enable_lora": True, "max_lora_rank": 8}),
    "several ranks": Flag("`--tensor-parallel-size`", {"tensor_parallel_size": 2}),
    "host memory": Flag("`--kv-offload-gb`", {"kv_offload_gb": 0.05, "enable_prefix_caching": True}),
    "a disk": Flag(
        "`--kv-offload-dir`, `--kv-offload-disk-gb`",
        {"kv_offload_dir": FOLDER.name, "kv_offload_disk_gb": 0.05, "enable_prefix_caching": True},
    ),
    "sleep": Flag("`--enable-sleep-mode`", {"enable_sleep_mode": True}),
    "shared KV": Flag(
        "`--kv-transfer-config`, `--kv-peer`",
        {"kv_transfer_config": TRANSFER, "kv_peer": ["127.0.0.1:1"], "enable_prefix_caching": True},
    ),
    "FP8 cache": Flag("`--kv-cache-dtype fp8`", {"kv_cache_dtype": "fp8"}),
    "FP8 weights": Flag("`--quantization fp8`", {"quantization": "fp8"}),
}
SERVER = {
    "several HTTP processes": Flag("`--frontends 2`"),
    "an engine that comes back": Flag("`--restart-engine`"),
    "the engine in a thread": Flag("`--driver thread`"),
    "replicas": Flag("`--data-parallel-size 2`"),
}
REFUSED = {
    ("shared KV", "replicas"): "--kv-transfer-config is not possible with --data-parallel-size",
    ("prompt log-probabilities", "streaming"): "prompt_logprobs is not possible with stream: true",
    ("several HTTP processes", "the engine in a thread"): "--frontends needs --driver process",
    ("an engine that comes back", "the engine in a thread"): "--restart-engine needs --driver process",
    ("several HTTP processes", "replicas"): "--data-parallel-size is not possible with --frontends",
    ("the engine in a thread", "replicas"): "--data-parallel-size needs --driver process",
}
"""A pair, in the order of the lists, and what is said to it."""

LACKING = {
    ("qwen3", "MTP drafts"): "method 'mtp' is not possible with this model",
    ("qwen3", "DSpark drafts"): "method 'dspark' is not possible with this model",
    ("qwen3_5", "DSpark drafts"): "method 'dspark' is not possible with this model",
    ("qwen3_5", "EAGLE-3 drafts"): "method 'eagle3' is not possible with this model",
    ("deepseek_v3", "DSpark drafts"): "method 'dspark' is not possible with this model",
    ("deepseek_v3", "EAGLE-3 drafts"): "method 'eagle3' is not possible with this model",
    ("deepseek_v3", "adapters"): "--enable-lora is not possible",
    ("deepseek_v3", "FP8 cache"): "--kv-cache-dtype is not possible",
    ("deepseek_v4", "EAGLE-3 drafts"): "method 'eagle3' is not possible with this model",
    ("deepseek_v4", "large pages"): "--block-size is not possible",
    ("deepseek_v4", "adapters"): "--enable-lora is not possible",
    ("deepseek_v4", "FP8 cache"): "--kv-cache-dtype is not possible",
    ("deepseek_v4", "FP8 weights"): "--quantization is not possible",
}
"""A model and a feature that it does not have, and what is said to both."""

OWN = dict.fromkeys(("FP8 cache", "FP8 weights"), "the tokens of an engine that has this alone")
"""Features that change tokens, and what stays the same with any other."""


def engine_of(model: str) -> list[str]:
    return [name for name in ENGINE if (model, name) not in LACKING]


def pairs_of(model: str) -> Iterator[tuple[str, str]]:
    """Any two features of an engine that can be together."""
    for pair in itertools.combinations(engine_of(model), 2):
        if pair not in REFUSED and not set(pair) <= METHODS.keys():
            yield pair


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODELS["qwen3"].path)  # the other model has the same


def favourite() -> int:
    (token,) = tokenizer().encode_short("c")
    return token


def written(token: int) -> str:
    return tokenizer().decode([token], False)


def word_in(plain: Answer) -> str:
    """A token of an answer that a user can name; "a" where the answer has none."""
    words = ((written(token), token) for token in plain.first.tokens)
    return next((w for w, t in words if w.isalpha() and tokenizer().encode_short(w) == [t]), "a")


def letters_in(plain: Answer) -> str:
    text = plain.first.text
    return str((re.findall("[ -~]{2}", text) or re.findall("[ -~]", text) or list(text))[-1])


def holds(name: str, answer: Answer, plain: Answer, prompt: str, asked: Body) -> bool:
    """Whether an answer keeps what the feature promises; asked: all that was asked for."""
    first, prompt_len = answer.first, len(tokenizer().encode_short(prompt))
    said = first.text.removeprefix(prompt) if "echo" in asked else first.text
    match name:
        case "log-probabilities":
            known = len(first.tokens) + ("echo" in asked) * (prompt_len - 1)
            return len(first.logprobs) == known and all(first.tops) and max(first.logprobs) <= 0
        case "prompt log-probabilities":
            return len(first.of_prompt) == prompt_len - 1 and max(first.of_prompt) < 0
        case "biases":
            return favourite() in first.tokens
        case "allowed tokens":
            return set(first.tokens) <= set(ALLOWED)
        case "bad words":
            return word_in(plain) not in map(written, first.tokens)
        case "a least length":  # a complete output ends, however short
            return len(first.tokens) >= 5 or "structured_outputs" in asked
        case "stop tokens":  # before min_tokens they are not drawn at all
            return plain.first.tokens[3] not in first.tokens[:-1]
        case "stop strings":  # looked for in what follows min_tokens
            return "min_tokens" in asked or letters_in(plain) not in said
        case "structured output":
            cut = first.reason != "stop" or "stop" in asked or "stop_token_ids" in asked
            return re.fullmatch("[a-e]*!?" if cut else REGEX, said) is not None
        case "echo":
            return first.text.startswith(prompt)
        case "several choices":  # of a seed the second has the next
            return len(answer.choices) == 2 and ("seed" in asked or answer.choices[1].tokens == first.tokens)
        case "streaming":
            return answer.chunks > 0  # a busy server joins tokens that wait
    return True  # penalties, sampling: the tests show that they do something


def table() -> str:
    """Markdown: the features that go with all others, and the pairs that are refused."""
    every = {**REQUEST, **ENGINE, **SERVER}
    lacking = {name for _, name in LACKING}
    free = every.keys() - {name for pair in REFUSED for name in pair} - OWN.keys() - METHODS.keys() - lacking
    lines = ["With each other, the same tokens:", ""]
    lines += [f"- {name}: {feature.how}" for name, feature in every.items() if name in free]
    lines += ["", "| feature | how | with each of the others |", "| --- | --- | --- |"]
    for name in (name for name in every if name not in free):
        no = [f'not with {b}: "{words}"' for (a, b), words in REFUSED.items() if name == a]
        no += ["one method at a time"] * (name in METHODS)
        models = [model for model, lacked in LACKING if lacked == name]
        said = {words for (_, lacked), words in LACKING.items() if lacked == name}
        no += [f'not with {", ".join(f"`{one}`" for one in models)}: "{words}"' for words in said]
        no += [words for own, words in OWN.items() if own == name]
        lines.append(f"| {name} | {every[name].how} | {'; '.join(no) or 'see above'} |")
    return "\n".join(lines)


MARKS = ("<!-- combinations -->\n", "\n<!-- end -->")


def table_in(readme: str) -> str:
    return readme.split(MARKS[0])[1].split(MARKS[1])[0]


if __name__ == "__main__":
    text = (ROOT / "docs/features.md").read_text()
    (ROOT / "docs/features.md").write_text(text.replace(table_in(text), table()))
