"""The flags of a server, and the protocol of a recipe, whose command line has its engine's beside them."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from openinfer.frontend import flag_types as types
from openinfer.frontend.flag_parser import FlagParser

if TYPE_CHECKING:
    from openinfer.frontend.contract import EngineSpec

TOOL_PARSERS = (
    *("deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "glm45", "glm47", "hermes", "kimi_k2"),
    *("llama3_json", "mistral", "mistral_args", "pythonic", "qwen3_coder", "qwen3_xml"),
)
REASONING_PARSERS = ("deepseek_v4", "kimi_k2", "qwen3")
"""The formats of `chat` by name, which is not imported for a help text."""


class Recipe(Protocol):
    """Registered under the entry-point group `openinfer.recipes`: an object with these names.

    Importing it must stay light (no driver, no GPU): `--help` imports it. EngineSpec builds in another process.
    """

    @property
    def name(self) -> str:
        """Short name, as in `openinfer.recipes.<name>`."""

    def matches(self, config: Mapping[str, object]) -> bool:
        """Whether this recipe serves checkpoints with this config.json. Never raises for a foreign config."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the engine's flags (`--max-model-len`, ...) to the parser that holds the frontend's already."""

    def engine_spec(self, model_dir: Path, args: argparse.Namespace) -> "EngineSpec":
        """The engine for a checkpoint. Every flag of add_arguments ends up in the kwargs or is refused here. Raises
        ValueError or OSError with a one-line message for the user's mistakes."""

    def replica_specs(self, model_dir: Path, args: argparse.Namespace, count: int) -> "Sequence[EngineSpec]":
        """The engines of --data-parallel-size, each on devices of its own. Raises as engine_spec does."""


_SWITCH: dict[str, Any] = {"action": "store_true"}
_ON: dict[str, Any] = {"action": argparse.BooleanOptionalAction, "default": True}
_COUNT: dict[str, Any] = {"type": types.count, "default": 1}
_STRINGS: dict[str, Any] = {"type": types.strings, "default": ["*"]}
_FLAGS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("--config FILE", "TOML file with a line a flag; the command line goes before it", {}),
    ("--host", "address to listen on", {"default": "127.0.0.1"}),
    ("--port N", "port to listen on; 0 takes a free one", {"type": types.port, "default": 8000}),
    ("--api-key KEY", "key for all paths but probes and pages; or OPENINFER_API_KEY", {"type": types.key}),
    ("--enable-weight-updates", "take /update_weights without a key; so does --enable-sleep-mode", _SWITCH),
    (
        "--allowed-origins JSON",
        "origins whose pages may call: '[\"http://localhost:3000\"]' or '[\"*\"]'",
        _STRINGS | {"default": []},
    ),
    ("--allowed-methods JSON", "methods that such pages may use", _STRINGS),
    ("--allowed-headers JSON", "headers that such pages may send", _STRINGS),
    ("--allow-credentials", "let such pages send the browser's cookies", _SWITCH),
    ("--ssl-certfile FILE", "PEM certificate; serves HTTPS", {"type": Path}),
    ("--ssl-keyfile FILE", "the certificate's key, if in another file", {"type": Path}),
    (
        "--served-model-name NAME",
        "names that requests may use; the first is shown",
        {"type": types.name, "nargs": "+", "default": []},
    ),
    ("--skip-tokenizer-init", "take and give only token ids", _SWITCH),
    ("--chat-template FILE", "chat template instead of the model's", {"type": Path}),
    (
        "--default-chat-template-kwargs JSON",
        "values of the template's variables: '{\"enable_thinking\": false}'",
        {"type": types.options, "default": {}},
    ),
    ("--special-tokens-in-text", "<|im_end|> in a message ends it; off: it is text; default: on", _ON),
    (
        "--tool-call-parser NAME",
        f"calls; default: auto; none, {', '.join(TOOL_PARSERS)}",
        {"choices": ("auto", "none", *TOOL_PARSERS), "default": "auto"},
    ),
    (
        "--reasoning-parser NAME",
        "thoughts; default: auto; none (content), deepseek_v4, kimi_k2, qwen3",
        {"choices": ("auto", "none", *REASONING_PARSERS), "default": "auto"},
    ),
    ("--enable-auto-tool-choice", "let the model decide about calls; off: no tools", _ON),
    (
        "--generation-config NAME",
        "auto: defaults of generation_config.json; none or vllm: no defaults",
        {"choices": ("auto", "none", "vllm"), "default": "auto"},
    ),
    ("--driver", "where the engine runs", {"choices": ("process", "thread"), "default": "process"}),
    ("--frontends N", "HTTP processes on the one port, over the one engine", _COUNT),
    ("--data-parallel-size -dp N", "engines behind the one address, on GPUs of their own", _COUNT),
    (
        "--engine-hang-timeout S",
        "without a step for so long /health is 503; default: 10, on a CPU 300",
        {"type": types.seconds},
    ),
    ("--restart-engine", "restart an engine that died or hangs, up to 3 times in 10 minutes", _SWITCH),
    (
        "--shutdown-timeout S",
        "time that SIGTERM gives running requests to finish",
        {"type": types.seconds, "default": 30.0},
    ),
    (
        "--log-level LEVEL",
        "debug, info, warning or error",
        {"choices": ("debug", "info", "warning", "error"), "default": "info"},
    ),
    (
        "--otlp-traces-endpoint URL",
        "send spans to this URL, http://HOST:4318/v1/traces; needs [otel]",
        {"type": types.url},
    ),
    ("--plan FILE", "plan for the page at /plan, of `openinfer plan MODEL --json FILE`", {"type": Path}),
    ("--log-format", "json: one object a line", {"choices": ("text", "json"), "default": "text"}),
    (
        "--no-access-log --disable-uvicorn-access-log",
        "log no line for each HTTP request",
        {"action": "store_false", "dest": "access_log"},
    ),
    ("--log-requests", "log a line about the output of each request", _SWITCH),
)
"""Names of a flag and the word for its value, its help, and what the parser needs besides."""


def build_parser(recipe: Recipe, prog: str) -> FlagParser:
    """The frontend's flags and the recipe's, for one model."""
    parser = server_parser(prog, f"Serve a {recipe.name} checkpoint over an OpenAI-compatible HTTP API.")
    recipe.add_arguments(parser)
    return parser


def server_parser(prog: str, description: str) -> FlagParser:
    """The frontend's flags."""
    parser = FlagParser(prog, usage=f"{prog} MODEL [flags]", description=description)
    parser.add_argument(
        "model_dir",
        type=Path,
        metavar="MODEL",
        help="folder with config.json, safetensors and tokenizer.json",
    )
    server = parser.add_argument_group("server")
    for names, text, given in _FLAGS:
        flags = [name for name in names.split() if name.startswith("-")]
        word: dict[str, Any] = {"metavar": names.split()[-1]} if len(flags) < len(names.split()) else {}
        server.add_argument(*flags, help=text, **word, **given)
    return parser
