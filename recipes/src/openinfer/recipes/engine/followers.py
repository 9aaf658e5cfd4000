"""The other ranks of an engine, as rank 0 has them: processes that it starts, watches and ends."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.frontend.logs import log_settings
from openinfer.graph.runner import AllRanks, Leader, LoneLeader, Ring, Writer
from openinfer.kernels import RankLost
from openinfer.kvpool.tiers import Others, SharedRecords
from openinfer.recipes.engine.options import O
from openinfer.recipes.engine.ranks import Ranks
from openinfer.recipes.engine.recipe import Recipe

Array = np.ndarray[Any, Any]

CLOSE_TIMEOUT_S = 5.0
OWN = (
    "scheduling_policy", "eviction_policy", "kv_events_config", "trace", "lora_modules", "kv_offload_gb",
    "kv_offload_dir", "kv_offload_disk_gb", "kv_transfer_config", "kv_peer",
)  # fmt: skip
"""Options that rank 0 alone acts on."""


class NoFollowers(AllRanks):
    """The Followers of a rank that leads no others."""

    reason = ""
    """Why a rank is lost; empty while all are there."""
    leader: Leader | LoneLeader
    """The link over which the runner of rank 0 tells the followers its launches."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks, self.leader = ranks or Ranks(), LoneLeader()

    def begin(self) -> None:
        """All ranks are ready: from now on the followers take commands."""

    def put_adapter(self, place: int, values: Array) -> None:
        """The other ranks copy their parts of an adapter into a place."""

    def agree(self, problem: str, command: str, *args: str | int) -> str:
        return self.ranks.agree(problem)

    def done(self) -> None:
        self.ranks.serve()

    def others(self, pieces: list[int]) -> Others | None:
        """The ranks that have parts of the records of tiers. pieces: bytes of each piece of their memory."""
        return None

    def check(self) -> None:
        """Raise RankLost, with the reason, if a rank is lost."""

    def end(self) -> None:
        """End all other ranks. The device of rank 0 must be idle, or its steps lost."""

    def close(self) -> None:
        """End all other ranks and give the exchange up. The graphs of rank 0 must be gone: NCCL waits for them."""


class Followers(NoFollowers):
    """Ranks 1 and up of an engine. `ranks`: rank 0.

    They need no clean-up: their shared memory has no name, and the kernel kills them with the thread that made this
    object. A follower that ends, however it ends, makes every exchange and `check` raise RankLost.
    """

    leader: Leader

    def __init__(self, recipe: Recipe[O], model_dir: Path, options: O, devices: list[str]) -> None:
        size = len(devices)
        memory, ring = os.memfd_create("openinfer-ranks"), os.memfd_create("openinfer-steps")
        self._bells = [os.eventfd(0) for _ in devices[1:]]
        links = [socket.socketpair() for _ in devices[1:]]
        self.ranks = Ranks.joined(memory, 0, size, [ours for ours, _ in links])
        self._ring = Ring(ring, size - 1)
        self._serving = self._closing = False
        assert self.ranks.shared is not None
        shared = self.ranks.shared
        self.leader = Leader(Writer(self._ring, self._bells, lost=lambda: shared.aborted))
        names = [field.name for field in dataclasses.fields(options) if field.name not in OWN]
        flags = {name: getattr(options, name) for name in names}
        boot = {
            "recipe": recipe.known_as, "model_dir": str(model_dir), "size": size, "parent": os.getpid(),
            "log": log_settings(), "memory": memory, "ring": ring,
        }  # fmt: skip
        self._processes: list[subprocess.Popen[str]] = []
        self._watchers: list[threading.Thread] = []
        try:
            for rank, (device, bell, (_, link)) in enumerate(
                zip(devices[1:], self._bells, links, strict=True), 1
            ):
                own = {"rank": rank, "bell": bell, "link": link.fileno()}
                self._start(boot | own | {"options": flags | {"device": device}})
        except BaseException:
            self.close()
            raise
        finally:
            for _, link in links:
                link.close()
            os.close(memory)
            os.close(ring)

    def _start(self, boot: dict[str, Any]) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "openinfer.recipes.engine.follower_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={"GOTO_NUM_THREADS": "1", **os.environ},
            pass_fds=[boot[file] for file in ("memory", "ring", "bell", "link")],
            start_new_session=True,  # Ctrl-C is for the server, which drains first
        )  # fmt: skip
        self._processes.append(process)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # the watcher says how it ended
            process.stdin.write(json.dumps(boot) + "\n")
            process.stdin.flush()
        watcher = threading.Thread(target=self._watch, args=(boot["rank"], process), daemon=True)
        watcher.start()
        self._watchers.append(watcher)

    def begin(self) -> None:
        self._serving = True

    def put_adapter(self, place: int, values: Array) -> None:
        self.ranks.staged[place - 1] = values
        self._command("adapter", place)

    def agree(self, problem: str, command: str, *args: str | int) -> str:
        if problem:  # it is not known to the others
            return problem
        self._command("prepare", command, *args)
        return self.ranks.agree("")

    def commit(self) -> None:
        self._command("commit")

    def others(self, pieces: list[int]) -> Others:
        shared = SharedRecords.new(sum(pieces), self.ranks.size)
        for link in self.ranks.links:
            socket.send_fds(link, [b"r"], [shared.file])
        self._command("records", pieces)
        return Others(shared, lambda *copies: self._command("copy", *copies), lambda: bool(self.reason))

    def _command(self, name: str, *args: Any) -> None:
        if not self._serving:
            raise RankLost("the other ranks have ended, or do not serve yet")
        self.leader.command(name, *args)

    def check(self) -> None:
        if self.reason:
            raise RankLost(self.reason)

    def _watch(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            said = process.stdout.read().strip()  # until it ends
        code = process.wait()
        if self._closing:
            return
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        # The reason comes first: who sees the results of an abort must find the reason there.
        lost = f"rank {rank} of {self.ranks.size} {how}" + (f": {said}" if said else "")
        self.reason = self.reason or lost
        self.ranks.abort()

    def end(self) -> None:
        self._closing = True
        serving, self._serving = self._serving and not self.reason, False
        if serving:
            with suppress(RankLost):  # it hangs, and its ring is full
                self.leader.end()
        for process in self._processes:
            try:
                process.wait(CLOSE_TIMEOUT_S if serving else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it ended before it read its first line
                process.stdin.close()

    def close(self) -> None:
        self.end()
        for watcher in self._watchers:  # of a lost rank: in NCCL, until the graphs are gone
            watcher.join(CLOSE_TIMEOUT_S)
        self.ranks.close()
        for link in self.ranks.links:
            link.close()
        for bell in self._bells:
            os.close(bell)
        self._bells = []
