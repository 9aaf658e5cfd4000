"""The ASGI application."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from openinfer.frontend.chat import TOOL_FORMATS, Renderer, RendererSpec
from openinfer.frontend.client import EngineClient
from openinfer.frontend.errors import APIError, FlagError
from openinfer.frontend.http.admin import Admin
from openinfer.frontend.http.admin.metrics import Board
from openinfer.frontend.http.answer import error_response
from openinfer.frontend.http.anthropic.messages_shape import messages_error
from openinfer.frontend.http.dialects import Dialects
from openinfer.frontend.http.elsewhere import hint
from openinfer.frontend.http.guard import ApiKeyGuard, Cors, PageGuard, RequestLog
from openinfer.frontend.http.openapi import Endpoint, document, endpoints
from openinfer.frontend.http.pages import WebPages
from openinfer.frontend.http.params import SamplingDefaults
from openinfer.frontend.http.service import Service, json_response
from openinfer.frontend.http.shapes import package_version
from openinfer.frontend.http.text.chat_format import ChatFormat, SpecialTokenGuard
from openinfer.frontend.http.tokenizer import Tokenizer
from openinfer.frontend.render_pool import RenderPool

if TYPE_CHECKING:
    from openinfer.frontend.http.admin.tracing import Tracing


def create_app(
    client: EngineClient,
    *,
    tokenizer: Tokenizer | None = None,
    template: Renderer | RendererSpec | RenderPool | None = None,
    template_options: Mapping[str, Any] | None = None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    special_tokens_in_text: bool = True,
    defaults: SamplingDefaults | None = None,
    model_names: Sequence[str] = (),
    api_key: str | None = None,
    access_log: bool = False,
    log_requests: bool = False,
    tracing: "Tracing | None" = None,
    board: Board | None = None,
    cors: Cors | None = None,
    plan: bytes | None = None,
    local: bool = False,
    weight_updates: bool = False,
) -> Starlette:
    """OpenAI's endpoints over an engine; `app.state.service` is the Service.

    The application's lifespan starts and closes the client: run it with any ASGI server. Code that manages the client
    elsewhere must turn the lifespan off (uvicorn: lifespan="off") and await `app.state.service.prepare()` once the
    client has started. run_server does so.

    tokenizer: None takes token-id prompts only. template: None refuses chat. It is made in a process of its own; a
    RendererSpec is made only there. A RenderPool is closed with the application.
    template_options: values of the template's variables where a request gives no others.
    tool_parser, reasoning_parser: names of chat.TOOL_FORMATS and chat.REASONING_FORMATS; None refuses tools, leaves
    reasoning in the content.
    special_tokens_in_text: whether the text of a special token in a message becomes that token, as in most servers.
    False needs a byte-level tokenizer: FlagError.
    defaults: sampling values for requests that give none. model_names: what requests may call the model
    (default: the engine's name). api_key: wanted on all paths but /health, /ping, /ready and the pages at / and /plan.
    access_log: log a line for each HTTP request. log_requests: log a line for what each request generated, at its end.
    tracing: where spans go; closed by its owner. board: where /metrics counts, one for all processes of a server.
    cors: pages of which origins may call. plan: the JSON of `openinfer plan`, for the page at /plan.
    local: the server listens on loopback only. Without a key it then refuses Hosts that a stranger's DNS can have.
    weight_updates: take /update_weights without a key too.
    """
    if template is not None and not isinstance(template, RenderPool):
        template = RenderPool(template if isinstance(template, RendererSpec) else template.spec)
    service = Service(
        client,
        tokenizer=tokenizer,
        chat_format=ChatFormat(
            renderer=template,
            options=template_options or {},
            tools=TOOL_FORMATS[tool_parser] if tool_parser else None,
            reasoning=reasoning_parser is not None,
            guard=None if special_tokens_in_text or tokenizer is None else _guard(tokenizer),
        ),
        defaults=defaults or SamplingDefaults(),
        model_names=model_names,
        log_requests=log_requests,
        tracing=tracing,
        board=board,
    )

    admin = Admin(service, weight_updates or api_key is not None)
    table = endpoints(service, Dialects(service), WebPages(service, plan), admin)

    cors = cors or Cors()
    guards = [Middleware(PageGuard, origins=cors.origins, local=local and api_key is None)]
    if api_key:
        guards.append(Middleware(ApiKeyGuard, api_key=api_key))
    app = Starlette(
        routes=[
            *(Route(one.path, one.handler, methods=[one.method]) for one in table),
            Route("/openapi.json", partial(_openapi, table, service, api_key is not None)),
        ],
        middleware=[Middleware(RequestLog, logs=access_log), *cors.middleware(), *guards],
        exception_handlers={APIError: _refuse, HTTPException: _on_http_error, Exception: _on_bug},
        lifespan=service.lifespan,
    )
    app.state.service = service
    return app


def _guard(tokenizer: Tokenizer) -> SpecialTokenGuard:
    special, added = (tokenizer.special_texts(added=added) for added in (False, True))
    if not tokenizer.is_bytes or any(len(text) < 2 for text in added):
        raise FlagError(
            "--no-special-tokens-in-text needs a byte-level tokenizer whose special tokens have two characters or more"
        )
    return SpecialTokenGuard(special, added)


async def _openapi(table: Sequence[Endpoint], service: Service, guarded: bool, request: Request) -> Response:
    names = [*service.names(), *service.adapters()]
    return json_response(document(table, package_version(), names, guarded))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow")
    routes = [route.path for route in request.app.routes if isinstance(route, Route)]
    advice = f"; this path takes {allowed}" if allowed else hint(request.url.path, routes)
    text = f"{request.method} {request.url.path}: {error.detail}{advice}"
    answer = await _refuse(request, APIError(text, status=error.status_code))
    answer.headers.update(error.headers or {})  # 405 says what is allowed
    return answer


async def _on_bug(request: Request, error: Exception) -> Response:
    # The text of an unexpected exception may hold paths and addresses: it goes to the log, not to the client.
    return await _refuse(request, APIError("internal error; the server's log has more", status=500))


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    anthropic = request.url.path.startswith("/v1/messages")
    return error_response(error, messages_error(error) if anthropic else None)
