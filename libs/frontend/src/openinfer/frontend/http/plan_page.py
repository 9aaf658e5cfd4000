"""The page at `/plan`: the curves of a plan over load, and where this server is now. It asks only this server."""

from starlette.requests import Request
from starlette.responses import Response

from openinfer.frontend.errors import APIError
from openinfer.frontend.http.page import whole

__all__ = ["PlanPage"]


class PlanPage:
    """plan: the JSON of `openinfer plan --json FILE`; None: the page asks its reader for such a file."""

    def __init__(self, plan: bytes | None) -> None:
        self._plan = plan
        self._html, self._headers = whole("plan.html", "page.css", ("plan.js",))

    async def page(self, request: Request) -> Response:
        """GET /plan."""
        return Response(self._html, 200, self._headers, "text/html; charset=utf-8")

    async def plan(self, request: Request) -> Response:
        """GET /plan.json: the plan that the server was started with."""
        if self._plan is None:
            raise APIError("this server has no plan; start it with --plan FILE", status=404, code="no_plan")
        return Response(self._plan, media_type="application/json")
