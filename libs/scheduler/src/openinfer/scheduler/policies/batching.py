"""Batching: the base of all policies of this library and the pace of prompts; and FirstCome, which uses it as it is."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from ..errors import InvalidSetup
from ..policy import Decision, View
from ..runner import Step
from ..sequence import Seq, SeqState

FLOOR = 64
"""A step may always carry this many prompt tokens, even if decoding alone misses the objective."""
START = 512


class Pace:
    """A controller: it scales the number of prompt tokens by the objective over the time of the last mixed step.

    objective_s: upper limit of a step with decode rows, in seconds. This is the time between two tokens of a row. The
    controller assumes only that more tokens take longer. It learns from mixed steps only. Raises InvalidSetup.
    """

    def __init__(self, objective_s: float, max_tokens: int) -> None:
        if objective_s <= 0:
            raise InvalidSetup(f"tpot_s must be positive, given {objective_s}")
        self.objective_s = objective_s
        self._max = max_tokens
        self._floor = min(FLOOR, max_tokens)
        self.prompt_tokens = min(START, max_tokens)

    def observe(self, step: Step[Any], seconds: float) -> None:
        """Learn from a step that was read."""
        if not 0 < step.num_decode < len(step.rows):
            return
        carried = sum([row.num_tokens for row in step.rows[step.num_decode :]])
        factor = self.objective_s / seconds if seconds > 0 else 1.25
        if factor < 1:
            # At most halve the number: one slow step of the host must not cost many steps.
            self.prompt_tokens = max(self._floor, int(min(carried, self.prompt_tokens) * max(factor, 0.5)))
        elif carried > self.prompt_tokens * 7 // 8:  # the number limited the step
            self.prompt_tokens = min(self._max, int(self.prompt_tokens * min(factor, 1.25)) + 1)


class Batching:
    """Continuous batching with chunked prefill: a step has decode rows, chunks of prefilling, then admitted sequences.

    max_batched_tokens: limit of a step's tokens, at least the loop's max_rows, so that prefill cannot starve. Where no
    row decodes, a chunk of View.lone_tokens may exceed it. max_chunk_tokens: limit of a chunk. tpot_s: seconds that a
    step with decode rows should take; the tokens for prompts adapt to it (see Pace). rank: the lowest rank goes first;
    a rank is fixed while its sequence waits. None: by arrival, preempted ones first. Victims come from the other end.

    A policy of your own subclasses this class and overrides `candidates`, which orders `waiting`. Raises InvalidSetup.
    """

    uses_priority = False

    def __init__(
        self,
        max_batched_tokens: int = 2048,
        max_chunk_tokens: int | None = None,
        *,
        tpot_s: float | None = None,
        rank: Callable[[Seq[Any]], float] | None = None,
    ) -> None:
        sizes = [max_batched_tokens] if max_chunk_tokens is None else [max_batched_tokens, max_chunk_tokens]
        if not all(isinstance(size, int) and size >= 1 for size in sizes):
            raise InvalidSetup(
                "max_batched_tokens and max_chunk_tokens must be integers of at least 1, "
                f"given {max_batched_tokens} and {max_chunk_tokens}"
            )
        self.max_batched_tokens = max_batched_tokens
        self.max_chunk_tokens = max_chunk_tokens or max_batched_tokens
        self.pace = None if tpot_s is None else Pace(tpot_s, max_batched_tokens)
        self._rank = rank
        self.waiting = ArrivalQueue() if rank is None else SortedQueue(rank)

    def on_submit(self, seq: Seq[Any]) -> None:
        self.waiting.push(seq)

    def on_admit(self, seq: Seq[Any]) -> None:
        self.waiting.discard(seq)

    on_preempt = on_submit
    on_finish = on_admit

    def on_step(self, step: Step[Any], seconds: float) -> None:
        """Learn the time of steps, if there is an objective."""
        if self.pace is not None:
            self.pace.observe(step, seconds)

    def candidates(self, view: View) -> Iterable[Seq[Any]]:
        """The waiting sequences in the order of admission. The caller reads as far as there is room."""
        return self.waiting

    def plan(self, view: View) -> Decision:
        """Give the tokens that decode rows leave to prefilling sequences, then to admissions."""
        if view.max_rows > self.max_batched_tokens:
            raise InvalidSetup(
                f"max_batched_tokens is {self.max_batched_tokens}, "
                f"it must be at least max_rows ({view.max_rows}): "
                "with every row decoding nothing would be left for a prompt"
            )
        budget = self.max_batched_tokens - view.decode_tokens
        if self.pace is not None and view.decoding:
            budget = min(budget, self.pace.prompt_tokens)
        room = min(view.free_slots, budget)  # each admission takes at least one token
        waiting = self.candidates(view) if room > 0 else ()
        if view.num_loading:
            waiting = (seq for seq in waiting if seq.state is not SeqState.LOADING)
        admit = list(islice(waiting, max(0, room)))
        if view.lone_tokens and not view.decoding:
            lone = self._lone(view, admit)
            if lone is not None:
                return lone
        chunks = self._chunks(view, budget, admit)
        budget -= sum(chunks.values())
        if budget <= 0:
            return Decision(chunks)
        chunks.update((seq, self.max_chunk_tokens) for seq in admit)
        return Decision(chunks, admit, budget)

    def _lone(self, view: View, admit: list[Seq[Any]]) -> Decision | None:
        """The largest chunk of View.lone_tokens that the sequence that goes first has tokens for: a smaller chunk would
        be padded. None: it has too few, or the limit of a chunk or a rank forbids it."""

        def size_for(left: int) -> int:
            return max((n for n in view.lone_tokens if self.max_batched_tokens < n <= left), default=0)

        ranked = self._rank is not None and len(view.prefilling) + len(admit) > 1
        if ranked or self.max_chunk_tokens < self.max_batched_tokens:
            return None
        for seq in view.prefilling:
            size = size_for(seq.remaining)
            return Decision({seq: size}) if size else None
        for seq in admit[:1]:
            if size_for(len(seq.tokens)):  # else there is nothing to look up
                size = size_for(len(seq.tokens) - view.look_up(seq))
                return Decision({seq: size}, [seq], size) if size else None
        return None

    def _chunks(self, view: View, budget: int, admit: list[Seq[Any]]) -> dict[Seq[Any], int]:
        """Chunks of the prefilling sequences, by rank if there is one. Admissions that rank before all of them keep the
        tokens that they need, up to three quarters of the budget."""
        prefilling: Iterable[Seq[Any]] = view.prefilling
        if self._rank is not None and view.prefilling:
            prefilling = sorted(view.prefilling, key=self._rank)
            first = self._rank(prefilling[0])
            urgent = sum(len(seq.tokens) for seq in admit if self._rank(seq) < first)
            budget -= min(urgent, budget * 3 // 4)
        chunks: dict[Seq[Any], int] = {}
        for seq in prefilling:
            if budget <= 0:
                break
            chunks[seq] = min(seq.remaining, self.max_chunk_tokens, budget)
            budget -= chunks[seq]
        return chunks

    def victim(self, view: View) -> Seq[Any]:
        """The running sequence with the highest rank, the latest among equals. The first one always advances."""
        latest_first = reversed(view.running)
        return next(latest_first) if self._rank is None else max(latest_first, key=self._rank)


class FirstCome(Batching):
    """First come, first served. A preempted sequence goes to the head of the queue."""


class ArrivalQueue(OrderedDict[Seq[Any], None]):
    """In order of arrival, preempted sequences at the head. O(1)."""

    def push(self, seq: Seq[Any]) -> None:
        self[seq] = None
        if seq.num_preemptions:
            self.move_to_end(seq, last=False)

    def discard(self, seq: Seq[Any]) -> None:
        self.pop(seq, None)


class SortedQueue:
    """A queue by rank, the lowest first; equal ranks in the order of push(). push() reads the rank once. An operation
    takes O(log n) comparisons and a shift of a list."""

    def __init__(self, rank: Callable[[Seq[Any]], float]) -> None:
        self._rank = rank
        self._entries: list[tuple[float, int, Seq[Any]]] = []
        self._keys: dict[Seq[Any], tuple[float, int]] = {}
        self._pushed = 0

    def push(self, seq: Seq[Any]) -> None:
        self._pushed += 1
        key = self._keys[seq] = (self._rank(seq), self._pushed)
        insort(self._entries, (*key, seq))

    def discard(self, seq: Seq[Any]) -> None:
        key = self._keys.pop(seq, None)
        if key is not None:
            del self._entries[bisect_left(self._entries, key)]

    def before(self, rank: float) -> Iterator[Seq[Any]]:
        """Sequences of a lower rank, the lowest first."""
        return (self._entries[i][2] for i in range(bisect_left(self._entries, (rank,))))

    def since(self, rank: float) -> Iterator[Seq[Any]]:
        """The other sequences, the lowest rank first."""
        return (self._entries[i][2] for i in range(bisect_left(self._entries, (rank,)), len(self._entries)))

    def __iter__(self) -> Iterator[Seq[Any]]:
        return (seq for _, _, seq in self._entries)

    def __len__(self) -> int:
        return len(self._entries)
