"""DecodeRows: the rows that decode, their drafts, and a calendar of the rows that need blocks."""

from collections.abc import Mapping, Set
from typing import Generic

from .errors import ContractError
from .runner import Row, Step
from .sequence import Owner, Seq


class DecodeRows(Generic[Owner]):
    """All decode rows run in every step. A row without drafts advances by one token a step, so its counters follow from
    the step index. The step that outgrows its blocks is known when the row gets them, and the calendar lists the row
    under that step. The loop looks at rows with drafts in each step instead.

    An entry stays in the calendar when its row leaves; the loop drops it when it is due. A row that advanced by
    less than it might have is due too early, and the loop schedules it again.
    """

    def __init__(self) -> None:
        self.rows: dict[Seq[Owner], Row[Owner]] = {}
        self.drafts: Mapping[Seq[Owner], int] = {}
        """Number of drafts of each row that has any. Steps keep the mapping, so it is replaced and never changed."""
        self.listed: list[Row[Owner]] | None = []
        """The rows as a list, the same object while nothing changes. None: call rebuild() first."""
        self.horizon = 0
        """The last step in which a row can run, by the rows' lengths. Rows with drafts may end earlier."""
        self.calendar: dict[int, list[Seq[Owner]]] = {}
        """Rows that need blocks, by step. Stale: an entry under another step than seq.crossing."""
        self._nearer = False  # accepted drafts brought rows closer to their ends than the horizon says

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows in a step."""
        return len(self.rows) + sum(self.drafts.values())

    def enter(self, seq: Seq[Owner], index: int) -> None:
        """Add a sequence. The last chunk of its prompt is in step `index`."""
        seq.base, seq.entered, seq.ahead = seq.target, index, 0
        seq.last_step = index + seq.max_len - 1 - seq.target
        self.rows[seq] = Row(seq, 1, True, None)
        self.listed = None
        self.schedule(seq)

    def discard(self, seq: Seq[Owner]) -> None:
        """Remove a sequence that ended or is preempted, if it decodes."""
        if self.rows.pop(seq, None) is not None:
            self.listed, seq.crossing = None, 0
            if seq in self.drafts:
                self.drafts = {other: count for other, count in self.drafts.items() if other is not seq}

    def rebuild(self) -> list[Row[Owner]]:
        """Make the list. O(rows)."""
        self.listed = list(self.rows.values())
        self.horizon = max([seq.last_step for seq in self.rows], default=0)
        self._nearer = False
        return self.listed

    # -- drafts --

    def draft(self, wanted: Mapping[Seq[Owner], int], index: int) -> None:
        """Set the drafts of step `index`: the wanted number, limited by the tokens that the sequence has left.

        Every draft in flight counts as accepted, so none is at a position without blocks, from seq.max_len - 1 on."""
        if not (wanted or self.drafts or self._nearer):
            return  # most steps, where drafts do not pay
        drafts = {}
        for seq, count in wanted.items():
            if seq not in self.rows or count < 0:
                raise ContractError(
                    f"request {seq.id} is to have {count} drafts; it is {seq.state.name}, give decode rows 0 or more"
                )
            count = min(count, seq.max_len - 1 - (seq.base + index - seq.entered))
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
            self.horizon = index - 1  # accepted drafts brought all rows closer to their ends

    def undraft(self, seq: Seq[Owner]) -> None:
        self.drafts = {other: count for other, count in self.drafts.items() if other is not seq}
        self.rows[seq] = Row(seq, 1, True, None)
        self.listed = None
        self.schedule(seq)

    def launched(self) -> None:
        """Count the drafts of a step that is launched."""
        for seq, count in self.drafts.items():
            seq.ahead += count
            seq.base += count

    def advance(self, step: Step[Owner], advanced: Mapping[Seq[Owner], int], gone: Set[Seq[Owner]]) -> None:
        """Correct the counters of rows that did not advance by one token in a step, which the clock assumes.
        advanced: rows that advanced by less than their q_len. gone: rows that have left. Raises ContractError."""
        rows = step.drafts
        if advanced:
            rows = {**rows, **dict.fromkeys(advanced.keys() - rows.keys(), 0)}
        for seq, drafts in rows.items():
            count = advanced.get(seq, 1 + drafts)
            if not 0 <= count <= 1 + drafts:
                raise ContractError(
                    f"in step {step.index} request {seq.id} advanced by {count} tokens; its row has {1 + drafts}"
                )
            if seq not in gone:
                seq.ahead -= drafts
                seq.base += count - 1 - drafts
                seq.last_step -= count - 1
                self._nearer = self._nearer or count > 1
                self.horizon = max(self.horizon, seq.last_step)

    # -- the calendar --

    def schedule(self, seq: Seq[Owner]) -> None:
        """List a row without drafts under the first step that outgrows its blocks, if the row can reach that step."""
        room = seq.lease.num_tokens if seq.lease else 0
        seq.crossing = 0
        if room < seq.max_len - 1:
            seq.crossing = step = seq.entered + room - seq.base + 1
            self.calendar.setdefault(step, []).append(seq)
