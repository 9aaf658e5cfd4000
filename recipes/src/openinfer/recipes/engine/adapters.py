"""The adapters (LoRA) of an engine: their flags, their names, and loading them while requests run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from openinfer.frontend.contract import AdapterState, LoadAdapter, Rejected, Request, UnloadAdapter
from openinfer.frontend.errors import Unsupported
from openinfer.graph.runner import AdapterQueue, Sampling
from openinfer.kernels import InvalidAdapter
from openinfer.kernels.authoring import Adapter, Adapters, Projection
from openinfer.kvpool import adapter_salt
from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.engine.limits import Limits
from openinfer.scheduler import Seq
from openinfer.tensor import Arena, Load, Stream, Tensor

if TYPE_CHECKING:
    from openinfer.recipes.engine.followers import Followers
    from openinfer.recipes.engine.options import Options


def adapters_of(
    arena: Arena,
    limits: Limits,
    weights: Iterable[Tensor],
    loads: Iterable[Load],
    whole: Callable[[], Iterable[Load]],
    unused: tuple[str, ...] = (),
) -> Adapters | None:
    """Places for adapters of these weights, which the loads fill; None in an engine without adapters. whole: the loads
    of the model of which this is a rank's part. unused: the beginnings of modules that the checkpoint may have and that
    are not run."""
    if limits.adapters is None:
        return None
    return Adapters.allocate(
        arena,
        limits.adapters,
        weights,
        _projections(loads),
        dtype=limits.dtype,
        unused=unused,
        shapes={one.module: one.shape for one in _projections(whole())},
    )


def _projections(loads: Iterable[Load]) -> list[Projection]:
    return [Projection(load.name.removesuffix(".weight"), load.dst, load.source) for load in loads]


def read_modules(options: Options, adapters: Adapters | None) -> list[Adapter]:
    """The adapters of --lora-modules; or of dummy weights, one a place. Raises SetupError, InvalidAdapter."""
    if adapters is None:
        if options.enable_lora:
            raise SetupError("--enable-lora: this model's recipe runs no adapters; leave the flag out")
        return []
    if options.load_format == "dummy" and not options.lora_modules:
        return [adapters.dummy(f"dummy-{place}") for place in range(1, adapters.sizes.places + 1)]
    return [adapters.read(name, Path(path)) for name, path in _named(options.lora_modules)]


def _named(modules: Iterable[str]) -> Iterable[tuple[str, str]]:
    """(name, folder) of NAME=PATH, or of a JSON object with the keys name and path."""
    found: dict[str, str] = {}
    for module in modules:
        name, _, path = module.partition("=")
        if module.lstrip().startswith("{"):
            try:
                entry = json.loads(module)
                name, path = entry["name"], entry["path"]
            except (ValueError, KeyError, RecursionError) as error:
                raise SetupError(
                    f"--lora-modules {module[:200]}: {error}; name and path are needed"
                ) from None
        named = isinstance(name, str) and name.isprintable() and name.strip()
        if not (named and isinstance(path, str) and path):
            raise SetupError(f"--lora-modules {module!r}: give NAME=PATH, and a name that is printable")
        if name in found:
            raise SetupError(f"--lora-modules: the name {name!r} comes twice")
        found[name] = path
    return found.items()


class AdapterDesk:
    """The adapters that requests may name, and the queue of sequences that wait for a place. `adapters` None: an engine
    without places, where no sequence waits.

    Adapters are read in a thread, so that no step waits for it. An adapter that is unloaded stays until its last
    sequence has ended.
    """

    def __init__(
        self,
        adapters: Adapters | None,
        stream: Stream,
        loaded: Iterable[Adapter],
        followers: Followers | None = None,
    ) -> None:
        self._adapters, tell = adapters, None if followers is None else followers.put_adapter
        self._queue = AdapterQueue(adapters, stream, tell) if adapters is not None else None
        self._loaded = {adapter.name: adapter for adapter in loaded}
        self._loading: set[str] = set()
        self._reader = ThreadPoolExecutor(1, "adapters")

    def __len__(self) -> int:
        """Sequences that wait for a place."""
        return len(self._queue) if self._queue is not None else 0

    @property
    def places(self) -> int:
        """Adapters that a step can have."""
        return self._adapters.sizes.places if self._adapters is not None else 0

    def assign(self, request: Request, sampling: Sampling, salt: bytes) -> bytes:
        """Give a sequence the adapter that its request names. The salt of its cached prefixes."""
        adapter = sampling.adapter = self._loaded.get(request.adapter)
        return salt if adapter is None else adapter_salt(salt, adapter.name, adapter.digest)

    def refusal(self, request: Request, waiting: int, max_queued: int) -> Rejected | None:
        """The refusal of a request whose adapter is not loaded, or that would wait as one too many."""
        if not request.adapter:
            return None
        if request.adapter not in self._loaded:
            return Rejected(request.id, f"the adapter {request.adapter!r} is not loaded")
        if waiting >= max_queued:
            why = f"{waiting} requests wait (max_queued {max_queued}); try later"
            return Rejected(request.id, why, "queue_full")
        return None

    def waits(self, seq: Seq[Sampling]) -> bool:
        """Whether a sequence has to wait for `ready`: its adapter has no place yet."""
        if self._queue is None or seq.owner.adapter is None or seq.owner.place:
            return False
        self._queue.wait(seq)
        return True

    def ready(self) -> list[Seq[Sampling]]:
        """The sequences whose adapter got a place."""
        return self._queue.ready() if self._queue is not None else []

    def drop(self, request_id: int) -> bool:
        """Forget a sequence that waits; False if none has this id."""
        return self._queue is not None and self._queue.drop(request_id)

    def end(self, seq: Seq[Sampling]) -> None:
        """A sequence has ended."""
        if self._queue is not None:
            self._queue.end(seq)

    def carry_out(self, command: LoadAdapter | UnloadAdapter) -> Future[None] | None:
        """Read an adapter, or forget its name. Requests may name an adapter when the future is done.

        Raises Unsupported where a name is taken, not known, or being loaded. The future may raise it too: the folder
        has no adapter that fits.
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
