"""FakeRunner: a fake device with slots, paged memory and launch-ahead, which notices every misuse.

It computes a step at its launch and returns the result late. Steps of a stream run in order, so the difference does
not show. A row has the state that a GPU keeps: alive bit, length, last token, block tables. Tokens are stored and
read through the block tables. A block that is released too early, written twice, or cached before it is written is
noticed: it causes a DeviceFault, or a token that differs from the oracle's (`generate`).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

from ..runner import Row, Step, StepResult
from ..sequence import FinishReason, Seq

VOCABULARY = 31
"""Token ids 0..30."""
EOS = 0
"""The token at which a row ends."""

_PRIME = (1 << 61) - 1


def cell(previous: int, token: int) -> int:
    """The cell of a token, from the cell of the token before it (0 at the start). It stands for KV."""
    return (previous * 6364136223846793005 + token * 1442695040888963407 + 1) % _PRIME


def next_token(cells: Iterable[int]) -> int:
    """The greedy continuation: it reads every stored cell, as attention does."""
    return (sum(cells) * 2862933555777941757 % _PRIME) % VOCABULARY


def generate(
    prompt: Sequence[int], max_len: int, window: int | None = None
) -> tuple[list[int], FinishReason]:
    """The sequential oracle: the output of a request that is alone on the device, and the reason of its end.
    window: the number of earlier cells that a token reads; None: all."""
    reach = 0 if window is None else -window - 1
    cells = list(accumulate(prompt, cell, initial=0))[1:]
    output: list[int] = []
    while True:
        output.append(next_token(cells[reach:]))
        if output[-1] == EOS:
            return output, FinishReason.STOP
        if len(prompt) + len(output) == max_len:
            return output, FinishReason.LENGTH
        cells.append(cell(cells[-1], output[-1]))


Sampled: TypeAlias = list[list[int]]
"""Payload of FakeRunner: the tokens of each row, along the rows; [] if a row has none."""


class DeviceFault(RuntimeError):
    """A step did something that would be silent corruption on a GPU."""


@dataclass(slots=True, eq=False)
class _DeviceRow:
    """The device's state of a slot. The last two fields are the host's."""

    slot: int
    max_len: int
    tables: list[list[int]]
    length: int  # tokens stored
    before: int = 0  # length at the start of the step, because rows of a step run side by side
    alive: bool = True
    last_token: int | None = None
    last_step: int = 0
    ended: bool = False  # the host knows of the end


@dataclass(slots=True)
class _Paged:
    """The memory of a group: (position, cell) by block, and the rows that have the block in their table."""

    block_size: int
    window: int | None
    blocks: dict[int, list[tuple[int, int] | None]] = field(default_factory=dict)
    holders: dict[int, set[_DeviceRow]] = field(default_factory=dict)


class FakeRunner:
    """A Runner with block_sizes[g] tokens a block in group g. windows[g]: earlier tokens that a token reads; None: all.

    delay(index): the number of collect() calls that find step `index` unfinished; a wait without limit finishes it.
    stall(index, seq): whether a decode row stands still (StepResult.advanced 0). accept(index, seq, k): how many of a
    row's k drafts are right. depth: limit of steps in flight. The payload is `Sampled`. Raises DeviceFault.
    """

    def __init__(
        self,
        block_sizes: Sequence[int],
        *,
        windows: Sequence[int | None] = (),
        depth: int = 2,
        delay: Callable[[int], int] = lambda index: 0,
        stall: Callable[[int, Seq[Any]], bool] = lambda index, seq: False,
        accept: Callable[[int, Seq[Any], int], int] = lambda index, seq, drafts: drafts,
    ) -> None:
        self.num_launched = self.num_collected = 0
        self._depth, self._delay, self._stall, self._accept = depth, delay, stall, accept
        self._groups = list(map(_Paged, block_sizes, windows or [None] * len(block_sizes)))
        self._rows: dict[int, _DeviceRow] = {}
        self._last_rows: Sequence[Row[Any]] = ()
        self._results: deque[StepResult[Sampled]] = deque()
        self._polls = 0

    def launch(self, step: Step[Any]) -> None:
        """Apply the step's changes, compute its rows, keep the result for later."""
        self.num_launched += 1
        self._check_shape(step)
        for slot in step.left:
            self._rows[slot].alive = False
            self._rows[slot].ended = True
        for seq in step.joined:
            self._join(seq)
        for seq, group, first, blocks in step.blocks:
            self._write_table(self._rows[seq.slot], group, first, blocks)
        for state in self._rows.values():
            state.before = state.length
        result: StepResult[Sampled] = StepResult(step.index, [], [], {})
        self._results.append(result)
        result.payload = [self._run(row, result) for row in step.rows]
        result.advanced = result.advanced or None
        if len(self._results) == 1:
            self._polls = self._delay(step.index)

    def collect(self, wait_s: float | None) -> StepResult[Sampled] | None:
        if not self._results:
            return None
        if wait_s is not None and self._polls > 0:
            self._polls -= 1
            return None
        result = self._results.popleft()
        self.num_collected = result.index
        for slot, _ in result.finished:
            self._rows[slot].ended = True
        if self._results:
            self._polls = self._delay(self._results[0].index)
        return result

    def block_size(self, group: int) -> int:
        """Tokens a block of a group."""
        return self._groups[group].block_size

    def fill(self, group: int, block: int, start: int, cells: Sequence[int]) -> None:
        """Fill a block from elsewhere with the cells of the tokens from `start` on. No step in flight may use the
        block. A row that reads the block later must find its own tokens there."""
        memory = self._groups[group]
        rows = [row for row in memory.holders.get(block, ()) if row.last_step > self.num_collected]
        if block == 0 or any(self._reads(row, group, block) for row in rows):
            raise DeviceFault(f"block {block} of group {group} is filled while a step uses it")
        empty: list[tuple[int, int] | None] = [None] * (memory.block_size - len(cells))
        memory.blocks[block] = [*((start + offset, value) for offset, value in enumerate(cells)), *empty]
        memory.holders[block] = set()

    def _check_shape(self, step: Step[Any]) -> None:
        if step.index != self.num_launched:
            raise DeviceFault(f"step {step.index} is launched as number {self.num_launched}")
        if len(self._results) >= self._depth:
            raise DeviceFault(f"step {step.index} is launched with {len(self._results)} in flight")
        if step.changed == (step.rows is self._last_rows):
            raise DeviceFault(f"step {step.index} says changed={step.changed}, its rows say otherwise")
        self._last_rows = step.rows
        slots = [row.seq.slot for row in step.rows]
        if not slots or len(set(slots)) != len(slots):
            raise DeviceFault(f"step {step.index} has the slots {slots}")
        if [row.start is None for row in step.rows] != [i < step.num_decode for i in range(len(slots))]:
            raise DeviceFault(f"step {step.index}: the first {step.num_decode} rows are not the decode rows")
        drafts = {
            row.seq: row.num_tokens - 1 for row in step.rows if row.start is None and row.num_tokens != 1
        }
        if drafts != step.drafts:
            raise DeviceFault(f"step {step.index} names {len(step.drafts)} drafting rows, has {len(drafts)}")

    def _fenced(self, row: _DeviceRow) -> bool:
        return row.ended and row.last_step <= self.num_collected

    def _join(self, seq: Seq[Any]) -> None:
        old = self._rows.get(seq.slot)
        if old is not None and not self._fenced(old):
            raise DeviceFault(f"slot {seq.slot} is given to request {seq.id} while its row is in use")
        if seq.slot < 1 or seq.lease is None:
            raise DeviceFault(f"request {seq.id} joins with slot {seq.slot} and lease {seq.lease}")
        tables: list[list[int]] = [[] for _ in self._groups]
        self._rows[seq.slot] = _DeviceRow(seq.slot, seq.max_len, tables, seq.lease.num_cached)

    def _write_table(self, row: _DeviceRow, group: int, first: int, blocks: Sequence[int]) -> None:
        if first != len(row.tables[group]):
            raise DeviceFault(
                f"slot {row.slot}: table entry {first} is written, {len(row.tables[group])} are there"
            )
        row.tables[group].extend(blocks)
        for block in blocks:
            self._groups[group].holders.setdefault(block, set()).add(row)

    def _run(self, row: Row[Any], result: StepResult[Sampled]) -> list[int]:
        """Run one row of a step. A dead row does nothing."""
        state = self._rows[row.seq.slot]
        state.last_step = result.index
        if not state.alive:
            return []
        if row.start is None:
            return self._decode(row, state, result)
        if row.start != state.length:
            raise DeviceFault(f"slot {state.slot} has {state.length} tokens, its chunk starts at {row.start}")
        fed = row.seq.tokens[row.start : row.start + row.num_tokens]
        if not len(fed) == row.num_tokens > 0:
            raise DeviceFault(f"slot {state.slot} is fed {len(fed)} tokens with q_len {row.num_tokens}")
        for token in fed:
            self._store(state, token)
        return [self._sample(state, result)] if row.emits else []

    def _decode(self, row: Row[Any], state: _DeviceRow, result: StepResult[Sampled]) -> list[int]:
        """Feed the last token and the drafts. Accept the right drafts; write garbage for the others."""
        if state.last_token is None:
            raise DeviceFault(f"slot {state.slot} decodes before its prompt is complete")
        drafts, tokens = row.num_tokens - 1, list[int]()
        if not self._stall(result.index, row.seq):
            right = self._accept(result.index, row.seq, drafts) if drafts else 0
            while state.alive and len(tokens) <= right:
                self._store(state, state.last_token)
                tokens.append(self._sample(state, result))
            for position in range(state.length, state.length + row.num_tokens - len(tokens)):
                self._write(state, position, -1)
        if len(tokens) < row.num_tokens:
            result.advanced = {**(result.advanced or {}), state.slot: len(tokens)}
        return tokens

    def _store(self, row: _DeviceRow, token: int) -> None:
        previous = self._load(row, 0, row.length - 1) if row.length else 0
        self._write(row, row.length, cell(previous, token))
        row.length += 1
        if any(memory.window is not None for memory in self._groups):
            self._attend(row)  # check each token now, because blocks that leave the window are soon reused

    def _write(self, row: _DeviceRow, position: int, value: int) -> None:
        for group, memory in enumerate(self._groups):
            index, offset = divmod(position, memory.block_size)
            if index >= len(row.tables[group]):
                raise DeviceFault(f"slot {row.slot} writes token {position} past its table in group {group}")
            block = row.tables[group][index]
            others = memory.holders[block] - {row}
            if block == 0 or any(self._reads(other, group, block) for other in others):
                raise DeviceFault(f"slot {row.slot} writes to block {block}, which other rows use")
            memory.holders[block] = {row}
            if offset == 0:
                memory.blocks[block] = [None] * memory.block_size
            memory.blocks[block][offset] = (position, value)

    def _reads(self, row: _DeviceRow, group: int, block: int) -> bool:
        """Whether a row may still read a block of its table: it has not ended, and its window reaches it."""
        memory = self._groups[group]
        first = 0 if memory.window is None else max(0, row.before - memory.window) // memory.block_size
        return not self._fenced(row) and block in row.tables[group][first:]

    def _load(self, row: _DeviceRow, group: int, position: int) -> int:
        memory = self._groups[group]
        index, offset = divmod(position, memory.block_size)
        block = row.tables[group][index]
        stored = memory.blocks.get(block, [None] * memory.block_size)[offset]
        if stored is None or stored[0] != position:
            raise DeviceFault(
                f"slot {row.slot} reads token {position} from block {block}, which holds {stored}"
            )
        return stored[1]

    def _attend(self, row: _DeviceRow) -> list[int]:
        """The cells that the newest token reads in the first group. The other groups must hold the same cells."""
        read = []
        for group, memory in enumerate(self._groups):
            first = 0 if memory.window is None else max(0, row.length - 1 - memory.window)
            read.append([self._load(row, group, position) for position in range(first, row.length)])
        cells = read[0]
        if any(other[-n:] != cells[-n:] for other in read if (n := min(len(other), len(cells)))):
            raise DeviceFault(f"slot {row.slot}: the groups hold different tokens")
        return cells

    def _sample(self, row: _DeviceRow, result: StepResult[Sampled]) -> int:
        token = row.last_token = next_token(self._attend(row))
        if token == EOS or row.length + 1 == row.max_len:
            row.alive, reason = False, FinishReason.STOP if token == EOS else FinishReason.LENGTH
            result.finished = [*result.finished, (row.slot, reason)]
        return token
