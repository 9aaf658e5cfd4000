"""WeightsDesk: a model's weights while its engine stands still. They are updated in place, or leave the device."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from openinfer.graph.errors import NotPossible
from openinfer.tensor import (
    Arena,
    Checkpoint,
    CheckpointError,
    LoadReport,
    OutOfMemory,
    ProgressBar,
    SharedCheckpoint,
    Stream,
    Tensor,
)

Progress = Callable[[int, int], None]


class AllRanks:
    """The ranks of an engine: a command has two halves, `prepare` and `commit`. This class is of a single rank."""

    def agree(self, problem: str, command: str, *args: str | int) -> str:
        """This rank has prepared a command, or cannot (`problem`). Returns a problem of any rank, the same on all; ""
        where all have prepared it. The first rank has the others prepare first."""
        return problem

    def commit(self) -> None:
        """The first rank has the others commit."""

    def done(self) -> None:
        """Wait until all ranks have committed."""


class _Prepared(NamedTuple):
    """A command that can be carried out without fail, or taken back."""

    commit: Callable[[], None]
    undo: Callable[[], None]


class WeightsDesk:
    """Changes an engine's memory while no request runs; the caller sees to that.

    check: raises CheckpointError for a checkpoint of another model. load: fills the weights, on a stream.
    cache: the tensors whose content need not survive a sleep.
    weights: the tensors that the first load filled, which a sleep of level 2 drops.
    progress: makes the bar of an update. digests: `digest` is that of the last update's weights; b"" before.

    `update`, `sleep` and `wake` raise NotPossible with nothing changed on any rank: each first checks everything and
    takes all that it needs, then calls `reset`, which forgets what will be untrue, and then changes the memory.
    """

    def __init__(
        self,
        check: Callable[[Checkpoint], None],
        load: Callable[[Checkpoint, Stream, Progress], LoadReport],
        arena: Arena,
        stream: Stream,
        cache: Sequence[Tensor],
        weights: Sequence[Tensor] = (),
        *,
        ranks: AllRanks | None = None,
        progress: Callable[[], Progress] = lambda: ProgressBar("updating weights"),
        digests: bool = False,
    ) -> None:
        self._check_model, self._load, self._arena, self._stream = check, load, arena, stream
        self._cache, self.weights, self._ranks, self._progress = cache, weights, ranks or AllRanks(), progress
        self._digests = digests
        self._saved: list[tuple[int, np.ndarray[Any, Any]]] | None = None
        self._prepared: _Prepared | None = None
        self.version, self.digest = "", b""
        self.dropped = False
        """Whether the weights were dropped, and none have come yet."""

    @property
    def asleep(self) -> bool:
        """Whether the memory was given back."""
        return self._saved is not None

    @property
    def refusal(self) -> str:
        """Why no request can run now; "" if one can."""
        if self.asleep:
            return "the engine sleeps; POST /wake_up first"
        if not self.dropped:
            return ""
        return "the weights were dropped by a sleep of level 2; POST /update_weights first"

    def update(self, path: Path | str, version: str, reset: Callable[[], None] = lambda: None) -> None:
        """Take all weights from another checkpoint of the same model; `version` names them from now on. path: its
        folder, or the socket of a process that shares them (tensor.SharedWeights). Raises NotPossible; any other error
        leaves weights of two checkpoints."""
        self._carry_out(reset, "update", str(path), version)

    def sleep(self, level: int = 1, reset: Callable[[], None] = lambda: None) -> None:
        """Copy what is kept to the host, and give the memory back. level: 1 keeps all but the cache, 2 drops the
        weights too. Raises NotPossible."""
        self._carry_out(reset, "sleep", level)

    def wake(self) -> None:
        """Take the memory again, with what was kept; the rest is zero. Raises NotPossible, where others have the memory
        too: it can be tried again."""
        self._carry_out(lambda: None, "wake")

    def _carry_out(self, reset: Callable[[], None], command: str, *args: str | int) -> None:
        self.prepare(command, *args)
        reset()
        self.commit()

    def prepare(self, command: str, *args: Any) -> None:
        """The first half of a command by its name. Raises NotPossible on all ranks where one of them cannot."""
        halves: dict[str, Callable[..., _Prepared]] = {
            "update": self._update, "sleep": self._sleep, "wake": self._wake
        }  # fmt: skip
        prepared, problem = None, ""
        try:
            prepared = halves[command](*args)
        except NotPossible as error:
            problem = str(error)
        if problem := self._ranks.agree(problem, command, *args):
            if prepared is not None:
                prepared.undo()
            raise NotPossible(problem)
        self._prepared = prepared

    def commit(self) -> None:
        """The second half of the command that was prepared, on all ranks."""
        self._ranks.commit()
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            raise TypeError("no command was prepared")
        prepared.commit()
        self._ranks.done()

    def _update(self, path: str, version: str) -> _Prepared:
        self._check(asleep=False)
        if not version:
            raise NotPossible("the new weights need a version, which answers name")
        with ExitStack() as stack:
            try:
                shared = Path(path).is_socket()
                opened = SharedCheckpoint(Path(path), self._arena.device) if shared else Checkpoint(path)
                checkpoint = stack.enter_context(opened)
                self._check_model(checkpoint)
            except (CheckpointError, OSError, ValueError) as error:
                raise NotPossible(f"{path} has no weights for this model: {error}") from error
            kept = stack.pop_all()

        def commit() -> None:
            with kept, Stream(self._arena.device) as stream, ThreadPoolExecutor(1) as other:
                digest = other.submit(checkpoint.digest) if self._digests else None
                self._stream.synchronize()
                self._load(checkpoint, stream, self._progress())
                self.digest = digest.result() if digest is not None else b""
            self.version, self.dropped = version, False

        return _Prepared(commit, kept.close)

    def _sleep(self, level: int) -> _Prepared:
        self._check(asleep=False)
        if level not in (1, 2):
            raise NotPossible(
                f"level {level}: 1 and 2 are possible; 1 keeps the weights in host memory, 2 drops them"
            )
        if not self._arena.mapped:
            raise NotPossible("the memory cannot be given back; start the server with --enable-sleep-mode")
        gone = [*self._cache, *(self.weights if level == 2 else ())]
        try:
            saved = [(start, np.empty(end - start, np.uint8)) for start, end in self._without(gone)]
        except MemoryError as error:
            raise NotPossible(f"the host has no memory for what is kept: {error}") from error

        def commit() -> None:
            self._stream.synchronize()
            for start, buffer in saved:
                self._stream.copy_async(buffer.ctypes.data, start, len(buffer), "d2h")
            self._stream.synchronize()
            self._arena.give_back()
            self._saved, self.dropped = saved, self.dropped or level == 2

        return _Prepared(commit, saved.clear)

    def _wake(self) -> _Prepared:
        self._check(asleep=True)
        try:
            self._arena.take_back()
        except OutOfMemory as error:
            raise NotPossible(f"the engine sleeps on, try again later: {error}") from error

        def commit() -> None:
            self._stream.memset_async(self._arena.base, 0, self._arena.used)
            for start, buffer in self._saved or ():
                self._stream.copy_async(start, buffer.ctypes.data, len(buffer), "h2d")
            self._stream.synchronize()
            self._saved = None

        return _Prepared(commit, self._arena.give_back)

    def _check(self, *, asleep: bool) -> None:
        if self.asleep != asleep:
            raise NotPossible(
                "the engine sleeps; wake it up first" if self.asleep else "the engine does not sleep"
            )

    def _without(self, gone: Sequence[Tensor]) -> list[tuple[int, int]]:
        """The used addresses of the arena outside these tensors, as ranges."""
        kept, at = [], self._arena.base
        for tensor in sorted(gone, key=lambda one: one.ptr):
            kept.append((at, tensor.ptr))
            at = max(at, tensor.ptr + tensor.nbytes)
        kept.append((at, self._arena.base + self._arena.used))
        return [(start, end) for start, end in kept if end > start]
