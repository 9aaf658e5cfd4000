"""An OpenAI-compatible HTTP server over any EngineClient. Needs `openinfer-frontend[http]`."""

try:
    from openinfer.frontend.chat_template import ChatTemplate, find_templates, template_spec
    from openinfer.frontend.http.app import create_app
    from openinfer.frontend.http.params import SamplingDefaults
    from openinfer.frontend.http.server import run_server
    from openinfer.frontend.http.tokenizer import Tokenizer
except ModuleNotFoundError as error:
    if (error.name or "").startswith("openinfer"):
        raise
    from openinfer.frontend.errors import MissingExtraError

    raise MissingExtraError(f"the HTTP server ({error.name} is missing)", "http") from error

__all__ = [
    "ChatTemplate", "SamplingDefaults", "Tokenizer", "create_app", "find_templates", "run_server",
    "template_spec",
]  # fmt: skip
