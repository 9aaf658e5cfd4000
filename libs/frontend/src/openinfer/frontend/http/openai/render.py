"""The input of a generation, without generating: token ids and sampling parameters, for routers.

The answers have the names of vLLM's GenerateRequest, so that a router that reads those can route to this server.
"""

import dataclasses
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from openinfer.frontend.http.body import CHAT_REFUSED, REFUSED, read_json_body
from openinfer.frontend.http.dialects import Dialects
from openinfer.frontend.http.openai import responses_body
from openinfer.frontend.http.openai.chat_body import ChatBody
from openinfer.frontend.http.openai.completions import CompletionBody
from openinfer.frontend.http.openai.responses_body import ResponsesBody
from openinfer.frontend.http.params import Plan
from openinfer.frontend.http.service import Service, json_response


class Render:
    """The endpoints, over those that generate."""

    def __init__(self, service: Service, dialects: Dialects) -> None:
        self._service, self._dialects = service, dialects

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions/render."""
        body = await read_json_body(request, ChatBody, CHAT_REFUSED)
        model, plan, ids, limit, _ = await self._service.prepare_answer(request, body)
        return json_response(_rendered("chatcmpl", model, plan, ids, limit))

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions/render: one for each prompt."""
        body = await read_json_body(request, CompletionBody, REFUSED)
        model, plan, prompts, limits = await self._service.prepare_completions(request, body)
        found = zip(prompts, limits, strict=True)
        return json_response([_rendered("cmpl", model, plan, ids, limit) for ids, limit in found])

    async def responses(self, request: Request) -> Response:
        """POST /v1/responses/render."""
        body = await read_json_body(request, ResponsesBody, responses_body.REFUSED)
        model, plan, ids, limit, _ = await self._dialects.prepare_response(request, body)
        return json_response(_rendered("resp", model, plan, ids, limit))


def _rendered(prefix: str, model: str, plan: Plan, ids: Sequence[int], limit: int) -> dict[str, Any]:
    sampling = dataclasses.asdict(plan.sampling)
    sampling |= {"logit_bias": {str(token): bias for token, bias in plan.sampling.logit_bias} or None}
    return {
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
        "model": model,
        "stream": plan.stream,
        "stream_options": None,
        "cache_salt": plan.cache_salt or None,
        "priority": plan.priority,
        "kv_transfer_params": plan.kv_transfer,
    }
