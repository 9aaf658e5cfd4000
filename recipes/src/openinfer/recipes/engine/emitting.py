"""The rows of a step that get a token, kept from step to step; and log-probabilities of tokens."""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

from openinfer.frontend.contract import PromptLogprobs, StepOutputs, TokenLogprobs
from openinfer.graph.runner import Payload, Sampling
from openinfer.scheduler import Row, Seq, Tokens


class Emitting(NamedTuple):
    """The rows that get a token in a step, kept while the batch does not change.

    A steady step then makes one call a row: the row's entry of `appends` puts the token into the scheduler's sequence.
    """

    rows: Sequence[Row[Sampling]]
    positions: list[int]
    ids: list[int]
    appends: list[Callable[[int], None]]
    wants_logprobs: bool

    @classmethod
    def of(cls, event: Tokens[Sampling, Payload]) -> "Emitting":
        emitting = list(event.emitting())
        seqs = [seq for _, seq in emitting]
        return cls(
            event.rows,
            [position for position, _ in emitting],
            [seq.id for seq in seqs],
            [seq.tokens.append for seq in seqs],
            any(seq.owner.params.logprobs is not None for seq in seqs),
        )


NO_ROWS = Emitting((), [], [], [], False)


def put_drafted(outputs: StepOutputs, event: Tokens[Sampling, Payload], payload: Payload) -> int:
    """Put out the tokens of a step in which rows had drafts: several a row, in order. Returns their number."""
    counted = ((position, seq, event.num_tokens(position)) for position, seq in event.emitting())
    places = [(place, position, seq) for position, seq, count in counted for place in range(count)]
    token_ids = payload.token_ids.tolist()
    for place, position, seq in places:
        token = token_ids[place][position]
        seq.tokens.append(token)
        outputs.request_ids.append(seq.id)
        outputs.token_ids.append(token)
    if outputs.logprobs is not None or any(seq.owner.params.logprobs is not None for _, _, seq in places):
        put_logprobs(outputs, payload, places)
    return len(places)


def put_logprobs(
    outputs: StepOutputs, payload: Payload, places: Iterable[tuple[int, int, Seq[Sampling]]]
) -> None:
    """Add an entry for each of the last tokens of `outputs`, which stand at these (place, row) of the payload. The
    entry is None where the request did not ask."""
    entries: list[TokenLogprobs | None] = []
    for place, row, seq in places:
        count = seq.owner.params.logprobs
        if count is None:
            entries.append(None)
            continue
        ids: list[int] = []
        values: list[float] = []
        if count and payload.top_ids is not None and payload.top_logprobs is not None:
            ids = payload.top_ids[place, row, :count].tolist()
            values = payload.top_logprobs[place, row, :count].tolist()
        entries.append(TokenLogprobs(float(payload.logprobs[place, row]), ids, values))
    outputs.logprobs = (outputs.logprobs or [None] * (len(outputs.token_ids) - len(entries))) + entries


def put_prompt_logprobs(outputs: StepOutputs, scores: Iterable[Any], live: Container[int]) -> None:
    """Put out the prompt logprobs that are ready, of requests in `live` (ids). scores: of Runner.take_scores."""
    for seq, *columns in scores:
        if seq.id in live:
            logprobs, ranks, top_ids, top_logprobs = (column.tolist() for column in columns)
            entries = map(TokenLogprobs, logprobs, top_ids, top_logprobs, ranks)
            outputs.prompt_logprobs.append(PromptLogprobs(seq.id, list(entries)))
