"""The endpoints as one table, and the OpenAPI document made from it and from the types that check the bodies."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from openinfer.frontend.http.admin import Admin, LoadBody, SleepBody, UnloadBody, UpdateBody, WakeBody
from openinfer.frontend.http.anthropic.messages_body import MessagesBody
from openinfer.frontend.http.body import Body
from openinfer.frontend.http.dialects import DetokenizeBody, Dialects, TokenizeBody
from openinfer.frontend.http.guard import OPEN_PATHS
from openinfer.frontend.http.openai.chat_body import ChatBody
from openinfer.frontend.http.openai.chat_shape import ChatResponse
from openinfer.frontend.http.openai.completions import CompletionBody, CompletionResponse
from openinfer.frontend.http.openai.responses_body import ResponsesBody
from openinfer.frontend.http.pages import WebPages
from openinfer.frontend.http.service import Service

_REF = "#/components/schemas/{name}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type"]}},
}
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""Either will do."""
_KINDS = {"/": "text/html", "/plan": "text/html", "/favicon.svg": "image/svg+xml", "/metrics": "text/plain"}
_REFUSALS = {
    400: "The request cannot be honoured; the message names the field.",
    401: "The API key is missing or wrong.",
    403: "A web page of another origin, a Host of a stranger, or a route that the server was not started with.",
    404: "The model does not exist.",
    408: "The body took too long.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    500: "The engine failed.",
    503: "Overloaded, starting, ending or broken; Retry-After says when to come back.",
}


class Endpoint(NamedTuple):
    """One path. body: what its JSON is checked by."""

    path: str
    handler: Callable[[Request], Awaitable[Response]]
    summary: str
    body: type[Body] | None = None
    answer: type[msgspec.Struct] | None = None
    streams: bool = False

    @property
    def method(self) -> str:
        return "POST" if self.body else "GET"


def endpoints(service: Service, dialects: Dialects, pages: WebPages, admin: Admin) -> list[Endpoint]:
    """All that a server answers, /openapi.json apart."""
    ids = "token ids and sampling parameters, nothing generated"
    items = f"A list of items' {ids}"
    return [
        Endpoint(
            "/v1/completions",
            service.completions,
            "Continue prompts",
            CompletionBody,
            CompletionResponse,
            True,
        ),
        Endpoint("/v1/chat/completions", service.chat, "Answer a chat", ChatBody, ChatResponse, True),
        Endpoint("/v1/responses", dialects.responses, "Answer a list of items", ResponsesBody, None, True),
        Endpoint("/v1/messages", dialects.messages, "Answer a chat (Anthropic)", MessagesBody, None, True),
        Endpoint("/v1/messages/count_tokens", dialects.count_tokens, "Count a chat's tokens", MessagesBody),
        Endpoint("/v1/chat/completions/render", dialects.render_chat, f"A chat's {ids}", ChatBody),
        Endpoint(
            "/v1/completions/render", dialects.render_completions, f"Each prompt's {ids}", CompletionBody
        ),
        Endpoint("/v1/responses/render", dialects.render_responses, items, ResponsesBody),
        Endpoint("/tokenize", dialects.tokenize, "Text or chat to token ids", TokenizeBody),
        Endpoint("/detokenize", dialects.detokenize, "Token ids to text", DetokenizeBody),
        Endpoint(
            "/tokenizer_info", dialects.tokenizer_info, "The tokenizer's settings and the chat template"
        ),
        Endpoint("/v1/load_lora_adapter", admin.load, "Load an adapter (LoRA)", LoadBody),
        Endpoint("/v1/unload_lora_adapter", admin.unload, "Forget an adapter (LoRA)", UnloadBody),
        Endpoint("/v1/models", service.models, "The names of the model and of its adapters"),
        Endpoint("/v1/models/{name:path}", service.model, "One of the model's names"),
        Endpoint("/health", service.health, "503 when the engine is dead or hangs"),
        Endpoint("/ready", service.ready, "503 also while shutting down"),
        Endpoint("/ping", service.health, "The same as /health"),
        Endpoint("/load", service.load, "Answers under way"),
        Endpoint("/v1/load", service.load, "The same as /load"),
        Endpoint("/metrics", service.prometheus, "Prometheus"),
        Endpoint("/", pages.chat, "A chat and the engine's state, for people"),
        Endpoint("/favicon.svg", pages.icon, "The icon of the page"),
        Endpoint("/state", pages.state, "The engine's state in numbers"),
        Endpoint("/plan", pages.curves, "The curves of a plan over load, for people"),
        Endpoint("/plan.json", pages.plan, "The plan that the server was started with"),
        Endpoint("/version", service.version, "Versions"),
        Endpoint("/debug/traces", admin.traces, "Traces of what took longer than it should"),
        Endpoint("/update_weights", admin.update, "All weights from another checkpoint", UpdateBody),
        Endpoint("/sleep", admin.sleep, "Give the device's memory back", SleepBody),
        Endpoint("/wake_up", admin.wake_up, "Take the memory again", WakeBody),
        Endpoint("/is_sleeping", admin.is_sleeping, "Whether the engine sleeps"),
    ]


def document(table: Sequence[Endpoint], version: str, models: Sequence[str], guarded: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document. models: the names that requests may give. guarded: there is an API key."""
    text = "Known, and not supported: only values that ask for nothing."
    types = {kind for endpoint in table for kind in (endpoint.body, endpoint.answer) if kind is not None}
    by_name = sorted(types, key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(by_name, ref_template=_REF)
    for endpoint in table:
        if endpoint.body is not None:
            properties = schemas[endpoint.body.__name__]["properties"]
            refused = endpoint.body.refused.items()
            properties |= {name: {"enum": list(values), "description": text} for name, values in refused}
            if "model" in properties:
                properties["model"] = {"enum": [*models, None], "default": None}
    paths = {
        one.path.replace("{name:path}", "{name}"): {one.method.lower(): _operation(one, models)}
        for one in table
    }
    keys = _SCHEMES if guarded else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "openinfer", "version": version},
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": _ERROR}, "securitySchemes": keys},
        "security": [{name: []} for name in keys],
    }


def _operation(endpoint: Endpoint, models: Sequence[str]) -> dict[str, Any]:
    whole: dict[str, Any] = {} if endpoint.answer is None else _ref(endpoint.answer.__name__)
    content = {_KINDS.get(endpoint.path, "application/json"): {"schema": whole}}
    if endpoint.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    answers: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    # Anthropic's error object has its `error` in the same place; health and readiness have a status.
    error = {} if endpoint.body is None else {"application/json": {"schema": _ref("Error")}}
    answers |= {str(status): {"description": text, "content": error} for status, text in _REFUSALS.items()}
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": answers}
    if endpoint.path in OPEN_PATHS:
        operation["security"] = []
    if endpoint.body is not None:
        name = endpoint.body.__name__
        body = {"schema": _ref(name), "example": EXAMPLES[name]}
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
    if "{" in endpoint.path:
        schema = {"enum": [*models]}
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": schema}]
    return operation


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(name=name)}


_CHAT = [{"role": "user", "content": "Hello"}]
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "ChatBody": {"messages": _CHAT, "max_tokens": 16},
    "CompletionBody": {"prompt": "Hello", "max_tokens": 16},
    "DetokenizeBody": {"tokens": [5, 6]},
    "LoadBody": {"lora_name": "sql", "lora_path": "/adapters/sql"},
    "MessagesBody": {"messages": _CHAT, "max_tokens": 16},
    "ResponsesBody": {"input": "Hello", "max_output_tokens": 16},
    "SleepBody": {"level": 1},
    "TokenizeBody": {"prompt": "Hello"},
    "UnloadBody": {"lora_name": "sql"},
    "UpdateBody": {"path": "/checkpoints/step-7", "version": "step 7"},
    "WakeBody": {},
}
"""Name of a body -> one that every server answers."""
