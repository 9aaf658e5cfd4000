"""The flags of a server, and the protocol of a recipe, whose command line has its engine's beside them."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from openinfer.frontend import flag_types
from openinfer.frontend.flag_parser import FlagParser

if TYPE_CHECKING:
    from openinfer.frontend.contract import EngineSpec

TOOL_PARSERS = (
    "deepseek_v4",
    "hermes",
    "llama3_json",
    "mistral",
    "mistral_args",
    "pythonic",
    "qwen3_coder",
    "qwen3_xml",
)
REASONING_PARSERS = ("deepseek_v4", "qwen3")
"""The formats of `chat` by name, which is not imported for a help text."""


class Recipe(Protocol):
    """Registered under the entry-point group `openinfer.recipes`: an object with these names.

    Importing it must stay light (no driver, no GPU): `--help` imports it. The engine is built from the
    EngineSpec, usually in another process.
    """

    @property
    def name(self) -> str:
        """Short name, as in `openinfer.recipes.<name>`."""

    def matches(self, config: Mapping[str, object]) -> bool:
        """Whether this recipe serves checkpoints with this config.json. Never raises for a foreign config."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the engine's flags (`--max-model-len`, ...) to the parser that holds the frontend's already."""

    def engine_spec(self, model_dir: Path, args: argparse.Namespace) -> "EngineSpec":
        """The engine for a checkpoint. Every flag of add_arguments ends up in the kwargs or is refused here.

        Raises ValueError or OSError with a one-line message for the user's mistakes.
        """

    def replica_specs(self, model_dir: Path, args: argparse.Namespace, count: int) -> "Sequence[EngineSpec]":
        """The engines of --data-parallel-size, each on devices of its own. Raises as engine_spec does."""


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
    _add_address(server)
    _add_origins(server)
    _add_model(server)
    _add_engine(server)
    _add_logs(server)
    return parser


def _add_address(server: Any) -> None:
    server.add_argument(
        "--config", metavar="FILE", help="TOML file with a line a flag; the command line goes before it"
    )
    server.add_argument("--host", default="127.0.0.1", help="address to listen on")
    server.add_argument(
        "--port",
        type=flag_types.port,
        default=8000,
        metavar="N",
        help="port to listen on; 0 takes a free one",
    )
    server.add_argument(
        "--api-key",
        type=flag_types.key,
        metavar="KEY",
        default=None,
        help="key for all paths but probes and pages; or OPENINFER_API_KEY",
    )
    server.add_argument(
        "--enable-weight-updates",
        action="store_true",
        help="take /update_weights without a key; so does --enable-sleep-mode",
    )


def _add_model(server: Any) -> None:
    server.add_argument(
        "--served-model-name",
        type=flag_types.name,
        nargs="+",
        default=[],
        metavar="NAME",
        help="names that requests may use; the first is shown",
    )
    server.add_argument("--skip-tokenizer-init", action="store_true", help="take and give only token ids")
    server.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="chat template instead of the model's"
    )
    server.add_argument(
        "--default-chat-template-kwargs",
        type=flag_types.options,
        default={},
        metavar="JSON",
        help="values of the template's variables: '{\"enable_thinking\": false}'",
    )
    server.add_argument(
        "--special-tokens-in-text",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="<|im_end|> in a message ends it; off: it is text; default: on",
    )
    server.add_argument(
        "--tool-call-parser",
        choices=("auto", "none", *TOOL_PARSERS),
        default="auto",
        metavar="NAME",
        help=f"calls; default: auto (by model or template); none, {', '.join(TOOL_PARSERS)}",
    )
    server.add_argument(
        "--reasoning-parser",
        choices=("auto", "none", *REASONING_PARSERS),
        default="auto",
        metavar="NAME",
        help="thoughts; default: auto; none (content), deepseek_v4, qwen3",
    )
    server.add_argument(
        "--enable-auto-tool-choice",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let the model decide about calls; off: no tools",
    )
    server.add_argument(
        "--generation-config",
        choices=("auto", "none", "vllm"),
        default="auto",
        metavar="NAME",
        help="auto: defaults of generation_config.json; none or vllm: no defaults",
    )


def _add_engine(server: Any) -> None:
    server.add_argument(
        "--driver", choices=("process", "thread"), default="process", help="where the engine runs"
    )
    server.add_argument(
        "--frontends",
        type=flag_types.count,
        default=1,
        metavar="N",
        help="HTTP processes on the one port, over the one engine",
    )
    server.add_argument(
        "--data-parallel-size",
        "-dp",
        type=flag_types.count,
        default=1,
        metavar="N",
        help="engines behind the one address, on GPUs of their own",
    )
    server.add_argument(
        "--engine-hang-timeout",
        type=flag_types.seconds,
        default=None,
        metavar="S",
        help="without a step for so long /health is 503; default: 10, on a CPU 300",
    )
    server.add_argument(
        "--restart-engine",
        action="store_true",
        help="restart an engine that died or hangs, up to 3 times in 10 minutes",
    )
    server.add_argument(
        "--shutdown-timeout",
        type=flag_types.seconds,
        default=30.0,
        metavar="S",
        help="time that SIGTERM gives running requests to finish",
    )


def _add_logs(server: Any) -> None:
    server.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        metavar="LEVEL",
        help="debug, info, warning or error",
    )
    server.add_argument(
        "--otlp-traces-endpoint",
        type=flag_types.url,
        default=None,
        metavar="URL",
        help="send spans to this URL, http://HOST:4318/v1/traces; needs [otel]",
    )
    server.add_argument(
        "--plan",
        type=Path,
        default=None,
        metavar="FILE",
        help="plan for the page at /plan, of `openinfer plan MODEL --json FILE`",
    )
    server.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="json: one object a line"
    )
    server.add_argument(
        "--no-access-log",
        "--disable-uvicorn-access-log",
        dest="access_log",
        action="store_false",
        help="log no line for each HTTP request",
    )
    server.add_argument(
        "--log-requests", action="store_true", help="log a line about the output of each request"
    )


def _add_origins(server: Any) -> None:
    for name, default, what in (
        ("origins", [], "origins whose pages may call: '[\"http://localhost:3000\"]' or '[\"*\"]'"),
        ("methods", ["*"], "methods that such pages may use"),
        ("headers", ["*"], "headers that such pages may send"),
    ):
        server.add_argument(
            f"--allowed-{name}", type=flag_types.strings, default=default, metavar="JSON", help=what
        )
    server.add_argument(
        "--allow-credentials", action="store_true", help="let such pages send the browser's cookies"
    )
    server.add_argument(
        "--ssl-certfile", type=Path, default=None, metavar="FILE", help="PEM certificate; serves HTTPS"
    )
    server.add_argument(
        "--ssl-keyfile",
        type=Path,
        default=None,
        metavar="FILE",
        help="the certificate's key, if in another file",
    )
