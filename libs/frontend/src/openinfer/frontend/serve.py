"""The command line that every recipe shares: `python -m openinfer.recipes.<name> MODEL_DIR [flags]`.

Modules that only a server needs are imported when a server starts, so that `--help` answers at once.
"""

import argparse
import contextlib
import datetime
import errno
import logging
import signal
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from openinfer.frontend.errors import FlagError, ModelFilesError, is_users_error, one_line
from openinfer.frontend.flag_types import check_plan, key_of_environment
from openinfer.frontend.logs import open_standard_streams, say, set_up_logging
from openinfer.frontend.model_files import find_templates, read_json
from openinfer.frontend.server_flags import Recipe, build_parser

if TYPE_CHECKING:
    from openinfer.frontend.client import EngineClient
    from openinfer.frontend.contract import EngineSpec
    from openinfer.frontend.frontends import Frontends
    from openinfer.frontend.web import WebOptions

__all__ = ["Recipe", "build_parser", "serve"]

_ADVICE = {
    errno.EACCES: "ports below 1024 need rights: give --port N from 1024 on",
    errno.EADDRINUSE: "another program has the port: give --port N, or --port 0 for a free one",
    errno.EADDRNOTAVAIL: "--host takes an address of this machine; 0.0.0.0 listens on all",
}


def serve(recipe: Recipe, argv: Sequence[str], prog: str) -> int:
    """Run a server until it is told to stop; returns the process's exit code.

    The code is 0 after an orderly end, and 1 when the engine did not start or was lost. It is 2 for wrong flags (as
    argparse does), and 130 or 143 when interrupted or terminated while starting. Errors are one line on stderr.
    """
    open_standard_streams()
    args = build_parser(recipe, prog).parse_args(argv)
    try:
        args.api_key = args.api_key or key_of_environment()
    except FlagError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    set_up_logging(args.log_level, args.log_format, [args.api_key] if args.api_key else [])
    import asyncio

    from openinfer.frontend.web import run_loop

    signals: list[int] = []
    try:
        _check_tls(args.ssl_certfile, args.ssl_keyfile)
        if args.plan is not None:
            check_plan(args.plan)
        _choose_parsers(args, _check_checkpoint(recipe, args.model_dir))
        return run_loop(_serve(args, _specs(recipe, args), signals))
    except Exception as error:
        if not is_users_error(error):
            raise
        logging.getLogger(__name__).debug("start-up failed", exc_info=True)
        print(f"{prog}: error: {one_line(error)}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        return 128 + signals[0]
    except KeyboardInterrupt:  # before there was a loop
        return 128 + signal.SIGINT


def _specs(recipe: Recipe, args: argparse.Namespace) -> "Sequence[EngineSpec]":
    count = args.data_parallel_size
    if count == 1:
        return [recipe.engine_spec(args.model_dir, args)]
    if args.driver != "process":
        raise FlagError("--data-parallel-size needs --driver process: engines in one process share its GIL")
    if args.frontends > 1:
        raise FlagError(
            "--data-parallel-size is not possible with --frontends: one HTTP process knows the load"
        )
    return recipe.replica_specs(args.model_dir, args, count)


async def _serve(args: argparse.Namespace, specs: "Sequence[EngineSpec]", signals: list[int]) -> int:
    """signals: gets the number of the signal by which this was cancelled."""
    import asyncio

    from openinfer.frontend.web import serve_web

    main_task = asyncio.current_task()
    assert main_task is not None

    def interrupt(number: int) -> None:
        signals.append(number)
        main_task.cancel()

    # Until the server takes over, they end the start-up in order.
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, interrupt, number)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(one) for one in _bind(args.host, args.port, args.frontends)]

        def on_engine(client: "EngineClient") -> None:
            info = client.info
            say(
                f"engine started in {time.monotonic() - began:.2f} s: {info.model}, context {info.max_model_len}, KV "
                f"cache {info.kv_capacity_tokens} tokens ({info.kv_capacity_tokens / info.max_model_len:.1f} x context)"
            )

        def on_ready() -> None:
            host, port = listeners[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            processes = f" ({args.frontends} HTTP processes)" if args.frontends > 1 else ""
            scheme = "http" if args.ssl_certfile is None else "https"
            say(f"ready on {scheme}://{shown}:{port} in {time.monotonic() - began:.1f} s{processes}")

        def on_stop(served: str) -> None:
            say(f"stopped after {datetime.timedelta(seconds=round(time.monotonic() - began))}: {served}")

        if args.frontends > 1:
            return await _frontends(args, specs[0], listeners).run(on_engine, on_ready, on_stop)
        client = _client(args, specs)
        return await serve_web(
            _web_options(args), client, listeners[0], on_engine=on_engine, on_ready=on_ready, on_stop=on_stop
        )


def _frontends(args: argparse.Namespace, spec: "EngineSpec", listeners: list[socket.socket]) -> "Frontends":
    from openinfer.frontend.frontends import Frontends
    from openinfer.frontend.process_driver import ProcessDriver

    if args.driver != "process":
        raise FlagError("--frontends needs --driver process: a thread serves the process that it is in")
    make_engine = partial(ProcessDriver, spec, hang_timeout_s=args.engine_hang_timeout)
    return Frontends(_web_options(args), make_engine, listeners)


def _web_options(args: argparse.Namespace) -> "WebOptions":
    import msgspec

    from openinfer.frontend.web import WebOptions

    values = {name: getattr(args, name) for name in WebOptions.__struct_fields__}
    # A level of sleep drops the weights, and then an update must bring them.
    values["enable_weight_updates"] |= getattr(args, "enable_sleep_mode", False)
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
    return msgspec.convert(plain, WebOptions)


def _client(args: argparse.Namespace, specs: "Sequence[EngineSpec]") -> "EngineClient":
    if args.driver == "thread":
        from openinfer.frontend.thread_driver import ThreadDriver

        if args.restart_engine:
            raise FlagError("--restart-engine needs --driver process: a thread cannot be ended from outside")
        return ThreadDriver(specs[0].build, hang_timeout_s=args.engine_hang_timeout)
    from openinfer.frontend.process_driver import ProcessDriver

    make = partial(ProcessDriver, hang_timeout_s=args.engine_hang_timeout)
    if len(specs) == 1 and not args.restart_engine:
        return make(specs[0])
    from openinfer.frontend.replicas import ReplicatedClient
    from openinfer.frontend.restart import RestartingClient

    clients = [RestartingClient(partial(make, spec)) for spec in specs]
    return clients[0] if len(clients) == 1 else ReplicatedClient(clients)


def _choose_parsers(args: argparse.Namespace, model_type: str) -> None:
    from openinfer.frontend.chat import default_formats

    config = args.model_dir / "tokenizer_config.json"
    templates = find_templates(args.model_dir, read_json(config) if config.exists() else {})
    tools, reasoning = default_formats(model_type, templates)
    by_model = {"tool_call_parser": tools, "reasoning_parser": reasoning}
    for name, default in by_model.items():
        chosen = getattr(args, name)
        setattr(args, name, default if chosen == "auto" else None if chosen == "none" else chosen)
    if not args.enable_auto_tool_choice:
        args.tool_call_parser = None
    args.model_type = model_type


def _check_checkpoint(recipe: Recipe, model_dir: Path) -> str:
    path = model_dir / "config.json"
    if not path.exists():
        raise ModelFilesError(f"{path} does not exist: MODEL_DIR must be a checkpoint directory")
    config = read_json(path)
    if not recipe.matches(config):
        kind = repr(config.get("model_type"))[:80]
        raise ModelFilesError(
            f"{path} has model_type {kind}, which the recipe {recipe.name!r} does not serve"
        )
    return str(config.get("model_type"))


def _check_tls(certificate: Path | None, key: Path | None) -> None:
    if certificate is None:
        if key is not None:
            raise FlagError("--ssl-keyfile needs --ssl-certfile")
        return
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:
        given = f"--ssl-certfile {certificate}" + (f", --ssl-keyfile {key}" if key else "")
        raise FlagError(f"{given}: {error.strerror or error}") from error


def _bind(host: str, port: int, count: int) -> list[socket.socket]:
    """Bound but not listening: clients are refused, not left hanging, until the engine is ready. Sharing a port is open
    to all, so a first socket checks that no other program has it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: no name of a host
        why = getattr(error, "strerror", None) or error
        raise FlagError(f"--host {host}: {why}; give an address of this machine") from error
    listeners: list[socket.socket] = []

    def bind(*options: int) -> None:
        listeners.append(socket.socket(family, kind, protocol))
        for option in (socket.SO_REUSEADDR, *options):
            listeners[-1].setsockopt(socket.SOL_SOCKET, option, 1)
        listeners[-1].bind(address)

    try:
        bind()
        if count > 1:
            address = listeners[0].getsockname()
            listeners.pop().close()
            for _ in range(count):
                bind(socket.SO_REUSEPORT)
    except OSError as error:
        for listener in listeners:
            listener.close()
        advice = _ADVICE.get(error.errno or 0, "give another --host or --port")
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}; {advice}") from error
    return listeners
