"""imported: a class or function of one's own, by MODULE:NAME."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from .errors import InvalidSetup


def imported(name: str, what: str) -> Callable[..., Any]:
    """The class or function MODULE:NAME. what: the word for it in messages. Raises InvalidSetup."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise InvalidSetup(f"the {what} {name!r} is not MODULE:NAME; give both, as in my_module:MyClass")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except (ImportError, ValueError) as error:
        raise InvalidSetup(f"the {what} {name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise InvalidSetup(f"the {what} {name!r}: module {module} has no function {function!r}")
    return found  # type: ignore[no-any-return]
