"""An OpenAI-compatible HTTP server over any EngineClient. Needs `openinfer-frontend[http]`."""

import importlib
import typing

try:
    from openinfer.frontend.chat.parts import template_spec
    from openinfer.frontend.http.app import create_app
    from openinfer.frontend.http.params import SamplingDefaults
    from openinfer.frontend.http.server import run_server
    from openinfer.frontend.http.tokenizer import Tokenizer
    from openinfer.frontend.model_files import find_templates
except ModuleNotFoundError as error:
    if (error.name or "").startswith("openinfer"):
        raise
    from openinfer.frontend.errors import MissingExtraError

    raise MissingExtraError(f"the HTTP server ({error.name} is missing)", "http") from error

if typing.TYPE_CHECKING:
    from openinfer.frontend.chat_template import ChatTemplate

__all__ = [
    "ChatTemplate", "SamplingDefaults", "Tokenizer", "create_app", "find_templates", "run_server",
    "template_spec",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name != "ChatTemplate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Jinja comes with it and takes 60 ms, and the templates of a server are in processes of their own.
    found = globals()[name] = importlib.import_module("openinfer.frontend.chat_template").ChatTemplate
    return found
