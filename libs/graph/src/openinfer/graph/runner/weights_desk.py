"""WeightsDesk: a model's weights while its engine stands still. They are updated in place, or leave the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.graph.errors import NotPossible
from openinfer.tensor import (
    Arena,
    Checkpoint,
    CheckpointError,
    LoadReport,
    ProgressBar,
    SharedCheckpoint,
    Stream,
    Tensor,
)

Progress = Callable[[int, int], None]


class WeightsDesk:
    """Changes an engine's memory while no request runs; the caller sees to that.

    check: raises CheckpointError for a checkpoint of another model. load: fills the weights, on a stream.
    cache: the tensors whose content need not survive a sleep.
    weights: the tensors that the first load filled, which a sleep of level 2 drops.
    together: the first of several ranks tells the others to do the same, by the name of the method and its arguments;
    at the end it waits for them. progress: makes the bar of an update.
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
        together: Callable[..., AbstractContextManager[None]] = lambda *_: nullcontext(),
        progress: Callable[[], Progress] = lambda: ProgressBar("updating weights"),
    ) -> None:
        self._check_model, self._load, self._arena, self._stream = check, load, arena, stream
        self._cache, self.weights, self._all_ranks, self._progress = cache, weights, together, progress
        self._saved: list[tuple[int, np.ndarray[Any, Any]]] | None = None
        self.version = ""
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
        return (
            "the weights were dropped by a sleep of level 2; POST /update_weights first"
            if self.dropped
            else ""
        )

    def update(self, path: Path | str, version: str) -> None:
        """Take all weights from another checkpoint of the same model; `version` names them from now on. path: its
        folder, or the socket of a process that shares them (tensor.SharedWeights).

        Raises NotPossible before anything has changed. Any other error leaves weights of two checkpoints."""
        self._check(asleep=False)
        if not version:
            raise NotPossible("the new weights need a version, which answers name")
        with ExitStack() as stack:
            try:
                path = Path(path)
                shared = path.is_socket()
                opened = SharedCheckpoint(path, self._arena.device) if shared else Checkpoint(path)
                checkpoint = stack.enter_context(opened)
                self._check_model(checkpoint)
            except (CheckpointError, OSError, ValueError) as error:
                raise NotPossible(f"{path} has no weights for this model: {error}") from error
            self._stream.synchronize()
            stack.enter_context(self._all_ranks("update", str(path), version))
            self._load(checkpoint, stack.enter_context(Stream(self._arena.device)), self._progress())
        self.version, self.dropped = version, False

    def sleep(self, level: int = 1) -> None:
        """Copy what is kept to the host, and give the memory back. level: 1 keeps all but the cache, 2 drops the
        weights too. Raises NotPossible."""
        self._check(asleep=False)
        if level not in (1, 2):
            raise NotPossible(
                f"level {level}: 1 and 2 are possible; 1 keeps the weights in host memory, 2 drops them"
            )
        if not self._arena.mapped:
            raise NotPossible("the memory cannot be given back; start the server with --enable-sleep-mode")
        with self._all_ranks("sleep", level):
            self._stream.synchronize()
            saved, gone = [], [*self._cache, *(self.weights if level == 2 else ())]
            for start, end in self._without(gone):
                buffer = np.empty(end - start, np.uint8)
                self._stream.copy_async(buffer.ctypes.data, start, end - start, "d2h")
                saved.append((start, buffer))
            self._stream.synchronize()
            self._arena.give_back()
            self._saved, self.dropped = saved, self.dropped or level == 2

    def wake(self) -> None:
        """Take the memory again, with what was kept; the rest is zero. Raises NotPossible, OutOfMemory."""
        self._check(asleep=True)
        with self._all_ranks("wake"):
            self._arena.take_back()
            self._stream.memset_async(self._arena.base, 0, self._arena.used)
            for start, buffer in self._saved or ():
                self._stream.copy_async(start, buffer.ctypes.data, len(buffer), "h2d")
            self._stream.synchronize()
            self._saved = None

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
