"""The exceptions of this library.

FrontendError(Exception)
├── EngineSpecError(ValueError)       an EngineSpec that names nothing callable
├── InvalidRequest(ValueError)        a Request with a number that cannot be sent
├── ModelFilesError(ValueError)       tokenizer, template or config files that are missing or wrong
├── EngineDeadError(RuntimeError)     the engine is lost; nothing more will come from it
├── EngineStartError(RuntimeError)    the engine did not come up; the message is one line for the user
├── MissingExtraError(ImportError)    an optional dependency is not installed; names the command
├── Unsupported(NotImplementedError)  the engine does not know this command
├── FlagError(ValueError)             flags that cannot work together
└── APIError(ValueError)              one request is refused; carries the HTTP status and error fields
    ├── NotSupported                  it asks for what this server, engine or model has not
    └── TooLong                       its prompt and output do not fit into the model's context
"""

from collections.abc import Callable

MAX_MESSAGE_CHARS = 1000


class FrontendError(Exception):
    """Base of all errors raised by openinfer.frontend."""


class EngineSpecError(FrontendError, ValueError):
    """An EngineSpec whose target cannot be called."""

    user_can_mend = True


class InvalidRequest(FrontendError, ValueError):
    """A Request with a number that cannot be sent to an engine."""


class ModelFilesError(FrontendError, ValueError):
    """Tokenizer, template or configuration files are missing or malformed; the message names the file."""

    user_can_mend = True


class EngineDeadError(FrontendError, RuntimeError):
    """The engine process or thread is lost; it will send no more outputs."""


class EngineStartError(FrontendError, RuntimeError):
    """The engine, or a process that serves it, did not come up. The message is one line meant for the user."""

    user_can_mend = True


class MissingExtraError(FrontendError, ImportError):
    """An optional dependency is not installed; the message holds the command that installs it."""

    user_can_mend = True

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional part: pip install 'openinfer-frontend[{extra}]'")


class Unsupported(FrontendError, NotImplementedError):
    """The engine does not know a command."""


class FlagError(FrontendError, ValueError):
    """Flags of the command line that cannot work together, or with this machine."""

    user_can_mend = True


class APIError(FrontendError, ValueError):
    """A request is refused. message: its middle is left out beyond MAX_MESSAGE_CHARS, as it quotes what the client
    sent. status: HTTP status; param: the offending field, if one; code: OpenAI's machine-readable word, if one."""

    user_can_mend = True

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(_shortened(message))
        self.status = status
        self.param = param
        self.code = code


class NotSupported(APIError):
    """The request asks by `param` for what this server, its engine or its model has not."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message, param=param, code="unsupported")


class TooLong(APIError):
    """The prompt leaves too little of the model's context for its output. Agents read the words and the code, and
    compact their history; other APIs have words of their own for it.

    prompt: its tokens; with `more`, a bound below them. output: the tokens asked for in `field`; None where the prompt
    alone is too long. context: the model's tokens. what: the field of the prompt.
    """

    def __init__(
        self, prompt: int, output: int | None, context: int, what: str, field: str = "", *, more: bool = False
    ) -> None:
        self.prompt, self.output, self.context = prompt, output, context
        asked = f"{what} has {prompt} tokens{more * ' or more'}, and the output needs 1 at least"
        if output:
            asked = f"you requested {prompt + output} tokens ({prompt} in {what}, {output} in {field})"
        super().__init__(
            f"This model's maximum context length is {context} tokens. However, {asked}: shorten {what}"
            f"{f' or lower {field}' if output else ''}",
            param=field if output and prompt < context else what.partition("[")[0],
            code="context_length_exceeded",
        )


def is_users_error(error: BaseException) -> bool:
    """Whether an error speaks to the user (bad checkpoint, missing file). Any other is a bug and keeps its traceback.
    A library says so by a class attribute `user_can_mend = True` of its own errors; OSErrors name files and devices."""
    return (getattr(error, "user_can_mend", False) is True or isinstance(error, OSError)) and bool(str(error))


def one_line(error: BaseException | str) -> str:
    """A message, or an exception, as one line for a user, without its middle beyond MAX_MESSAGE_CHARS."""
    return printable(_shortened(" ".join(str(error).split())) or type(error).__name__)


def printable(text: str, keep: Callable[[str], bool] = str.isprintable) -> str:
    """The text with characters that a terminal would obey written out. keep: whether a character stays."""
    return "".join(c if keep(c) else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def _shortened(text: str) -> str:
    half = MAX_MESSAGE_CHARS // 2
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:half]} ... {text[-half:]}"
