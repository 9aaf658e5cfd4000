"""Drafts that layers of the model make, in a segment of their own after the step has sampled.

A drafting layer reads the hidden states of the step's tokens beside the tokens that follow them, and has a cache of its
own. So it must see every token. For more than one draft it reads its own output, one token a row.

While no drafts are made, a launch in every step would cost more than it does. So plain decode steps keep their hidden
states, and the layers write the keys of many tokens a row at once (`catch_up`): before any step of another kind,
and so before drafts are made, and before the rows change.
"""

from typing import Protocol, runtime_checkable

from openinfer.graph.buckets import Shape
from openinfer.graph.runner.batch import StepRows
from openinfer.graph.runner.model import Model
from openinfer.kernels import Pack, keep_states, select_rows, take_states
from openinfer.sampler.gpu import draw_drafts, follow, propose
from openinfer.tensor import Tensor


@runtime_checkable
class Proposer(Protocol):
    """A Model whose layers draft; `hidden` is where they read and leave hidden states."""

    def further(
        self,
        pack: Pack,
        token_ids: Tensor,
        step: StepRows,
        max_q_len: int,
        *,
        first: bool,
        only_keys: bool = False,
    ) -> None:
        """Turn `hidden` of the step's tokens, and the ids that follow them, int32 [T], into the drafting layers' own
        hidden states, in place. first: the states are the model's; else they are those of this method. only_keys: no
        draft follows, so the layers write their keys and values, and `hidden` may have any values afterwards."""

    @property
    def seen(self) -> Tensor:
        """[T, W]: what `further` reads of each token if it is the first."""

    def draft_head(self, pack: Pack, num_rows: int, place: int) -> None:
        """batch.logits[:num_rows] of the drafting layers' states in batch.last[:num_rows]. A BlockProposer completes
        those of draft number `place` (1, 2, ...), which `block` has begun, with the tokens before it in
        next_ids[:num_rows] (Proposals)."""


@runtime_checkable
class BlockProposer(Proposer, Protocol):
    """A Proposer that computes all drafts of a row at once. `further` only writes its keys and values."""

    def block(self, pack: Pack, num_rows: int, places: int) -> None:
        """Begin the logits of `places` drafts of each row of a step that has sampled: draft n of row r stands at
        (n - 1) * num_rows + r. next_ids[:num_rows] (Proposals) gets the tokens that were sampled."""

    @property
    def survival(self) -> Tensor:
        """float32 [R]: the chance that a row's drafts up to the last are right, after `draft_head`."""


def keeps(shape: Shape) -> bool:
    """Whether steps of a shape keep their hidden states where they make no drafts."""
    return shape.longest == 1


def forward(model: Model, pack: Pack, shape: Shape) -> None:
    """The model's forward pass; a plain decode step keeps its hidden states for the layers that draft."""
    model.forward(pack, *shape)
    batch, t = model.batch, shape.tokens
    made = batch.proposals
    if made is None or not keeps(shape):
        return
    step = {"positions": batch.positions[:t], "token_slots": batch.token_slots[:t]}
    kept = {"states": made.states, "ids": made.ids, "places": batch.rows["kept_places"]}
    keep_states(pack, x=_proposer(model).seen[:t], token_ids=batch.token_ids[:t], **step, **kept)


def catch_up(model: Model, pack: Pack, num_rows: int) -> None:
    """Write the drafting layers' keys of each row's kept tokens. It overwrites what `draft` overwrites."""
    batch, proposer = model.batch, _proposer(model)
    made, rows = batch.proposals, batch.rows
    assert made is not None
    kept = made.ids.shape[1]
    at_once = min(num_rows, batch.token_ids.shape[0] // kept)
    for first in range(0, num_rows, at_once):
        slots = rows["slots"][first : min(first + at_once, num_rows)]
        t = slots.shape[0] * kept
        step = batch.step(t, slots.shape[0])
        take_states(
            pack,
            x=proposer.seen[:t],
            next_ids=made.next_ids[:t],
            positions=step["positions"],
            token_slots=step["token_slots"],
            states=made.states,
            ids=made.ids,
            places=rows["kept_places"],
            slots=slots,
            seq_lens=rows["seq_lens"],
            last_tokens=rows["last_tokens"],
        )
        proposer.further(pack, made.next_ids[:t], step, kept, first=True, only_keys=True)


def _proposer(model: Model) -> Proposer:
    if not isinstance(model, Proposer):
        raise TypeError(f"{type(model).__name__} has no layers that draft")
    return model


def draft(model: Model, pack: Pack, shape: Shape, places: int) -> None:
    """Propose `places` tokens for each row of a step that has sampled. With 0 the drafting layers only write keys and
    values, so that their cache stays whole; after a shape that `keeps`, they do so by `catch_up`. It overwrites
    `hidden`, and the step's ids, positions and slots of tokens.
    """
    if keeps(shape) and not places:
        catch_up(model, pack, shape.rows)
        return
    batch, proposer = model.batch, _proposer(model)
    made, rows = batch.proposals, batch.rows
    assert made is not None
    t, r = shape.tokens, shape.rows
    step = batch.step(t, r)
    of_rows = {"slots": step["slots"], "emits": rows["emits"][:r]}
    lens, spans = made.lens, made.spans[: r + 1]
    follow(
        pack,
        next_ids=made.next_ids[:t],
        lens=lens,
        ends=made.ends[: r + 1],
        spans=spans,
        token_ids=batch.token_ids[:t],
        positions=step["positions"],
        q_starts=step["q_starts"],
        num_drafts=rows["num_drafts"][:r],
        accepted=rows["accepted"],
        last_tokens=rows["last_tokens"],
        following=rows["following"][:r],
        **of_rows,
    )
    of_step, blocks = StepRows({**step, "seq_lens": lens}), isinstance(proposer, BlockProposer)
    only_keys = blocks or not places
    proposer.further(pack, made.next_ids[:t], of_step, shape.longest, first=True, only_keys=only_keys)
    if not places:
        return
    sure: dict[str, Tensor] = {}
    if isinstance(proposer, BlockProposer):
        proposer.block(pack, r, places)
        sure = {"survival": proposer.survival[:r], "floor": rows["draft_floor"]}
    else:
        select_rows(pack, out=batch.last[:r], x=model.hidden[:t], q_starts=made.ends[: r + 1])
    alone = StepRows({**batch.step(r, r), "seq_lens": lens, "q_starts": made.alone[: r + 1]})
    for place in range(1, places + 1):
        if place > 1 and not blocks:
            select_rows(pack, out=model.hidden[:r], x=batch.last[:r], q_starts=alone["q_starts"])
            proposer.further(pack, made.next_ids[:r], alone, 1, first=False)
            select_rows(pack, out=batch.last[:r], x=model.hidden[:r], q_starts=alone["q_starts"])
        proposer.draft_head(pack, r, place)
        first = (place - 1) * r if blocks else 0
        propose(
            pack,
            drafts=rows["drafts"],
            next_ids=made.next_ids[:r],
            positions=batch.positions[:r],
            token_slots=batch.token_slots[:r],
            lens=lens,
            spans=spans,
            tokens=draw_drafts(pack, rows, batch.sampled, spans, rows["draft_masks"], first),
            alive=rows["alive"],
            seq_lens=rows["seq_lens"],
            reserved=rows["reserved"],
            place=place,
            **of_rows,
            **sure,
        )
