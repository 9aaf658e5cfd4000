"""One HTTP process of a server: tokenizer, application and uvicorn over an engine client."""

import asyncio
import contextlib
import ipaddress
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from openinfer.frontend import heap, render_pool
from openinfer.frontend.chat import RendererSpec, coded_renderer
from openinfer.frontend.chat.parts import template_spec
from openinfer.frontend.logs import say
from openinfer.frontend.model_files import find_templates, read_text

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from starlette.applications import Starlette

    from openinfer.frontend.client import EngineClient
    from openinfer.frontend.http import Tokenizer
    from openinfer.frontend.http.admin.tracing import Tracing
    from openinfer.frontend.render_pool import RenderPool

_log = logging.getLogger(__name__)


class WebOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of the command line that concern an HTTP process, under their names there."""

    model_dir: str
    api_key: str | None
    served_model_name: list[str]
    skip_tokenizer_init: bool
    chat_template: str | None
    default_chat_template_kwargs: dict[str, Any]
    special_tokens_in_text: bool
    model_type: str
    tool_call_parser: str | None
    reasoning_parser: str | None
    generation_config: str
    shutdown_timeout: float
    allowed_origins: tuple[str, ...]
    allowed_methods: tuple[str, ...]
    allowed_headers: tuple[str, ...]
    allow_credentials: bool
    ssl_certfile: str | None
    ssl_keyfile: str | None
    log_level: str
    log_format: str
    access_log: bool
    log_requests: bool
    otlp_traces_endpoint: str | None
    enable_weight_updates: bool
    plan: str | None
    restart_engine: bool
    engine_hang_timeout: float | None


async def serve_web(
    options: WebOptions,
    client: "EngineClient",
    listener: socket.socket,
    *,
    on_ready: Callable[[], None],
    on_engine: Callable[["EngineClient"], None] | None = None,
    on_stop: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
    now: asyncio.Event | None = None,
    boards: Sequence[Path] = (),
) -> int:
    """Start the client, serve until told to stop, close it; returns the exit code of run_server.

    on_engine, on_ready: called once the client has started, and once requests are accepted. on_stop: called with what
    was served, once no more requests are. stop, now: as run_server has them. boards: where the processes of a server
    count, our own first. Raises FrontendError, ValueError or OSError with one line for the user."""
    tracing = None
    # This process comes first, because it imports its modules while the engine starts.
    renders = None if options.skip_tokenizer_init else await render_pool.spawn()
    starting = asyncio.create_task(_start(client, on_engine))
    texts = asyncio.create_task(_start_texts(options, renders))
    try:
        await asyncio.gather(starting, texts)
        from openinfer.frontend.http import run_server

        if options.otlp_traces_endpoint is not None:
            from openinfer.frontend.http.admin.tracing import Tracing

            tracing = Tracing.to(options.otlp_traces_endpoint, client.info.model)
        app = _make_app(options, client, listener, *texts.result(), tracing, boards)
        code = await run_server(
            app,
            listener,
            shutdown_timeout_s=options.shutdown_timeout,
            on_ready=on_ready,
            stop=stop,
            now=now,
            ssl_certfile=options.ssl_certfile,
            ssl_keyfile=options.ssl_keyfile,
        )
        if on_stop is not None:
            on_stop(app.state.service.metrics.served())
        return code
    finally:
        for task in (starting, texts):  # where one has failed: a process half started is seen to its end
            task.cancel()
        await asyncio.wait([starting, texts])
        if renders is not None:
            await render_pool.end(renders)
        await client.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


def _make_app(
    options: WebOptions,
    client: "EngineClient",
    listener: socket.socket,
    tokenizer: "Tokenizer | None",
    renderer: "RenderPool | None",
    tracing: "Tracing | None",
    boards: Sequence[Path],
) -> "Starlette":
    from openinfer.frontend.http import SamplingDefaults, create_app
    from openinfer.frontend.http.admin.metrics import Board
    from openinfer.frontend.http.guard import Cors

    auto = options.generation_config == "auto"
    defaults = SamplingDefaults.load(Path(options.model_dir)) if auto else SamplingDefaults()
    if defaults.repetition_penalty not in (None, 1) and "penalties" not in client.info.features:
        say("generation_config.json asks for a repetition_penalty, which this engine ignores")
    usual, told = defaults.params(), defaults != SamplingDefaults(description=defaults.description)
    say(
        f"a request that says nothing has temperature {usual.temperature:g}, top_p {usual.top_p:g}, top_k "
        f"{usual.top_k or 'all'}: generation_config.json says {'so' if told else 'nothing else'}"
    )
    allowed = options.allowed_origins, options.allowed_methods, options.allowed_headers
    return create_app(
        client,
        tokenizer=tokenizer,
        template=renderer,
        template_options=options.default_chat_template_kwargs,
        special_tokens_in_text=options.special_tokens_in_text,
        tool_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        defaults=defaults,
        model_names=options.served_model_name,
        api_key=options.api_key,
        access_log=options.access_log,
        log_requests=options.log_requests,
        tracing=tracing,
        plan=None if options.plan is None else Path(options.plan).read_bytes(),
        board=Board.shared(boards) if boards else None,
        cors=Cors(*allowed, options.allow_credentials),
        local=ipaddress.ip_address(listener.getsockname()[0]).is_loopback,
        weight_updates=options.enable_weight_updates,
    )


async def _start(client: "EngineClient", on_engine: Callable[["EngineClient"], None] | None) -> None:
    await client.start()
    if on_engine is not None:
        on_engine(client)


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """asyncio.run, on uvloop where [fast] is installed."""
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


async def _start_texts(
    options: WebOptions, process: "Process | None"
) -> "tuple[Tokenizer | None, RenderPool | None]":
    tokenizer, template = await asyncio.to_thread(_load_tokenizer, options)
    if template is None:
        if process is not None:
            await render_pool.end(process)
        return tokenizer, None
    renderer = render_pool.RenderPool(template, process)
    await renderer.start()
    if options.tool_call_parser is not None and not renderer.shows_tools:
        say("tools: the chat template has no place for them, so the model will not see them")
    return tokenizer, renderer


def _load_tokenizer(options: WebOptions) -> "tuple[Tokenizer | None, RendererSpec | None]":
    from openinfer.frontend.http import Tokenizer

    if options.skip_tokenizer_init:
        return None, None
    began = time.monotonic()
    model_dir = Path(options.model_dir)
    tokenizer = Tokenizer.load(model_dir)
    if options.chat_template is None:
        source, with_tools = find_templates(model_dir, tokenizer.config)
    else:
        source, with_tools = read_text(Path(options.chat_template)), None
    template: RendererSpec | None = None
    if source is not None:
        template = template_spec(source, tokenizer.special_tokens, with_tools)
    elif (coded := coded_renderer(model_dir, options.model_type)) is not None:
        template = coded.spec
    chat = "with chat template" if template else "no chat template: /v1/chat/completions is refused"
    heap.trim()
    say(f"tokenizer loaded in {time.monotonic() - began:.2f} s, {chat}")
    return tokenizer, template
