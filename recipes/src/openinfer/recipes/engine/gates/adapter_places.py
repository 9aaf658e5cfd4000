"""AdapterPlaces: sequences wait here until their adapter (LoRA) has a place; and adapters come and go."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.frontend.contract import AdapterState, LoadAdapter, Rejected, Request, UnloadAdapter
from openinfer.frontend.errors import Unsupported
from openinfer.graph.runner import AdapterQueue, Sampling
from openinfer.kernels import InvalidAdapter
from openinfer.kernels.authoring import Adapter, Adapters
from openinfer.kvpool import adapter_salt
from openinfer.recipes.engine.gates import Gate, full
from openinfer.scheduler import Seq
from openinfer.tensor import Stream

Array = np.ndarray[Any, Any]


class AdapterPlaces(Gate):
    """A Gate: the adapters that requests may name, and the sequences that wait for a place. `adapters` None: an engine
    without places, where no sequence waits.

    Adapters are read in a thread. One that is unloaded stays until its last sequence has ended.
    """

    def __init__(
        self,
        adapters: Adapters | None,
        stream: Stream,
        loaded: Iterable[Adapter],
        tell: Callable[[int, Array], None],
        max_queued: int,
    ) -> None:
        self._adapters, self._max_queued = adapters, max_queued
        self._queue = AdapterQueue(adapters, stream, tell) if adapters is not None else None
        self._loaded = {adapter.name: adapter for adapter in loaded}
        self._loading: set[str] = set()
        self._reader = ThreadPoolExecutor(1, "adapters")

    def __len__(self) -> int:
        return len(self._queue) if self._queue is not None else 0

    @property
    def places(self) -> int:
        """Adapters that a step can have."""
        return self._adapters.sizes.places if self._adapters is not None else 0

    def assign(self, request: Request, sampling: Sampling, salt: bytes) -> bytes:
        """Give a sequence the adapter that its request names. The salt of its cached prefixes."""
        adapter = sampling.adapter = self._loaded.get(request.adapter)
        return salt if adapter is None else adapter_salt(salt, adapter.name, adapter.digest)

    def refusal(self, request: Request, waiting: int) -> Rejected | None:
        if not request.adapter:
            return None
        if request.adapter not in self._loaded:
            return Rejected(request.id, f"the adapter {request.adapter!r} is not loaded")
        return full(request, waiting, self._max_queued)

    def take(self, seq: Seq[Sampling]) -> bool:
        if self._queue is None or seq.owner.adapter is None or seq.owner.place:
            return False
        self._queue.wait(seq)
        return True

    def ready(self, wait_s: float) -> Sequence[Seq[Sampling] | Rejected]:
        return self._queue.ready() if self._queue is not None else []

    def drop(self, request_id: int) -> bool:
        return self._queue is not None and self._queue.drop(request_id)

    def end(self, seq: Seq[Sampling]) -> None:
        if self._queue is not None:
            self._queue.end(seq)

    def carry_out(self, command: LoadAdapter | UnloadAdapter) -> Future[None] | None:
        """Read an adapter, or forget its name. Requests may name an adapter when the future is done.

        Raises Unsupported where a name is taken, not known, or being loaded. So may the future: no adapter fits.
        """
        name = command.name
        if self._adapters is None:
            raise Unsupported("this engine has no adapters; start it with --enable-lora")
        if name in self._loading:
            raise Unsupported(f"the adapter {name!r} is being loaded; try again when that is done")
        if isinstance(command, UnloadAdapter):
            if self._loaded.pop(name, None) is None:
                raise Unsupported(f"the adapter {name!r} is not loaded")
            return None
        if name in self._loaded and not command.in_place:
            raise Unsupported(f"the adapter {name!r} has already been loaded; unload it or set load_inplace")
        self._loading.add(name)
        return self._reader.submit(self._read, self._adapters, name, Path(command.path))

    def _read(self, adapters: Adapters, name: str, folder: Path) -> None:
        try:
            self._loaded[name] = adapters.read(name, folder)
        except (InvalidAdapter, MemoryError) as error:
            raise Unsupported(str(error)) from None
        finally:
            self._loading.discard(name)

    def states(self) -> list[AdapterState]:
        """The adapters, and how many requests of each run or wait."""
        if self._queue is None:
            return []
        running, waiting = self._queue.running, self._queue.waiting
        return [AdapterState(n, one.path, running[n], waiting[n]) for n, one in list(self._loaded.items())]

    def close(self) -> None:
        """Wait for the adapter that is being read."""
        self._reader.shutdown(cancel_futures=True)
