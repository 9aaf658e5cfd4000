"""What passes between the asyncio side and the engine loop: objects in a thread, msgpack between processes."""

import msgspec

from openinfer.frontend.contract import Command, EngineInfo, EngineSpec, EngineStats, Request, StepOutputs

__all__ = [
    "Abort",
    "Boot",
    "Close",
    "Control",
    "ControlDone",
    "FromEngine",
    "Lost",
    "Ready",
    "StartFailed",
    "Stepped",
    "Submit",
    "ToEngine",
]


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """Engine.submit(request)."""

    request: Request


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """Engine.abort(id)."""

    id: int


class Control(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Engine.control(command), answered by the ControlDone with the same serial."""

    serial: int
    command: Command


class Close(msgspec.Struct, frozen=True, array_like=True, tag="q"):
    """Leave the loop and close the engine."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """The engine is built and takes requests."""

    info: EngineInfo


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """The engine could not be built; one line for the user."""

    message: str


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """A step ended. Sent for each step that says something, and now and then as a sign of life."""

    outputs: StepOutputs
    stats: EngineStats


class ControlDone(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """A command was carried out, or refused with this error."""

    serial: int
    error: str | None


class Lost(msgspec.Struct, frozen=True, array_like=True, tag="x"):
    """Engine.step raised: the engine is gone."""

    message: str


ToEngine = Submit | Abort | Control | Close
FromEngine = Ready | StartFailed | Stepped | ControlDone | Lost


class Boot(msgspec.Struct, frozen=True):
    """The first line on an engine process's standard input, as JSON."""

    directory: str
    """Private to this pair of processes; `address` lies in it."""
    spec: EngineSpec
    log_level: str

    @property
    def address(self) -> str:
        """The ZeroMQ endpoint."""
        return f"ipc://{self.directory}/engine"
