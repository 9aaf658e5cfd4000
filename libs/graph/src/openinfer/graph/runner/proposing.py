"""Drafts that layers of the model make, in a segment of their own after the step has sampled.

A drafting layer reads the hidden states of the step's tokens beside the tokens that follow them, and has a cache of its
own. So it runs in every step. For more than one draft it reads its own output, one token a row.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from openinfer.graph.buckets import Shape
from openinfer.graph.runner.batch import StepRows
from openinfer.graph.runner.model import Model
from openinfer.kernels import Pack, select_rows
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

    def draft_head(self, pack: Pack, num_rows: int) -> None:
        """batch.logits[:num_rows] of the drafting layers' states in batch.last[:num_rows]."""


def draft(model: Model, pack: Pack, shape: Shape, places: int) -> None:
    """Propose `places` tokens for each row of a step that has sampled. With 0 the drafting layers only write keys and
    values, so that their cache stays whole. It overwrites `hidden`, and the step's ids, positions and slots of tokens.
    """
    batch = model.batch
    made, rows = batch.proposals, batch.rows
    if made is None or not isinstance(model, Proposer):
        raise TypeError(f"{type(model).__name__} has no layers that draft")
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
    of_step = StepRows({**step, "seq_lens": lens})
    model.further(pack, made.next_ids[:t], of_step, shape.longest, first=True, only_keys=not places)
    if not places:
        return
    select_rows(pack, out=batch.last[:r], x=model.hidden[:t], q_starts=made.ends[: r + 1])
    alone = StepRows({**batch.step(r, r), "seq_lens": lens, "q_starts": made.alone[: r + 1]})
    for place in range(1, places + 1):
        if place > 1:
            select_rows(pack, out=model.hidden[:r], x=batch.last[:r], q_starts=alone["q_starts"])
            model.further(pack, made.next_ids[:r], alone, 1, first=False)
            select_rows(pack, out=batch.last[:r], x=model.hidden[:r], q_starts=alone["q_starts"])
        model.draft_head(pack, r)
        propose(
            pack,
            drafts=rows["drafts"],
            next_ids=made.next_ids[:r],
            positions=batch.positions[:r],
            token_slots=batch.token_slots[:r],
            lens=lens,
            spans=spans,
            tokens=draw_drafts(pack, rows, batch.sampled, spans, made.all_allowed),
            alive=rows["alive"],
            seq_lens=rows["seq_lens"],
            reserved=rows["reserved"],
            place=place,
            **of_rows,
        )
