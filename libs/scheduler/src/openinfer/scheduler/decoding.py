"""DecodeRows: the rows that decode, their drafts, and a calendar of the rows that need blocks."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Generic

from .errors import ContractError
from .runner import Row, Step
from .sequence import Owner, Seq


class DecodeRows(Generic[Owner]):
    """Every decode row is in every step, so a row without drafts advances by one token a step: its counters follow
    from the step index, and the step that outgrows its blocks is known when it gets them. The calendar holds it under
    that step. Rows with drafts are looked at in each step instead.

    The entry of a row that has left stays until it is due. The entry of a row that advanced by less than it might have
    is due too early, and is then scheduled again.
    """

    def __init__(self) -> None:
        self.rows: dict[Seq[Owner], Row[Owner]] = {}
        self.drafts: Mapping[Seq[Owner], int] = {}
        """Of rows that have any. Replaced, never changed: steps keep it."""
        self.listed: list[Row[Owner]] | None = []
        """The rows as a list, the same object while nothing changes; None: rebuild() first."""
        self.horizon = 0
        """No row runs in a later step, by its length: rows with drafts may end earlier."""
        self.calendar: dict[int, list[Seq[Owner]]] = {}
        """Rows that need blocks, by step. Stale: an entry under another step than seq.crossing."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows in a step."""
        return len(self.rows) + sum(self.drafts.values())

    def enter(self, seq: Seq[Owner], index: int) -> None:
        """The last chunk of its prompt is in step `index`."""
        seq.base, seq.entered, seq.ahead = seq.target, index, 0
        seq.last_step = index + seq.max_len - 1 - seq.target
        self.rows[seq] = Row(seq, 1, True, None)
        self.listed = None
        self.schedule(seq)

    def discard(self, seq: Seq[Owner]) -> None:
        """It ended or is preempted, if it is here."""
        if self.rows.pop(seq, None) is not None:
            self.listed, seq.crossing = None, 0
            if seq in self.drafts:
                self.drafts = {other: count for other, count in self.drafts.items() if other is not seq}

    def rebuild(self) -> list[Row[Owner]]:
        """Make the list. O(rows)."""
        self.listed = list(self.rows.values())
        self.horizon = max([seq.last_step for seq in self.rows], default=0)
        return self.listed

    # -- drafts --

    def draft(self, wanted: Mapping[Seq[Owner], int], index: int) -> None:
        """Give rows their drafts of step `index`: as many as wanted, and as the sequence may have tokens left."""
        drafts = {}
        for seq, count in wanted.items():
            if seq not in self.rows or count < 0:
                raise ContractError(
                    f"request {seq.id} is to have {count} drafts; it is {seq.state.name}, give decode rows 0 or more"
                )
            count = min(count, seq.max_len - 1 - (seq.base - seq.ahead + index - seq.entered))
            if count > 0:
                drafts[seq] = count
        if drafts != self.drafts:
            for seq in [seq for seq in self.drafts if seq not in drafts]:
                self.undraft(seq)
            for seq, count in drafts.items():
                self.rows[seq] = Row(seq, 1 + count, True, None)
                seq.crossing = 0
            self.drafts, self.listed = drafts, None
        if not any(seq.last_step >= index for seq in self.rows):
            self.horizon = index - 1  # drafts that were kept brought all rows closer to their ends

    def undraft(self, seq: Seq[Owner]) -> None:
        """The row has no drafts from now on."""
        self.drafts = {other: count for other, count in self.drafts.items() if other is not seq}
        self.rows[seq] = Row(seq, 1, True, None)
        self.listed = None
        self.schedule(seq)

    def launched(self) -> None:
        """A step with these drafts was launched."""
        for seq, count in self.drafts.items():
            seq.ahead += count
            seq.base += count

    def advance(self, step: Step[Owner], advanced: Mapping[Seq[Owner], int], gone: Set[Seq[Owner]]) -> None:
        """Correct the counters of rows that did not advance by one token in a step, as the clock has them do.
        advanced: rows that advanced by less than their q_len. gone: rows that are not looked at any more."""
        for seq, count in advanced.items():
            q_len = 1 + step.drafts.get(seq, 0)
            if not 0 <= count <= q_len:
                raise ContractError(
                    f"in step {step.index} request {seq.id} advanced by {count} tokens; its row has {q_len}"
                )
        for seq in {**step.drafts, **advanced}:
            if seq not in gone:
                drafts = step.drafts.get(seq, 0)
                more = advanced.get(seq, 1 + drafts) - 1
                seq.ahead -= drafts
                seq.base, seq.last_step = seq.base + more - drafts, seq.last_step - more
                self.horizon = max(self.horizon, seq.last_step)

    # -- the calendar --

    def schedule(self, seq: Seq[Owner]) -> None:
        """Note the first step for which the blocks of a row without drafts do not suffice, if it may live to see it."""
        room = seq.lease.num_tokens if seq.lease else 0
        seq.crossing = 0
        if room < seq.max_len - 1:
            seq.crossing = step = seq.entered + room - seq.base + 1
            if step in self.calendar:
                self.calendar[step].append(seq)
            else:
                self.calendar[step] = [seq]
