"""EngineSpec: an engine as a function's name and arguments, so that any process can build it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from openinfer.frontend.errors import EngineSpecError

if TYPE_CHECKING:
    from openinfer.frontend.contract import Engine

__all__ = ["EngineSpec"]


class EngineSpec(msgspec.Struct, frozen=True):
    """How to build an engine in any process: call `target` ("package.module:function") with JSON `kwargs`."""

    target: str
    kwargs: dict[str, Any] = {}

    def build(self) -> Engine:
        """Import the module and call the function. Raises EngineSpecError, or what the function raises."""
        module_name, _, function_name = self.target.partition(":")
        if not module_name or not function_name:
            raise EngineSpecError(f"engine target {self.target!r} is not 'package.module:function'")
        function: Callable[..., Engine] | None = getattr(
            importlib.import_module(module_name), function_name, None
        )
        if function is None:
            raise EngineSpecError(f"engine target {self.target!r}: {module_name} has no {function_name!r}")
        return function(**self.kwargs)
