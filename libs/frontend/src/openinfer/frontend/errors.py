"""The exceptions of this library.

FrontendError(Exception)
├── EngineSpecError(ValueError)       an EngineSpec that names nothing callable
├── InvalidRequest(ValueError)        a Request with a number that cannot be sent
├── ModelFilesError(ValueError)       tokenizer, template or config files that are missing or wrong
├── EngineDeadError(RuntimeError)     the engine is lost; nothing more will come from it
├── EngineStartError(RuntimeError)    the engine did not come up; the message is one line for the user
├── MissingExtraError(ImportError)    an optional dependency is not installed; names the command
├── Unsupported(NotImplementedError)  the engine does not know this command
└── APIError(ValueError)              one request is refused; carries the HTTP status and error fields
"""

__all__ = [
    "APIError",
    "EngineDeadError",
    "EngineSpecError",
    "EngineStartError",
    "FrontendError",
    "InvalidRequest",
    "MissingExtraError",
    "ModelFilesError",
    "Unsupported",
]


MAX_MESSAGE_CHARS = 1000


class FrontendError(Exception):
    """Base of all errors raised by openinfer.frontend."""


class EngineSpecError(FrontendError, ValueError):
    """An EngineSpec that names nothing callable."""


class InvalidRequest(FrontendError, ValueError):
    """A Request with a number that cannot be sent to an engine."""


class ModelFilesError(FrontendError, ValueError):
    """Tokenizer, template or configuration files are missing or malformed; the message names the file."""


class EngineDeadError(FrontendError, RuntimeError):
    """The engine process or thread is lost; nothing more will come from it."""


class EngineStartError(FrontendError, RuntimeError):
    """The engine did not come up. The message is one line meant for the user."""


class MissingExtraError(FrontendError, ImportError):
    """An optional dependency is not installed; the message holds the command that installs it."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional part: pip install 'openinfer-frontend[{extra}]'")


class Unsupported(FrontendError, NotImplementedError):
    """The engine does not know a command."""


class APIError(FrontendError, ValueError):
    """A request is refused.

    message: what came from the client is quoted in it, so that its middle is left out beyond MAX_MESSAGE_CHARS.
    status: HTTP status; param: the offending field, if one; code: OpenAI's machine-readable word, if one.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        half = MAX_MESSAGE_CHARS // 2
        super().__init__(
            message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:half]} ... {message[-half:]}"
        )
        self.status = status
        self.param = param
        self.code = code
