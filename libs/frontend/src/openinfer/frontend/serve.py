"""The command line that every recipe shares: `python -m openinfer.recipes.<name> MODEL_DIR [flags]`."""

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from openinfer.frontend.chat import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    DeepSeekV4Renderer,
    Renderer,
    default_formats,
)
from openinfer.frontend.errors import FrontendError, ModelFilesError
from openinfer.frontend.logs import set_up_logging
from openinfer.frontend.recipe import Recipe

if TYPE_CHECKING:
    from openinfer.frontend.client import EngineClient
    from openinfer.frontend.contract import EngineSpec
    from openinfer.frontend.http import Tokenizer

__all__ = ["Recipe", "build_parser", "serve"]


def build_parser(recipe: Recipe, prog: str) -> argparse.ArgumentParser:
    """The frontend's flags and the recipe's. Abbreviations are refused: a flag is one word for good."""
    parser = argparse.ArgumentParser(
        prog,
        description=f"Serve a {recipe.name} checkpoint over an OpenAI-compatible HTTP API.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model_dir", type=Path, metavar="MODEL_DIR", help="checkpoint directory")
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on")
    server.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one")
    server.add_argument(
        "--api-key",
        default=None,
        help="wanted on all paths but /health, /ready and /; OPENINFER_API_KEY in the environment does not show in ps",
    )
    server.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names requests may use; first is shown",
    )
    server.add_argument("--skip-tokenizer-init", action="store_true", help="take and give token ids only")
    server.add_argument(
        "--chat-template", type=Path, default=None, metavar="FILE", help="instead of the model's"
    )
    server.add_argument(
        "--tool-call-parser",
        choices=("auto", "none", *TOOL_FORMATS),
        default="auto",
        help="how the model writes its calls; auto: as its model_type does",
    )
    server.add_argument(
        "--reasoning-parser",
        choices=("auto", "none", *REASONING_FORMATS),
        default="auto",
        help="how the model marks its reasoning; none: it stays in the content",
    )
    server.add_argument(
        "--enable-auto-tool-choice",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let the model decide about calls; without it tools are refused",
    )
    server.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="auto: generation_config.json gives the sampling defaults",
    )
    server.add_argument(
        "--driver", choices=("process", "thread"), default="process", help="where the engine runs"
    )
    server.add_argument(
        "--engine-hang-timeout",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="requests but no engine step for this long makes /health 503",
    )
    server.add_argument(
        "--restart-engine",
        action="store_true",
        help="start an engine that died or hangs anew, up to 3 times in 10 minutes, instead of leaving",
    )
    server.add_argument(
        "--shutdown-timeout",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="how long SIGTERM lets running requests finish",
    )
    server.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help=" "
    )
    server.add_argument(
        "--otlp-traces-endpoint",
        default=None,
        metavar="URL",
        help="send a span a sequence there, such as http://localhost:4318/v1/traces; needs [otel]",
    )
    server.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="json: one object a line"
    )
    server.add_argument("--log-requests", action="store_true", help="log a line for each request")
    recipe.add_arguments(parser)
    return parser


def serve(recipe: Recipe, argv: Sequence[str], prog: str) -> int:
    """Run a server until it is told to stop; returns the process's exit code.

    0 after an orderly end, 1 when the engine did not start or was lost, 2 for wrong flags (as argparse does),
    130 or 143 when interrupted or terminated while starting. Errors are one line on stderr.
    """
    args = build_parser(recipe, prog).parse_args(argv)
    set_up_logging(args.log_level, args.log_format)
    args.api_key = args.api_key or os.environ.get("OPENINFER_API_KEY")
    try:
        model_type = _check_checkpoint(recipe, args.model_dir)
        _choose_parsers(args, model_type)
        spec = recipe.engine_spec(args.model_dir, args)
        return asyncio.run(_serve(args, spec))
    except (FrontendError, ValueError, OSError) as error:
        logging.getLogger(__name__).debug("start-up failed", exc_info=True)
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


async def _serve(args: argparse.Namespace, spec: "EngineSpec") -> int:
    from openinfer.frontend.http import SamplingDefaults, create_app, run_server

    began = time.monotonic()
    main_task = asyncio.current_task()
    assert main_task is not None
    # Until run_server takes over, SIGTERM ends the start-up in order; asyncio does so for SIGINT.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main_task.cancel)
    listener = _bind(args.host, args.port)
    with listener:
        client = _client(args, spec)
        tracing = None
        tokens = asyncio.create_task(asyncio.to_thread(_load_tokenizer, args))
        try:
            await asyncio.gather(_start(client, args), tokens)
            tokenizer, template = tokens.result()
            auto = args.generation_config == "auto"
            defaults = SamplingDefaults.load(args.model_dir) if auto else SamplingDefaults()
            if defaults.repetition_penalty not in (None, 1) and "penalties" not in client.info.features:
                _say("generation_config.json asks for a repetition_penalty, which this engine ignores")
            if args.otlp_traces_endpoint is not None:
                from openinfer.frontend.http.tracing import Tracing

                tracing = Tracing.to(args.otlp_traces_endpoint, client.info.model)
            app = create_app(
                client,
                tokenizer=tokenizer,
                template=template,
                tool_parser=args.tool_call_parser,
                reasoning_parser=args.reasoning_parser,
                defaults=defaults,
                model_names=args.served_model_name,
                api_key=args.api_key,
                log_requests=args.log_requests,
                tracing=tracing,
            )

            def on_ready() -> None:
                host, port = listener.getsockname()[:2]
                shown = f"[{host}]" if ":" in host else host
                _say(f"ready on http://{shown}:{port} in {time.monotonic() - began:.1f} s")

            return await run_server(
                app, listener, shutdown_timeout_s=args.shutdown_timeout, on_ready=on_ready
            )
        finally:
            await client.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)


async def _start(client: "EngineClient", args: argparse.Namespace) -> None:
    began = time.monotonic()
    await client.start()
    info = client.info
    _say(
        f"engine started in {time.monotonic() - began:.2f} s: {info.model}, context {info.max_model_len}, "
        f"KV cache {info.kv_capacity_tokens} tokens ({info.kv_capacity_tokens / info.max_model_len:.1f} x context)"
    )


def _client(args: argparse.Namespace, spec: "EngineSpec") -> "EngineClient":
    if args.driver == "thread":
        from openinfer.frontend.thread_driver import ThreadDriver

        if args.restart_engine:
            raise ValueError("--restart-engine needs --driver process: a thread cannot be ended from outside")
        return ThreadDriver(spec.build, hang_timeout_s=args.engine_hang_timeout)
    from openinfer.frontend.process_driver import ProcessDriver

    def make() -> ProcessDriver:
        return ProcessDriver(spec, hang_timeout_s=args.engine_hang_timeout)

    if not args.restart_engine:
        return make()
    from openinfer.frontend.restart import RestartingClient

    return RestartingClient(make)


def _choose_parsers(args: argparse.Namespace, model_type: str) -> None:
    """Put what `auto` and `none` stand for in their place."""
    tools, reasoning = default_formats(model_type)
    by_model = {"tool_call_parser": tools, "reasoning_parser": reasoning}
    for name, default in by_model.items():
        chosen = getattr(args, name)
        setattr(args, name, default if chosen == "auto" else None if chosen == "none" else chosen)
    if not args.enable_auto_tool_choice:
        args.tool_call_parser = None
    args.coded_template = model_type.startswith("deepseek_v4")


def _load_tokenizer(args: argparse.Namespace) -> "tuple[Tokenizer | None, Renderer | None]":
    from openinfer.frontend.http import ChatTemplate, Tokenizer, find_template

    if args.skip_tokenizer_init:
        return None, None
    began = time.monotonic()
    tokenizer = Tokenizer.load(args.model_dir)
    if args.chat_template is not None:
        source: str | None = args.chat_template.read_text(encoding="utf-8")
    else:
        source = find_template(args.model_dir, tokenizer.config)
    template: Renderer | None = None
    if source is not None:
        template = ChatTemplate(source, tokenizer.special_tokens)
    elif args.coded_template:
        template = DeepSeekV4Renderer()
    chat = "with chat template" if template else "no chat template: /v1/chat/completions is refused"
    _say(f"tokenizer loaded in {time.monotonic() - began:.2f} s, {chat}")
    return tokenizer, template


def _check_checkpoint(recipe: Recipe, model_dir: Path) -> str:
    """The model_type of a checkpoint that the recipe serves."""
    path = model_dir / "config.json"
    if not path.is_file():
        raise ModelFilesError(f"{path} does not exist: MODEL_DIR must be a checkpoint directory")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFilesError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict) or not recipe.matches(config):
        kind = config.get("model_type") if isinstance(config, dict) else None
        raise ModelFilesError(
            f"{path} has model_type {kind!r}, which the recipe {recipe.name!r} does not serve"
        )
    return str(config.get("model_type"))


def _bind(host: str, port: int) -> socket.socket:
    """Bound but not listening: clients are refused, not left hanging, until the engine is ready."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value


def _say(line: str) -> None:
    sys.stderr.write(f"openinfer: {line}\n")  # one write: two threads may speak at once
    sys.stderr.flush()
