"""The page at `/` (a small chat and the engine's state) and the one at `/plan`. They ask only this server."""

import base64
import hashlib
import importlib.resources
import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from openinfer.frontend.errors import APIError
from openinfer.frontend.http.service import Service, json_response

__all__ = ["WebPages"]


class WebPages:
    """The pages, and what they show. plan: the JSON of `openinfer plan --json FILE`; None: the page asks for one."""

    def __init__(self, service: Service, plan: bytes | None) -> None:
        self._service, self._plan = service, plan
        self._chat = _whole("page.html", "page.css", ("markdown.js", "page.js"))
        self._curves = _whole("plan.html", "page.css", ("plan.js",))
        self._icon = _static("favicon.svg")

    async def chat(self, request: Request) -> Response:
        return Response(*self._chat, "text/html; charset=utf-8")

    async def icon(self, request: Request) -> Response:
        return Response(self._icon, 200, {"cache-control": "max-age=86400"}, "image/svg+xml")

    async def state(self, request: Request) -> Response:
        """GET /state: gauges, and counters to take rates of."""
        client = self._service.client
        stats, info, health = client.stats(), client.info, client.health()
        usual = self._service.defaults.params()
        return json_response(
            {
                "model": info.model,
                "description": self._service.defaults.description,
                "healthy": health.ok,
                "detail": health.detail,
                "sampling": {name: getattr(usual, name) for name in ("temperature", "top_p", "top_k")},
                "time": time.monotonic(),
                "running": stats.running,
                "waiting": stats.waiting,
                "kv_used_tokens": stats.kv_used_tokens,
                "kv_capacity_tokens": info.kv_capacity_tokens,
                "prompt_tokens": stats.prompt_tokens,
                "generation_tokens": stats.generation_tokens,
                "steps": stats.steps,
                "drafts": stats.drafts,
                "draft_tokens": stats.draft_tokens,
                "accepted_by_position": stats.accepted_by_position,
            }
        )

    async def curves(self, request: Request) -> Response:
        return Response(*self._curves, "text/html; charset=utf-8")

    async def plan(self, request: Request) -> Response:
        if self._plan is None:
            raise APIError("this server has no plan; start it with --plan FILE", status=404, code="no_plan")
        return Response(self._plan, media_type="application/json")


def _whole(html: str, style: str, scripts: Sequence[str]) -> tuple[bytes, int, dict[str, str]]:
    """A page with style and scripts inside, its status and headers: it may run these, and ask this server, alone."""
    css, script = _static(style), b"".join(map(_static, scripts))
    page = _static(html).replace(b"<style>", b"<style>" + css).replace(b"<script>", b"<script>" + script)
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src 'self'; style-src {_hash(css)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    security = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return page, 200, security


def _static(name: str) -> bytes:
    return importlib.resources.files(__package__).joinpath("static", name).read_bytes()


def _hash(text: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
