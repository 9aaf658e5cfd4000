"""The commands of rank 0 that a rank above it carries out, in the order of its launches."""

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from openinfer.graph import NotPossible
from openinfer.graph.runner import Runner, WeightsDesk
from openinfer.kvpool.tiers import Copier, Kind, Layout, SharedRecords
from openinfer.recipes.engine.ranks import Ranks


class Following:
    """A rank above 0 and its commands. layout: of its cache in records. saves: it holds a part of its own of them."""

    def __init__(
        self, runner: Runner, desk: WeightsDesk, ranks: Ranks, layout: Layout, *, saves: bool
    ) -> None:
        self.runner, self._desk, self._ranks = runner, desk, ranks
        self._layout, self._saves = layout, saves
        self._copier: Copier | None = None
        self.commands: Mapping[str, Callable[..., object]] = {
            "adapter": self._put_adapter,
            "records": self._open_records,
            "copy": self._copy,
            "prepare": self._prepare,
            "commit": desk.commit,
        }

    def _put_adapter(self, place: int) -> None:
        adapters = self.runner.model.batch.adapters
        if adapters is not None:
            adapters.put(place, self._ranks.staged[place - 1], self.runner.stream)

    def _prepare(self, command: str, *args: str | int) -> None:
        with suppress(NotPossible):  # rank 0 has the answer
            self._desk.prepare(command, *args)

    def _open_records(self, pieces: list[int]) -> None:
        _, files, *_ = socket.recv_fds(self._ranks.links[0], 1, 1)
        shared, rank = SharedRecords(files[0], self._ranks.size, sum(pieces)), self._ranks.rank
        self._copier = Copier(self._layout, self.runner.stream, shared, rank, pieces, saves=self._saves)

    def _copy(self, kind: Kind, copies: Sequence[Sequence[int]]) -> None:
        if self._copier is None:
            raise RuntimeError("rank 0 sent copies before the memory of the records")
        self._copier.copy(kind, copies)

    def close(self) -> None:
        """Wait for the device and give everything back."""
        if self._copier is not None:
            self._copier.close()
        self.runner.close()
        self._ranks.close()
