"""The messages between the asyncio side and the engine loop: objects in a thread, msgpack between processes.

One engine may have several clients (the frontends of a server), known by number. A client's request ids begin at
`first_id(client)`, so that an id alone says whose it is; 0 is the client that started the engine.
"""

import msgspec

from openinfer.frontend.contract import Command, EngineInfo, EngineSpec, EngineStats, Request, StepOutputs

_CLIENT_BITS = 40


def first_id(client: int) -> int:
    """The first request id of a client."""
    return (client << _CLIENT_BITS) + 1


def owner(request_id: int) -> int:
    """The client whose request it is."""
    return request_id >> _CLIENT_BITS


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """A client's first message, answered with Ready once the engine is up."""


class Gone(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    """Another client has died: its requests are aborted, and nothing more is taken from it."""

    client: int


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """Engine.submit(request)."""

    request: Request


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """Engine.abort(id)."""

    id: int


class ControlFrame(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Engine.control(command), answered by the ControlDone with the same serial."""

    serial: int
    command: Command


class Close(msgspec.Struct, frozen=True, array_like=True, tag="q"):
    """Leave the loop and close the engine."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """The engine is built and takes requests."""

    info: EngineInfo
    stats: EngineStats


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """The engine could not be built; one line for the user."""

    message: str


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """A step ended. Sent to the clients that it says something to; to all now and then as a sign of life, and when
    the engine begins and ends to be busy."""

    outputs: StepOutputs
    """The client's own part."""
    stats: EngineStats
    live: int
    """Requests of all clients that have not ended."""


class ControlDone(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """A command was carried out, or refused with this error. answer: of a command that asks."""

    serial: int
    error: str | None
    answer: str | None = None


class Lost(msgspec.Struct, frozen=True, array_like=True, tag="x"):
    """Engine.step raised: the engine is gone."""

    message: str


ToEngine = Hello | Submit | Abort | ControlFrame | Gone | Close
FromEngine = Ready | StartFailed | Stepped | ControlDone | Lost


class Boot(msgspec.Struct, frozen=True):
    """The first line on an engine process's standard input, as JSON."""

    directory: str
    """Private to the server's processes; the engine's socket lies in it."""
    spec: EngineSpec
    log_level: str
    log_format: str

    @staticmethod
    def address_in(directory: str) -> str:
        """The ZeroMQ endpoint of the engine whose directory it is."""
        return f"ipc://{directory}/engine"
