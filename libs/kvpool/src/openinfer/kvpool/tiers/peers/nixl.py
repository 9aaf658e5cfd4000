"""Records over NIXL (https://github.com/ai-dynamo/nixl): the receiver reads the sender's host memory through UCX.

The wheel declares PyTorch as a requirement and does not need it, so it is installed alone:

    pip install --no-deps nixl-cu13
"""

import importlib
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ...errors import InvalidConfig
from .link import BRIEF, MAX_WORDS, Link
from .transport import Run, StillWriting, TransferRecord, Transport, runs, transfer_s

_MODULES = ("nixl_cu13._api", "nixl_cu12._api")
_TICK_S = 0.0005


class Nixl(Transport):
    """A NIXL agent with these backends. Raises InvalidConfig where NIXL is missing or has no such backend.

    The agent has no progress thread, which would keep a core busy: a sender makes progress while it waits.
    """

    name, local = "nixl", False

    def __init__(self, backends: Sequence[str], timeout_s: float) -> None:
        api = _api()
        bound = vars(api.nixlBind)  # its exceptions have no common base but Exception
        self._errors = (*(bound[name] for name in bound if name.endswith("Error")), RuntimeError, OSError)
        self._timeout_s = timeout_s
        sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = api.nixl_agent_config(enable_prog_thread=False, backends=list(backends), sync_mode=sync)
        self._agent = api.nixl_agent(f"openinfer-{os.urandom(8).hex()}", config)
        if not set(backends) <= set(self._agent.backends):
            raise InvalidConfig(
                f"NIXL has no backend {', '.join(backends)}; it has {', '.join(self._agent.get_plugin_list())}"
            )
        self._regions: list[Any] = []
        self._known: dict[str, int] = {}  # agents, and how many regions of each have been told
        self._lock = threading.Lock()  # of the agents known

    def card(self) -> dict[str, Any]:
        return {"agent": self._agent.name}

    def meet(self, card: dict[str, Any]) -> str:
        return str(card["agent"])

    def register(self, ptr: int, nbytes: int) -> None:
        try:
            self._regions.append(self._agent.register_memory([(ptr, nbytes, 0, "")], "DRAM"))
        except self._errors as error:
            raise OSError(f"NIXL cannot register it: {type(error).__name__}: {error}") from None

    def send(self, link: Link, records: Sequence[TransferRecord]) -> None:
        try:
            self._send(link, records)
        except OSError:
            raise
        except self._errors as error:
            raise ConnectionError(f"NIXL: {type(error).__name__}: {error}") from None

    def _send(self, link: Link, records: Sequence[TransferRecord]) -> None:
        link.say(regions=len(self._regions), at=[record.ptr for record in records])
        until = time.monotonic() + self._timeout_s + transfer_s(records)
        while True:
            while not link.heard(_TICK_S):
                self._agent.get_new_notifs()  # makes progress
                if time.monotonic() > until:
                    raise TimeoutError("the receiver takes too long")
            if not link.hear().get("metadata"):
                link.say(kept=True)
                return
            link.say(metadata=self._agent.get_agent_metadata().hex())

    def receive(self, link: Link, far: str, rooms: Sequence[TransferRecord]) -> None:
        offer = link.hear(BRIEF + 24 * len(rooms))
        try:
            with self._lock:
                if self._known.get(far) != offer["regions"]:
                    link.say(metadata=True)
                    self._learn(far, bytes.fromhex(link.hear(MAX_WORDS)["metadata"]), offer["regions"])
            self._read(far, runs(rooms, offer["at"]), self._timeout_s + transfer_s(rooms))
        except StillWriting:
            raise
        except (*self._errors, KeyError, ValueError, TypeError) as error:
            with self._lock:
                self._part(far)
            raise ConnectionError(f"NIXL: {type(error).__name__}: {error}") from None
        link.say(metadata=False)
        link.hear()  # the sender has kept the records until now, so their bytes are those of their names

    def _learn(self, name: str, metadata: bytes, regions: int) -> None:
        self._part(name)
        found = self._agent.add_remote_agent(metadata)
        if (found.decode() if isinstance(found, bytes) else found) != name:
            raise ValueError(f"the metadata is of agent {found!r}, not of {name}")
        self._known[name] = regions

    def _part(self, name: str) -> None:
        if self._known.pop(name, None) is not None:
            with suppress(*self._errors):  # it is gone already
                self._agent.remove_remote_agent(name)

    def _read(self, name: str, wanted: Sequence[Run], timeout_s: float) -> None:
        agent, until = self._agent, time.monotonic() + timeout_s
        local = agent.get_xfer_descs([(run.ptr, run.nbytes, 0) for run in wanted], "DRAM")
        remote = agent.get_xfer_descs([(run.at, run.nbytes, 0) for run in wanted], "DRAM")
        handle = agent.initialize_xfer("READ", local, remote, name)
        try:
            state = agent.transfer(handle)
            while state == "PROC" and time.monotonic() < until:
                time.sleep(_TICK_S)
                state = agent.check_xfer_state(handle)
        finally:
            try:
                agent.release_xfer_handle(handle)
            except self._errors as error:
                raise StillWriting(f"NIXL cannot stop a transfer: {error}") from None
        if state != "DONE":
            raise TimeoutError(f"a transfer is in state {state} after {timeout_s:g} s")

    def close(self) -> None:
        for name in list(self._known):
            self._part(name)
        for region in self._regions:
            self._agent.deregister_memory(region)
        self._regions.clear()


def _api() -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # read at the import; it prints each agent otherwise
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.partition(".")[0]:
                raise InvalidConfig(f"NIXL cannot be imported: {error}") from None
    raise InvalidConfig(
        "nixl_cu13 is missing; NixlConnector needs it: pip install --no-deps nixl-cu13 "
        "(its requirement PyTorch is not used), or take kv_connector TcpConnector"
    )
