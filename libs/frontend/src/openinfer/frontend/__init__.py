"""The engine contract, its drivers, and an OpenAI-compatible HTTP server for any engine.

Importing this needs neither a web framework nor ZeroMQ: those are behind `openinfer.frontend.http` ([http]) and
`openinfer.frontend.process_driver` ([process]). The names below are imported when they are first asked for, because
`--help` needs none of them, and numpy and asyncio come with them.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from openinfer.frontend.client import EngineClient, Health, OutputDelta
    from openinfer.frontend.contract import (
        Engine,
        EngineInfo,
        EngineSpec,
        EngineStats,
        Failed,
        Finished,
        Rejected,
        Request,
        ResetPrefixCache,
        Scheduled,
        StepOutputs,
        TokenLogprobs,
    )
    from openinfer.frontend.errors import (
        APIError,
        EngineDeadError,
        EngineSpecError,
        EngineStartError,
        FlagError,
        FrontendError,
        InvalidRequest,
        MissingExtraError,
        ModelFilesError,
        Unsupported,
        is_users_error,
        one_line,
    )
    from openinfer.frontend.server_flags import Recipe
    from openinfer.frontend.thread_driver import ThreadDriver

__all__ = [
    "APIError", "Engine", "EngineClient", "EngineDeadError", "EngineInfo", "EngineSpec", "EngineSpecError",
    "EngineStartError", "EngineStats", "Failed", "Finished", "FlagError", "FrontendError", "Health",
    "InvalidRequest", "MissingExtraError", "ModelFilesError", "OutputDelta", "Recipe", "Rejected", "Request",
    "ResetPrefixCache", "Scheduled", "StepOutputs", "ThreadDriver", "TokenLogprobs", "Unsupported",
    "is_users_error", "one_line",
]  # fmt: skip

_MODULES = ("errors", "server_flags", "contract", "client", "thread_driver")  # the cheap ones first


def __getattr__(name: str) -> object:
    if name in __all__:
        for module in _MODULES:
            found = getattr(importlib.import_module(f"openinfer.frontend.{module}"), name, None)
            if found is not None:
                globals()[name] = found
                return found
    raise AttributeError(f"module 'openinfer.frontend' has no attribute {name!r}")
