"""The endpoints beside OpenAI's completions: responses, Anthropic's messages, the tokenizer's, and /render: the input
of a generation, without generating, for routers. Its answers have the names of vLLM's GenerateRequest."""

import asyncio
import dataclasses
import time
import uuid
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from openinfer.frontend.errors import APIError
from openinfer.frontend.http.anthropic.messages_body import MessagesBody, messages_chat, messages_common
from openinfer.frontend.http.anthropic.messages_shape import MessagesShape
from openinfer.frontend.http.body import MAX_TOOLS, Body, Messages, ToolSpec, read_json_body
from openinfer.frontend.http.chat import Chat, chat_messages
from openinfer.frontend.http.openai.chat_body import ChatBody, tool_object
from openinfer.frontend.http.openai.completions import CompletionBody
from openinfer.frontend.http.openai.responses_body import (
    KeptItems,
    ResponsesBody,
    responses_chat,
    responses_common,
)
from openinfer.frontend.http.openai.responses_shape import ResponsesShape
from openinfer.frontend.http.params import prompt_ids
from openinfer.frontend.http.service import PreparedRequest, Service, json_response
from openinfer.frontend.http.tokenizer import Tokenizer

MAX_TOKENS_SHOWN = 32768
COUNTED_CHARS = 1 << 20
"""The most characters of a text that /tokenize takes; 16 for each token of the context where that is more."""


class TokenizeBody(Body, kw_only=True):
    """POST /tokenize: a text, or a chat as its template writes it."""

    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[list[ToolSpec], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    model: str | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class Dialects:
    """The endpoints, over a Service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._kept = KeptItems()

    async def responses(self, request: Request) -> Response:
        arrival, service = time.monotonic(), self._service
        body = await read_json_body(request, ResponsesBody)
        asked = await self.prepare_response(request, body)
        shape = ResponsesShape(body, asked.plan, service.tokenizer, self._kept)
        return service.answer(request, asked, arrival, shape)

    async def prepare_response(self, request: Request, body: ResponsesBody) -> PreparedRequest:
        """Do the work of Service.prepare_answer for this dialect."""
        service, limit = self._service, "max_output_tokens"
        plan = service.check(responses_common(body), None, "text")
        chat = responses_chat(body, self._kept, service.template_variables)
        return await service.prepare_chat(request, chat, plan, "input", limit, body.max_output_tokens)

    async def messages(self, request: Request) -> Response:
        arrival, service = time.monotonic(), self._service
        body = await read_json_body(request, MessagesBody)
        if body.max_tokens is None:
            raise APIError("max_tokens is missing", param="max_tokens")
        asked = await self._prepare_messages(request, body, body.max_tokens)
        return service.answer(request, asked, arrival, MessagesShape(asked.plan, service.tokenizer))

    async def count_tokens(self, request: Request) -> Response:
        body = await read_json_body(request, MessagesBody)
        asked = await self._prepare_messages(request, body, None)
        return json_response({"input_tokens": len(asked.prompts[0])})

    async def _prepare_messages(
        self, request: Request, body: MessagesBody, max_tokens: int | None
    ) -> PreparedRequest:
        service = self._service
        plan = service.check(messages_common(body), None, "output_format")
        chat = messages_chat(body, service.template_variables, service.chat_format.options)
        return await service.prepare_chat(request, chat, plan, "messages", "max_tokens", max_tokens)

    async def tokenize(self, request: Request) -> Response:
        body = await read_json_body(request, TokenizeBody)
        self._service.known(body.model)
        tokenizer = self._tokenizer()
        if (body.prompt is None) == (body.messages is None):
            raise APIError("give either prompt or messages", param="prompt")
        if body.prompt is not None:
            parts, special = [body.prompt], body.add_special_tokens
        else:
            chat = Chat(
                messages=chat_messages(body.messages, []),
                tools=[tool_object(tool.function) for tool in body.tools or ()],
                add_generation_prompt=body.add_generation_prompt,
                continue_final=body.continue_final_message,
                options=body.chat_template_kwargs or {},
            )
            parts, special = await self._service.chat_format.prompt(chat), False
        most = max(COUNTED_CHARS, 16 * self._service.client.info.max_model_len)
        if (length := sum(map(len, parts))) > most:
            raise APIError(
                f"the text has {length} characters, at most {most} are tokenized", code="request_too_large"
            )
        ids = await tokenizer.encode(*parts, add_special_tokens=special)
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": self._service.client.info.max_model_len,
            "tokens": ids,
            "token_strs": None,
        }
        if body.return_token_strs:
            if len(ids) > MAX_TOKENS_SHOWN:
                raise APIError(
                    f"return_token_strs is for at most {MAX_TOKENS_SHOWN} tokens, the text has {len(ids)}",
                    param="return_token_strs",
                )
            answer["token_strs"] = [tokenizer.token_text(token_id) for token_id in ids]
        return json_response(answer)

    async def tokenizer_info(self, request: Request) -> Response:
        """GET /tokenizer_info: tokenizer_config.json, its special tokens as text, and the template in use."""
        renderer = self._service.chat_format.renderer
        template = renderer.spec.kwargs.get("source") if renderer else None
        tokenizer = self._tokenizer()
        return json_response({**tokenizer.config, **tokenizer.special_tokens, "chat_template": template})

    async def detokenize(self, request: Request) -> Response:
        body = await read_json_body(request, DetokenizeBody)
        self._service.known(body.model)
        ids = prompt_ids(body.tokens, self._service.client.info, "tokens") if body.tokens else []
        return json_response({"prompt": await asyncio.to_thread(self._tokenizer().decode, ids, False)})

    async def render_chat(self, request: Request) -> Response:
        body = await read_json_body(request, ChatBody)
        (rendered,) = _rendered("chatcmpl", await self._service.prepare_answer(request, body))
        return json_response(rendered)

    async def render_completions(self, request: Request) -> Response:
        body = await read_json_body(request, CompletionBody)
        return json_response(_rendered("cmpl", await self._service.prepare_completions(request, body)))

    async def render_responses(self, request: Request) -> Response:
        body = await read_json_body(request, ResponsesBody)
        (rendered,) = _rendered("resp", await self.prepare_response(request, body))
        return json_response(rendered)

    def _tokenizer(self) -> Tokenizer:
        if self._service.tokenizer is None:
            raise APIError("this server runs without a tokenizer")
        return self._service.tokenizer


def _rendered(prefix: str, asked: PreparedRequest) -> list[dict[str, Any]]:
    plan, sampling = asked.plan, dataclasses.asdict(asked.plan.sampling)
    sampling |= {"logit_bias": {str(token): bias for token, bias in plan.sampling.logit_bias} or None}
    return [
        {
            "request_id": f"{prefix}-{uuid.uuid4().hex}",
            "token_ids": ids,
            "features": None,
            "sampling_params": {
                **sampling,
                "n": plan.n,
                "max_tokens": limit,
                "stop": plan.stop,
                "include_stop_str_in_output": plan.include_stop,
                "skip_special_tokens": plan.skip_special_tokens,
                "prompt_logprobs": plan.wanted_of_prompt,
            },
            "model": plan.model,
            "stream": plan.stream,
            "stream_options": None,
            "cache_salt": plan.cache_salt or None,
            "priority": plan.priority,
            "kv_transfer_params": plan.kv_transfer,
        }
        for ids, limit in zip(asked.prompts, asked.limits, strict=True)
    ]
