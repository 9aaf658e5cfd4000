"""The page at `/`: a small chat and the engine's state. One static file, which asks nobody but this server."""

import base64
import hashlib
import importlib.resources
import time

from starlette.requests import Request
from starlette.responses import Response

from openinfer.frontend.http.service import Service, json_response

__all__ = ["Page"]


class Page:
    """The page, and the numbers that it shows."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._html = importlib.resources.files(__package__).joinpath("page.html").read_bytes()
        script = self._html.split(b"<script>")[1].split(b"</script>")[0]
        digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
        policy = (
            f"default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
        )
        self._headers = {
            "content-security-policy": f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }

    async def page(self, request: Request) -> Response:
        """GET /."""
        return Response(self._html, 200, self._headers, "text/html; charset=utf-8")

    async def state(self, request: Request) -> Response:
        """GET /state: gauges, and counters to take rates of."""
        client = self._service.client
        stats, info, health = client.stats(), client.info, client.health()
        return json_response(
            {
                "model": info.model,
                "healthy": health.ok,
                "detail": health.detail,
                "time": time.monotonic(),
                "running": stats.running,
                "waiting": stats.waiting,
                "kv_used_tokens": stats.kv_used_tokens,
                "kv_capacity_tokens": info.kv_capacity_tokens,
                "prompt_tokens": stats.prompt_tokens,
                "generation_tokens": stats.generation_tokens,
                "steps": stats.steps,
            }
        )
