"""Runner: steps of the scheduler's loop as changes to Rows and launches of recorded segments."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from openinfer.graph.buckets import Buckets, Shape
from openinfer.graph.pace import StepPace
from openinfer.graph.readback import Readback
from openinfer.graph.runner.batch import fed_ids
from openinfer.graph.runner.drafting import Drafting, NoDrafts, Spent
from openinfer.graph.runner.follower import Leader, LoneLeader
from openinfer.graph.runner.masking import Constrained, Masking, NoMasks, accept_tokens, constrained_rows
from openinfer.graph.runner.model import Masks, Model
from openinfer.graph.runner.proposing import BlockProposer, keeps
from openinfer.graph.runner.sampling import Sampling, Wishes
from openinfer.graph.runner.scoring import Scores, Share, read_scores, write_scores
from openinfer.graph.runner.segments import UPLOAD, segments
from openinfer.graph.runner.verifying import read_verified, write_following, write_verified
from openinfer.graph.steps import StepGraphs
from openinfer.graph.watch import NoWatch, Watch
from openinfer.graph.watch.trace import StepTrace
from openinfer.kernels import Pack
from openinfer.sampler.gpu import RowStatus, masks_after, values
from openinfer.scheduler import FinishReason, Seq, Step, StepResult
from openinfer.tensor import Stream

Array = np.ndarray[Any, Any]

FINISH_REASONS = {
    RowStatus.STOP: FinishReason.STOP,
    RowStatus.DRAFTED_STOP: FinishReason.STOP,
    RowStatus.LENGTH: FinishReason.LENGTH,
    RowStatus.FAILED: FinishReason.ERROR,
}


class Payload(NamedTuple):
    """Results of a step along its rows: token ids [1 + D, R], their log-probabilities [1 + D, R], and the most likely
    tokens [1 + D, R, MAX_LOGPROBS] where a row asked. Log-probabilities are NaN where no row asked for one and all are
    greedy. D: the most drafts of a row in a step of this shape."""

    token_ids: Array
    logprobs: Array
    top_ids: Array | None
    top_logprobs: Array | None


class _Launched(NamedTuple):
    """A step in flight, and the outputs that its rows asked for."""

    step: Step[Sampling]
    shape: Shape
    constrained: Constrained
    wants_logprobs: bool
    shares: Sequence[Share]
    places: int
    """Drafts that layers make after it."""
    spent: Spent | None
    """See Drafting.spent."""


@dataclass(slots=True)
class Runner:
    """scheduler.Runner over a model: one stream, results in the order of the steps.

    watch: looks at every step. leader: of ranks that run the same steps. masks: of sequences with a constraint.

    `record` comes first. `close` gives back graphs and host buffers; the arena owns the device's memory.
    """

    model: Model
    pack: Pack
    stream: Stream
    graphs: StepGraphs
    buckets: Buckets
    readback: Readback
    pace: StepPace = field(default_factory=StepPace)
    watch: Watch = field(default_factory=NoWatch)
    leader: Leader | LoneLeader = field(default_factory=LoneLeader)
    drafting: Drafting | NoDrafts = field(default_factory=NoDrafts)
    masks: InitVar[Masks] = NoMasks()  # noqa: RUF009, it has no state
    _launched: list[_Launched] = field(default_factory=list)
    _shape: Shape = field(default_factory=lambda: Shape(0, 0, 0))
    _bucket: str = ""  # its name
    _plain: Shape = field(default_factory=lambda: Shape(0, 0, 0))  # of the same rows without drafts
    _wants_logprobs: bool = False
    _greedy: bool = False  # whether the rows ask for the most likely token and nothing else
    _constrained: Constrained = ()
    masking: Masking = field(init=False)
    _wishes: Wishes = field(init=False)
    _shares: Sequence[Share] = ()
    _scores: list[Scores] = field(default_factory=list)
    _waiting: _Launched | None = None
    """The last launched step, if its `sample` waits for the result of the step before."""

    def __post_init__(self, masks: Masks) -> None:
        slots = self.model.batch.rows["alive"].shape[0]
        self._wishes, self.masking = Wishes(slots), Masking(self.model.batch.rows, masks)
        self.drafting.weighs = isinstance(self.model, BlockProposer)

    @property
    def trace(self) -> StepTrace:
        """The steps that the watch looks at."""
        return self.watch.trace

    def record(self) -> None:
        """Record every segment, and wait until the device has them. The weights need not be there yet."""
        self._warm_up()
        recorded = getattr(self.pack, "recorded", lambda enqueue: enqueue)
        for key, enqueue in segments(self.model, self.pack, self.buckets, self.readback.rooms).items():
            self.graphs.record(key, recorded(enqueue))
        self.stream.synchronize()
        self.leader.begin(self.graphs.keys())

    def _warm_up(self) -> None:
        """Run the smallest segment of each kind with all rows dead, then clear what these rows wrote into the cache.
        Libraries allocate at first use, so that must happen before a capture, which cannot allocate."""
        tokens = self.buckets.mixed_tokens[0]
        smallest = Buckets((1,), (tokens,), (1,))
        work = segments(self.model, self.pack, smallest)
        work[UPLOAD]()
        if self.stream.device.kind == "cuda":
            for key in (
                ("forward", Shape(tokens, 1, tokens)),
                ("forward", Shape(1, 1, 1)),
                ("sample", 1, 0),
                ("score", 0),
                ("draft", Shape(tokens, 1, tokens), self.buckets.max_drafts),
            ):
                if key in work:
                    work[key]()
            self.model.clear(self.stream)
            self.stream.synchronize()

    def eager(self, pack: Pack | None = None) -> "Runner":
        """A runner over the same model and buffers that launches its ops one by one, on `pack` if one is given. Only
        one of the two may have steps under way. It is not to be closed."""
        graphs = StepGraphs(self.stream.device, self.stream, capture=False)
        other = replace(self, pack=pack or self.pack, graphs=graphs, masks=self.masking.masks)
        for key, enqueue in segments(other.model, other.pack, other.buckets, self.readback.rooms).items():
            graphs.record(key, enqueue)
        return other

    def launch(self, step: Step[Sampling]) -> None:
        """Write the changes of the batch, then put both segments and the read-back on the stream.

        Rows with a constraint need a mask that depends on their last token. While that token is under way only
        `forward` is launched here; `sample` follows when the token has been collected.
        """
        rows, trace = self.model.batch.rows, self.trace
        trace.mark("write rows")
        for slot in step.left:
            rows.set("alive", slot, 0)
        for seq in step.joined:
            self._join(seq)
        self.model.states.join(rows, step.joined)
        for write in step.blocks:
            if self.drafting.layers and write.seq.lease is not None:
                rows.set("reserved", write.seq.slot, write.seq.lease.num_tokens)
            table = self.model.tables[write.group]
            if table is not None:
                rows.write(table, write.seq.slot, write.blocks, offset=write.first)
        changed = step.changed or self.drafting.unsettled
        # Tiers copy a block when its tokens are known, so what layers that draft keep of them must be there by then.
        fills = bool(step.blocks and self.readback.rooms)
        if self.drafting.catches_up(changed or fills):
            # Over the last step's rows, before the device gets the next step's.
            self.replay(("draft", self._shape, 0))
        if changed:
            self._write_batch(step)
        self.drafting.write(rows, step)
        waits = bool(self._constrained and self._launched)
        timed = not waits and not self._shares
        if not waits:
            self.masking.write(self._constrained, step.drafts, {})
        trace.mark("upload")
        forward, choosing = ("forward", self._shape), self.choosing(self._shape)
        self.upload(forward, *(() if waits else (choosing,)))
        trace.launch(step.index, self._bucket, timed, len(step.rows), *self.pace.workload)
        trace.mark("launch")
        self.pace.launch(self._shape, timed=timed)
        self.readback.begin(self.stream)
        self.graphs.launch(forward)
        places = self.drafting.launched(step, self._shape)
        spent = self.drafting.spent(step, self._shape, self._plain)
        asked = self._constrained, self._wants_logprobs, self._shares
        self._launched.append(_Launched(step, self._shape, *asked, places, spent))
        if waits:
            self._waiting = self._launched[-1]
        else:
            self._sample_now(self._launched[-1], choosing)

    def _draft(self, launched: _Launched) -> None:
        """Let layers draft after a step, see its tokens, or keep these for later."""
        if launched.places or not keeps(launched.shape):
            self.replay(("draft", launched.shape, launched.places))
        else:
            self.drafting.unseen += 1

    def upload(self, *following: tuple[object, ...]) -> None:
        """Bring the batch on the device up to date with the host's writes. following: segments that the other ranks
        launch at once and this one later. They come in one message, because each message takes time of this host."""
        rows, in_place = self.model.batch.rows, bool(self.readback.rooms)
        deltas = rows.uploads(self.stream, in_place=in_place)
        for _ in self.leader.tell(deltas, following):
            self.graphs.launch((*UPLOAD, rows.place) if in_place else UPLOAD)

    def replay(self, key: tuple[object, ...]) -> None:
        """Launch a recorded segment, on all ranks."""
        self.leader.launch((key,))
        self.graphs.launch(key)

    def _sample_now(self, launched: _Launched, choosing: tuple[object, ...]) -> None:
        """The second half of a launch, of which `upload` told the other ranks; the rows are still the step's."""
        shape, b = launched.shape, self.model.batch.sampled
        self.graphs.launch(choosing)
        n = shape.rows * (1 + shape.drafts) if shape.drafts else len(launched.step.rows)
        results = [b.result[:n]]
        if launched.wants_logprobs:
            results += [b.top_ids[:n], b.top_values[:n]]
        scored = sum(share.size for share in launched.shares)
        for offset in range(0, scored, b.logits.shape[0]):
            self.replay(("score", offset))  # before layers that draft, which overwrite the hidden states
        drafts_later = self.drafting.layers
        if drafts_later and launched.constrained:  # the next step's masks follow these drafts
            self._draft(launched)
            results.append(self.model.batch.rows["drafts"])
            drafts_later = False
        if launched.shares:
            scores = (b.score_logprobs, b.score_ranks, b.score_top_ids, b.score_top_values)
            results += [tensor[:scored] for tensor in scores]
        if self.readback.rooms:
            self.graphs.launch(("results", self.readback.place))
        self.readback.enqueue(self.stream, results)
        if drafts_later:
            self._draft(launched)

    def choosing(self, shape: Shape) -> tuple[object, ...]:
        """The key of the segment that chooses the tokens of a step of this shape with the rows written last."""
        return ("greedy" if self._greedy else "sample"), shape.rows, shape.drafts

    def collect(self, wait_s: float | None) -> StepResult[Payload] | None:
        """The oldest step's result. Waiting blocks on the device; a step is milliseconds, so wait_s is not a limit."""
        trace = self.trace
        trace.mark("read back")
        arrays = self.readback.take(wait=wait_s is None or wait_s > 0)
        trace.mark("reconcile")
        if arrays is None:
            return None
        seconds = self.readback.seconds
        outlier = self.pace.result(seconds)
        trace.result(seconds or 0.0)
        if outlier is not None:
            trace.keep()
        self.watch.step(seconds, self.pace.last and self.pace.last.predicted_s)
        launched = self._launched.pop(0)
        step, places = launched.step, 1 + launched.shape.drafts
        count = 3 if launched.wants_logprobs else 1
        result, *tops = (array.reshape(places, -1, array.shape[1]) for array in arrays[:count])
        self._scores += read_scores(launched.shares, arrays[-4:])
        counts = accept_tokens(launched.constrained, result)
        if launched.constrained and self.drafting.layers:
            self.masking.proposed = arrays[count].copy()
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            trace.mark("masks")
            # Rows that have ended get no mask; the device skips them.
            alive = [one for one in waiting.constrained if not one[2].ended]
            self.masking.write(alive, waiting.step.drafts, counts)
            choosing = self.choosing(waiting.shape)
            self.upload(choosing)
            self._sample_now(waiting, choosing)
        at, ended = (result[:, :, 1] > RowStatus.RUNNING).nonzero()
        finished = [
            (step.rows[i].seq.slot, FINISH_REASONS[RowStatus(result[place, i, 1])])
            for place, i in zip(at.tolist(), ended.tolist(), strict=True)
        ]
        payload = Payload(result[:, :, 0], result[:, :, 2].view(np.float32), *(tops or (None, None)))
        advanced = self._drafted(step, result) if step.drafts else None
        self.drafting.book(step, launched.shape, launched.spent)
        return StepResult(step.index, finished, payload, advanced, seconds)

    def _drafted(self, step: Step[Sampling], result: Array) -> dict[int, int]:
        """StepResult.advanced of a step with drafts."""
        advanced: dict[int, int] = {}
        counts: defaultdict[bytes | None, Counter[tuple[int, int, int]]] = defaultdict(Counter)
        for seq, places, num_drafts, num_tokens, right in read_verified(step, result):
            seq.owner.drafted.add(num_drafts, right)
            counts[seq.owner.adapter_digest][num_drafts, right, max(num_tokens - 1, 0)] += 1
            if num_tokens <= places:
                advanced[seq.slot] = num_tokens
                self.pace.fall_short(seq.slot, 1 + places - num_tokens)
        for adapter, found in counts.items():
            self.drafting.saw(found, adapter)
        return advanced

    def take_scores(self) -> list[Scores]:
        """Scores of prompts from the steps collected since the last call; a sequence's in the order of its tokens."""
        taken, self._scores = self._scores, []
        return taken

    def _join(self, seq: Seq[Sampling]) -> None:
        rows, slot, sampling = self.model.batch.rows, seq.slot, seq.owner
        if seq.lease is None:
            raise TypeError(f"sequence {seq.id} joined without a lease")
        params, masked = sampling.params, sampling.constraint is not None
        self._wishes.join(slot, sampling)
        if self.drafting.layers:
            rows.write("kept_places", slot, np.full(rows.width("kept_places"), -1, np.int32))
        self.pace.join(slot, seq.lease.num_cached)
        rows.set("alive", slot, 1)
        rows.set("seq_lens", slot, seq.lease.num_cached)
        if self.model.batch.adapters is not None:
            rows.set("adapters", slot, sampling.place)
        if self.buckets.max_drafts:
            rows.set("accepted", slot, 0)
        state = values(
            params,
            seed=sampling.seed,
            stop_ids=sampling.stop_ids,
            prompt=seq.tokens[: seq.prompt_len],
            output=seq.tokens[seq.prompt_len :],
            max_len=seq.max_len,
            vocabulary=self.model.batch.logits.shape[1],
            masked=masked,
        )
        if self.drafting.layers and (masked or "allowed_masks" in state):
            # No mask of a grammar is known yet for the position of a draft.
            everything = np.full(rows.width("draft_masks"), -1, np.int32)
            state["draft_masks"] = state.get("allowed_masks", everything)
        if "allowed_masks" in state:  # one mask for all positions
            state |= {masks_after(1 + n): state["allowed_masks"] for n in range(self.buckets.max_drafts)}
        for name, value in state.items():
            if isinstance(value, np.ndarray):
                rows.write(name, slot, value)
            else:
                rows.set(name, slot, value)

    def _write_batch(self, step: Step[Sampling]) -> None:
        """Write the step's rows and its prompt chunks, and choose the segment that it runs in."""
        count, decoding = len(step.rows), step.num_decode
        chunks = step.rows[decoding:]
        lengths = np.ones(count, np.int32)  # a decode row without drafts has one token
        if step.drafts:
            lengths[:decoding] = [row.num_tokens for row in step.rows[:decoding]]
        lengths[decoding:] = [row.num_tokens for row in chunks]
        starts = np.zeros(count + 1, np.int32)
        lengths.cumsum(out=starts[1:])
        total = int(starts[-1])
        most = self.drafting.level(step, self.model.states.lags)
        self._shape = self.buckets.choose(total, count, drafts=most, chunks=bool(chunks))
        self._plain = self.buckets.choose(total - sum(step.drafts.values()), count) if most else self._shape
        self._bucket, num_rows = str(self._shape), self._shape.rows
        slots, emits = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
        slots[:count] = [row.seq.slot for row in step.rows]
        self.pace.change(slots[:count], lengths)
        emits[:decoding] = 1
        emits[decoding:count] = [row.emits for row in chunks]
        q_starts = np.full(num_rows + 1, total, np.int32)
        q_starts[: count + 1] = starts
        rows, placed = self.model.batch.rows, list(zip(chunks, starts[decoding:].tolist(), strict=False))
        self._wants_logprobs, self._greedy = self._wishes.tops(slots), self._wishes.greedy(slots)
        self._constrained = constrained_rows(step, emits)
        if self._shape.longest > 1:
            self.model.states.chunks(rows, step, num_rows)
        asked = [(row, start, wish) for row, start in placed if (wish := row.seq.owner.score) is not None]
        self._shares = write_scores(rows, self.model.batch.logits.shape[0], asked)
        rows.write("slots", 0, slots)
        rows.write("emits", 0, emits)
        rows.write("q_starts", 0, q_starts)
        if self.buckets.max_drafts:
            drafts = np.zeros(num_rows, np.int32)
            drafts[:decoding] = lengths[:decoding] - 1
            write_verified(rows, q_starts, drafts, self._shape.drafts)
        if self.drafting.layers:
            write_following(rows, num_rows, step)
        rows.write("prompt", 0, fed_ids(placed, self._shape.tokens))

    def close(self) -> None:
        """Wait for what is under way and give everything back but the memory."""
        self.stream.synchronize()
        self.trace.close()
        self.graphs.close()
        self.readback.close()
        self.model.batch.rows.close()
