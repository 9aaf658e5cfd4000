"""The endpoints: read, check, generate, answer."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from openinfer.frontend.client import EngineClient
from openinfer.frontend.contract import CONTRACT_VERSION
from openinfer.frontend.errors import APIError, FlagError
from openinfer.frontend.http.admin.metrics import Board, Metrics
from openinfer.frontend.http.answer import GenerationResponse
from openinfer.frontend.http.body import CommonBody, read_json_body
from openinfer.frontend.http.chat import Chat
from openinfer.frontend.http.generation import Generation
from openinfer.frontend.http.openai.chat_body import ChatBody, chat_of, top_logprobs
from openinfer.frontend.http.openai.chat_shape import ChatShape
from openinfer.frontend.http.openai.completions import CompletionBody, CompletionShape
from openinfer.frontend.http.params import (
    MAX_SEQUENCES,
    Plan,
    SamplingDefaults,
    check_grammars,
    check_size,
    make_plan,
    max_tokens_for,
    prompt_ids,
    with_echo,
)
from openinfer.frontend.http.shapes import AnswerShape, fingerprint, package_version
from openinfer.frontend.http.text.chat_format import ChatFormat
from openinfer.frontend.http.text.prompt_text import encode_prompt
from openinfer.frontend.http.text.thoughts import budgeted, without_idle_budget
from openinfer.frontend.http.tokenizer import Tokenizer

if TYPE_CHECKING:
    from openinfer.frontend.http.admin.tracing import Tracing

MAX_TRACE_PARENT_CHARS = 256
COMPLETION_MAX_TOKENS = 16

_log = logging.getLogger(__name__)


class PreparedRequest(NamedTuple):
    """What a request asks for. limits: the most tokens to generate for each of the prompts."""

    plan: Plan
    prompts: list[list[int]]
    limits: list[int]


@dataclasses.dataclass(eq=False)
class Service:
    """The state that the endpoints share. `draining` set to True makes new work 503; `active` has the open answers.

    client: a started engine client. tokenizer: None serves token-id prompts only. chat_format: how chats are written
    and read. model_names: what the model answers to; it reports the first. Empty: the engine's name.
    """

    client: EngineClient
    _: dataclasses.KW_ONLY
    tokenizer: Tokenizer | None
    chat_format: ChatFormat
    defaults: SamplingDefaults
    model_names: Sequence[str]
    log_requests: bool
    tracing: "Tracing | None"
    board: Board | None

    def __post_init__(self) -> None:
        shown = self.model_names[0] if self.model_names else None
        self.metrics = Metrics(self.client, shown, self.tracing, self.board)
        self.draining = False
        self.active: set[Generation] = set()
        self._created = int(time.time())

    async def completions(self, request: Request) -> Response:
        arrival = time.monotonic()
        body = await read_json_body(request, CompletionBody)
        asked = await self.prepare_completions(request, body)
        echoes = self._echoes(body, asked.prompts) if asked.plan.echo else ()
        shape = CompletionShape(asked.plan, self.tokenizer, echoes, self.mark)
        return self.answer(request, asked, arrival, shape)

    async def chat(self, request: Request) -> Response:
        arrival = time.monotonic()
        body = await read_json_body(request, ChatBody)
        asked = await self.prepare_answer(request, body)
        shown = body.include_reasoning is not False and not (body.reasoning and body.reasoning.exclude)
        return self.answer(request, asked, arrival, ChatShape(asked.plan, self.tokenizer, shown, self.mark))

    async def prepare_completions(self, request: Request, body: CompletionBody) -> PreparedRequest:
        """Raises APIError."""
        plan = self.check(body, body.logprobs)
        prompts = await self._prompts(request, body)
        if len(prompts) * plan.n > MAX_SEQUENCES:
            raise APIError(
                f"{len(prompts)} prompts with n = {plan.n} are too many sequences, at most {MAX_SEQUENCES} "
                "are allowed in one request",
                param="prompt",
            )
        info, asked = self.client.info, body.max_tokens
        if body.echo:
            plan = with_echo(plan, info, self.tokenizer, asked)
            asked = 1 if plan.only_echo else asked
        limits = [
            max_tokens_for(len(ids), asked, COMPLETION_MAX_TOKENS, plan, info, "max_tokens", "prompt")
            for ids in prompts
        ]
        return PreparedRequest(plan, prompts, limits)

    async def prepare_answer(self, request: Request, body: ChatBody) -> PreparedRequest:
        """Raises APIError."""
        plan, chat = self.check(body, top_logprobs(body)), chat_of(body, self.template_variables)
        limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        return await self.prepare_chat(request, chat, plan, "messages", limit, getattr(body, limit))

    async def prepare_chat(
        self, request: Request, chat: Chat, plan: Plan, field: str, limit: str, max_tokens: int | None
    ) -> PreparedRequest:
        """field, limit: where the endpoint has the chat and max_tokens. Raises APIError."""
        info, tokenizer = self.client.info, self.tokenizer
        if tokenizer is None:
            raise APIError("this server has no tokenizer; use /v1/completions", param=field)
        parts = await self.chat_format.prompt(chat)
        text, grammar = "".join(parts), plan.grammar
        if chat.tool_choice not in ("auto", "none"):
            check_grammars("tool_choice", info, tokenizer)
        if "grammar" in info.features:  # elsewhere `strict` is a wish
            grammar = self.chat_format.grammar(chat, text, grammar)
        where = self.chat_format.where(chat, text)
        grammar = budgeted(chat, where, grammar, self.template_variables, info, tokenizer)
        ids = await encode_prompt(tokenizer, parts, False, info, field, request.is_disconnected)
        new_parser = self.chat_format.parser(chat, text, plan.stream)
        reads_special = new_parser is not None and tokenizer.has_special_in(self.chat_format.markers())
        plan = msgspec.structs.replace(
            plan,
            grammar=grammar,
            skip_special_tokens=plan.skip_special_tokens and not reads_special,
            warnings=(*plan.warnings, *chat.warnings),
            new_parser=new_parser,
        )
        most = max_tokens_for(len(ids), max_tokens, None, plan, info, limit, field)
        return PreparedRequest(plan, [ids], [most])

    async def prepare(self) -> None:
        """Start the renderer, and tell the engine what it needs for grammars. The client must have been started.

        Raises ModelFilesError where the chat template cannot be used, FlagError for options that it does not have, and
        where an adapter has a name of the model.
        """
        if both := sorted(self.adapters().keys() & set(self.names())):
            raise FlagError(f"{both[0]!r} is a name of the model and of an adapter; give the adapter another")
        renderer = self.chat_format.renderer
        starting = asyncio.create_task(renderer.start()) if renderer else None
        try:
            if "grammar" in self.client.info.features and self.tokenizer is not None:
                table = self.tokenizer.token_table(self.chat_format.markers())
                if table is not None:
                    await self.client.control(table)
        finally:
            if starting is not None:
                await starting
        if strange := sorted(self.chat_format.options.keys() - self.template_variables):
            known = ", ".join(sorted(self.template_variables)) or "none"
            raise FlagError(
                f"--default-chat-template-kwargs: the template has no variable {', '.join(strange)}; it has {known}"
            )

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """The client runs while the application does."""
        await self.client.start()
        try:
            await self.prepare()
            yield
        finally:
            await self.close()
            await self.client.close()

    async def close(self) -> None:
        if self.chat_format.renderer is not None:
            await self.chat_format.renderer.close()

    async def models(self, request: Request) -> Response:
        names = [*self.names(), *self.adapters()]
        pages = {"first_id": names[0], "last_id": names[-1], "has_more": False}  # as Anthropic's clients page
        return json_response({"object": "list", "data": [self._model(name) for name in names], **pages})

    async def model(self, request: Request) -> Response:
        return json_response(self._model(self.known(request.path_params["name"])))

    def _model(self, name: str) -> dict[str, Any]:
        paths = self.adapters()
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "openinfer",
            "root": paths.get(name, self.client.info.model),
            "parent": self.names()[0] if name in paths else None,
            "max_model_len": self.client.info.max_model_len,
            # The names that Anthropic's clients know.
            "type": "model",
            "display_name": name,
            "description": self.defaults.description,
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._created)),
        }

    async def health(self, request: Request) -> Response:
        ok, detail = self.client.health()
        return json_response({"status": detail}, 200 if ok else 503)

    async def ready(self, request: Request) -> Response:
        if self.draining:
            return json_response({"status": "shutting down"}, 503)
        return await self.health(request)

    async def load(self, request: Request) -> Response:
        """GET /load: answers under way in this process."""
        return json_response({"server_load": len(self.active)})

    async def prometheus(self, request: Request) -> Response:
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request: Request) -> Response:
        return json_response({"version": package_version(), "contract_version": CONTRACT_VERSION})

    @property
    def template_variables(self) -> frozenset[str]:
        """Options of the chat template; empty without one."""
        renderer = self.chat_format.renderer
        return renderer.variables if renderer else frozenset()

    def mark(self) -> str:
        """system_fingerprint: this library's version, and that of the weights once they were updated. Requests run only
        between updates, so it is right from a request's first token on."""
        version = self.client.stats().weights_version
        return f"{fingerprint()}-{version}" if version else fingerprint()

    def names(self) -> list[str]:
        """The names that requests may use for the model; the client must have been started."""
        return list(self.model_names) or [self.client.info.model]

    def adapters(self) -> dict[str, str]:
        """The folders of the adapters (LoRA) by the names that requests use."""
        return {state.name: state.path for state in self.client.stats().adapters}

    def known(self, model: str | None) -> str:
        """The name to answer with. Raises APIError (404) for one that is not ours."""
        names = [*self.names(), *self.adapters()]
        if model is not None and model not in names:
            raise APIError(
                f"the model {model!r} does not exist; this server has {', '.join(names)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return model or names[0]

    def check(self, body: CommonBody, logprobs: int | None, format_field: str = "response_format") -> Plan:
        """What to generate. Raises APIError naming the field."""
        if self.draining:
            raise APIError("the server is shutting down", status=503, code="shutting_down")
        if why := self.client.stats().refusal:
            raise APIError(why, status=503, code="sleeping")
        model = self.known(body.model)
        plan = make_plan(body, logprobs, self.defaults, self.client.info, self.tokenizer, format_field)
        return msgspec.structs.replace(plan, model=model, adapter="" if model in self.names() else model)

    async def _prompts(self, request: Request, body: CompletionBody) -> list[list[int]]:
        prompt = body.prompt
        if prompt is None:
            raise APIError("prompt is missing", param="prompt")
        info = self.client.info
        if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], str | list)):
            return [prompt_ids(prompt, info)]
        several = [prompt] if isinstance(prompt, str) else prompt
        if len(several) > MAX_SEQUENCES:
            raise APIError(f"{len(several)} prompts, at most {MAX_SEQUENCES} are allowed", param="prompt")
        found = []
        for index, one in enumerate(several):
            name = "prompt" if isinstance(prompt, str) else f"prompt[{index}]"
            if type(one) is not type(several[0]):
                raise APIError("prompt must hold only strings or only lists of token ids", param="prompt")
            try:
                if not isinstance(one, str):
                    found.append(prompt_ids(one, info, name))
                    continue
                if self.tokenizer is None:
                    raise APIError(
                        "text prompts need a tokenizer, and this server runs without; send token ids"
                    )
                gone, special = request.is_disconnected, body.add_special_tokens is not False
                found.append(await encode_prompt(self.tokenizer, [one], special, info, name, gone))
            except APIError as error:
                raise APIError(str(error), param="prompt", code=error.code) from error
        return found

    def _echoes(self, body: CompletionBody, prompts: list[list[int]]) -> list[str]:
        if isinstance(body.prompt, str):
            return [body.prompt]
        if body.prompt and isinstance(body.prompt[0], str):
            return body.prompt
        assert self.tokenizer is not None
        return [self.tokenizer.decode(ids, skip_special_tokens=False) for ids in prompts]

    def answer(
        self, request: Request, asked: PreparedRequest, arrival: float, shape: AnswerShape
    ) -> GenerationResponse:
        plan, prompts, limits = asked
        check_size(prompts, limits, plan, self.client.info)
        plan = without_idle_budget(plan, limits)
        self.metrics.n.observe(plan.n)
        trace = request.headers.get("traceparent")
        if trace is not None and len(trace) > MAX_TRACE_PARENT_CHARS:
            trace = None
        generation = Generation(
            self.client, self.tokenizer, self.metrics, plan, prompts, limits, arrival, trace
        )
        log = partial(self._log, request.state.request_id) if self.log_requests else None
        return GenerationResponse(generation, shape, self.active, log)

    def _log(self, request_id: str, generation: Generation, outcome: str) -> None:
        usage = generation.usage()
        fields = {
            "request_id": request_id,
            "engine_id": generation.choices[0].request.id,
            "outcome": outcome,
            "sequences": len(generation.choices),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "seconds": round(time.monotonic() - generation.choices[0].request.arrival, 4),
        }
        _log.info(
            "%(outcome)s: %(sequences)d sequences, %(prompt_tokens)d prompt tokens (%(cached_tokens)d cached), "
            "%(completion_tokens)d generated in %(seconds).3f s, id %(request_id)s",
            fields,
            extra={"fields": fields},
        )


def json_response(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
