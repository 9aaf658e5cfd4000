"""The pages of other origins that may call this server."""

import msgspec
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

__all__ = ["Cors"]


class Cors(msgspec.Struct, frozen=True):
    """The CORS rules for browsers. "*" stands for any; without an origin, pages of other origins may not call."""

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False
    """Cookies and Authorization of the browser's own may come along."""

    def middleware(self) -> list[Middleware]:
        """To stand around all others: a preflight has no API key."""
        if not self.origins:
            return []
        return [
            Middleware(
                CORSMiddleware,
                allow_origins=self.origins,
                allow_methods=self.methods,
                allow_headers=self.headers,
                allow_credentials=self.credentials,
                expose_headers=["x-request-id", "warning", "retry-after"],
            )
        ]
