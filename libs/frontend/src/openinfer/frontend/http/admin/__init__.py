"""Endpoints for the people and trainers that run the server: adapters, slow steps, new weights, sleep."""

from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from openinfer.frontend import contract
from openinfer.frontend.errors import APIError, EngineDeadError, Unsupported
from openinfer.frontend.http.body import Body, read_json_body
from openinfer.frontend.http.service import Service, json_response

__all__ = ["Admin", "LoadBody", "SleepBody", "UnloadBody", "UpdateBody", "WakeBody"]

NOTHING = '{"found": 0, "traces": []}'
MAX_NAME_CHARS = 256
MAX_VERSION_CHARS = 128
MAX_LEVEL = 999
"""The engine says which levels it has."""


class UpdateBody(Body):
    """POST /update_weights. path: a checkpoint folder that the server can read, or the Unix socket of a process that
    shares its weights (openinfer.tensor.SharedWeights). version: answers name it."""

    path: str
    version: str


class SleepBody(Body):
    """POST /sleep; the body may be empty, and ?level=1 says the same. level: 1 keeps the weights in host memory,
    2 drops them, and then an update must follow the wake-up."""

    level: Annotated[int, msgspec.Meta(ge=0, le=MAX_LEVEL)] = 1


class WakeBody(Body):
    """POST /wake_up; the body may be empty."""


class LoadBody(Body):
    """POST /v1/load_lora_adapter. lora_path: a folder that the server can read."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadBody(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: str


class Admin:
    """Commands to the engine. They want the API key where there is one. Those for adapters (LoRA) are as vLLM's.
    weight_updates: take /update_weights."""

    def __init__(self, service: Service, weight_updates: bool) -> None:
        self._service = service
        self._weight_updates = weight_updates

    async def traces(self, request: Request) -> Response:
        """GET /debug/traces: steps, runs of steps and first tokens that took longer than they should."""
        return Response(
            await self._control(contract.SlowTraces(), 501) or NOTHING, media_type="application/json"
        )

    async def update(self, request: Request) -> Response:
        """POST /update_weights: all weights from another checkpoint of the same model. 409 while requests run."""
        if not self._weight_updates:
            raise APIError(
                "the server must be started with --api-key, or with --enable-weight-updates",
                status=403,
                code="not_enabled",
            )
        body = await read_json_body(request, UpdateBody)
        if not (body.path and 0 < len(body.version) <= MAX_VERSION_CHARS and body.version.isprintable()):
            raise APIError(
                f"path and version must be given; a version has at most {MAX_VERSION_CHARS} printable characters"
            )
        await self._control(contract.UpdateWeights(body.path, body.version), 409)
        return json_response({"version": body.version})

    async def sleep(self, request: Request) -> Response:
        """POST /sleep: give the device's memory back. 409 while requests run."""
        body = await read_json_body(request, SleepBody, empty=SleepBody())
        level = request.query_params.get("level", str(body.level))
        if not (level.isascii() and level.isdigit() and len(level) <= len(str(MAX_LEVEL))):
            raise APIError(f"level is {level[:40]!r}; it is a number", param="level")
        await self._control(contract.Sleep(int(level)), 409)
        return json_response({"is_sleeping": True})

    async def wake_up(self, request: Request) -> Response:
        """POST /wake_up: take all memory again; ?tags, which asks for a part of it, is refused."""
        if "tags" in request.query_params:
            raise APIError("all memory is taken at once; leave tags out", param="tags")
        await read_json_body(request, WakeBody, empty=WakeBody())
        await self._control(contract.WakeUp(), 409)
        return json_response({"is_sleeping": False})

    async def is_sleeping(self, request: Request) -> Response:
        return json_response({"is_sleeping": self._service.client.stats().asleep})

    async def load(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter: answers when requests may name the adapter."""
        body = await read_json_body(request, LoadBody)
        name, names = body.lora_name, self._service.names()
        good = 0 < len(name) <= MAX_NAME_CHARS and name.isprintable() and not name.isspace()
        if not good or not body.lora_path:
            raise APIError(
                f"lora_name must have 1 to {MAX_NAME_CHARS} characters, all printable and not only spaces; "
                "and lora_path must be given"
            )
        if name in names:
            raise APIError(
                f"{name!r} is a name of the model itself; give another lora_name", param="lora_name"
            )
        await self._control(
            contract.LoadAdapter(name, body.lora_path, body.load_inplace), 400, "invalid_adapter"
        )
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter: requests that run go on to their end."""
        name = (await read_json_body(request, UnloadBody)).lora_name
        if name not in self._service.adapters() and self._service.client.info.max_adapters:
            raise APIError(f"the adapter {name!r} is not loaded", status=404, param="lora_name")
        await self._control(contract.UnloadAdapter(name), 400, "invalid_adapter")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _control(self, command: contract.Command, status: int, code: str | None = None) -> str | None:
        try:
            return await self._service.client.control(command)
        except Unsupported as error:
            raise APIError(str(error), status=status, code=code) from None
        except EngineDeadError as error:
            raise APIError(str(error), status=503) from None
