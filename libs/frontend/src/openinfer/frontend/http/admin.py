"""Endpoints for the people who run the server: what was slow."""

from starlette.requests import Request
from starlette.responses import Response

from openinfer.frontend.contract import Command, SlowTraces
from openinfer.frontend.errors import APIError, Unsupported
from openinfer.frontend.http.service import Service

__all__ = ["Admin"]

NOTHING = '{"found": 0, "traces": []}'


class Admin:
    """Commands to the engine. They want the API key where there is one."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def traces(self, request: Request) -> Response:
        """GET /debug/traces: steps, runs of steps and first tokens that took longer than they should."""
        found = await self._control(SlowTraces())
        return Response(found or NOTHING, media_type="application/json")

    async def _control(self, command: Command) -> str | None:
        """Carry out a command. Raises APIError (501) where the engine cannot."""
        try:
            return await self._service.client.control(command)
        except Unsupported as error:
            raise APIError(str(error), status=501) from None
