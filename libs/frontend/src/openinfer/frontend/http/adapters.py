"""Loading and unloading adapters (LoRA) over HTTP, with vLLM's bodies and answers."""

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from openinfer.frontend.contract import LoadAdapter, UnloadAdapter
from openinfer.frontend.errors import APIError, EngineDeadError, Unsupported
from openinfer.frontend.http.body import decode_body
from openinfer.frontend.http.service import Service, read_body

__all__ = ["AdapterEndpoints", "LoadBody", "UnloadBody"]

MAX_NAME_CHARS = 256


class LoadBody(msgspec.Struct):
    """POST /v1/load_lora_adapter. lora_path: a folder that the server can read."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadBody(msgspec.Struct):
    """POST /v1/unload_lora_adapter."""

    lora_name: str


class AdapterEndpoints:
    """The endpoints over a service's engine."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def load(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter: answers when requests may name the adapter."""
        body = decode_body(await read_body(request), LoadBody, {})
        name, names = body.lora_name, self._service.names()
        if (
            not 0 < len(name) <= MAX_NAME_CHARS
            or not name.isprintable()
            or name.isspace()
            or not body.lora_path
        ):
            raise APIError(
                f"lora_name must have 1 to {MAX_NAME_CHARS} characters, all printable and not only spaces; "
                "and lora_path must be given"
            )
        if name in names:
            raise APIError(
                f"{name!r} is a name of the model itself; give another lora_name", param="lora_name"
            )
        await self._control(LoadAdapter(name, body.lora_path, body.load_inplace))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter: requests that run go on to their end."""
        name = decode_body(await read_body(request), UnloadBody, {}).lora_name
        if name not in self._service.adapters() and self._service.client.info.max_adapters:
            raise APIError(f"the adapter {name!r} is not loaded", status=404, param="lora_name")
        await self._control(UnloadAdapter(name))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _control(self, command: LoadAdapter | UnloadAdapter) -> None:
        try:
            await self._service.client.control(command)
        except Unsupported as error:
            raise APIError(str(error), code="invalid_adapter") from error
        except EngineDeadError as error:
            raise APIError(str(error), status=503) from error
