"""Judges the choices of the indexer and of the router, by scores in float64.

A chosen entry or expert must be all but tied with every better one that was not chosen. Another entry or expert moves a
position by more than rounding does, so the logits there cannot be compared with a reference's. The choices themselves
need no reference: the inputs of the op give the scores, and the scores tell which choices are right.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from openinfer.kernels.authoring import Op, Pack, f32, hadamard, q4, rotated_pairs, rounded
from openinfer.recipes.engine.engine import Engine
from openinfer.recipes.engine.forced import Forced
from openinfer.recipes.engine.routing import chosen
from openinfer.recipes.engine.verdict import Reference
from openinfer.tensor import Stream, Tensor

Array = np.ndarray[Any, Any]

NEAR, NEAR_ROUNDED = 0.002, 0.02
"""The limits of Choices.shortfall, in standard deviations of the scores.

NEAR: the effect of a last bit of bf16 in a query. NEAR_ROUNDED: the effect of an FP4 code that flips."""


@dataclass(slots=True)
class Choices:
    """The choices of one op in several steps.

    chosen: the number of choices. others: those that are not among the best in float64. shortfall: how much lower the
    worst of them scores than the last of the best, in standard deviations of the scores. near: its limit.
    """

    path: str
    near: float
    chosen: int = 0
    others: int = 0
    shortfall: float = 0.0

    @property
    def passed(self) -> bool:
        return self.chosen > 0 and self.shortfall <= self.near

    def take(self, scores: Array, got: Array, count: int) -> None:
        """Judge the choices `got` of one token, which should be the `count` candidates with the highest scores."""
        right = np.argsort(-scores, kind="stable")[:count]
        wrong = np.setdiff1d(got, right)
        self.chosen += len(got)
        self.others += len(wrong)
        if len(set(got.tolist())) != count:
            self.shortfall = np.inf
        elif len(wrong):
            short = (scores[right[-1]] - scores[wrong].min()) / max(float(scores.std()), 1e-30)
            self.shortfall = max(self.shortfall, float(short))

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}

    def __str__(self) -> str:
        return (
            f"{'pass' if self.passed else 'FAIL'} {self.path:28s} {self.chosen} chosen, "
            f"{self.others} not among the best, "
            f"short by {self.shortfall:.5f} (<= {self.near}) of the scores' deviation"
        )


def choices(engine: Engine, reference: Reference, *, quantized: bool, steps: int = 4) -> Iterator[Choices]:
    """The indexer's and the router's choices in a prompt's chunks and in a few decode steps after it."""
    witness = Witness(engine.runner.pack, engine.runner.stream, quantized=quantized)
    forced = Forced(engine, engine.runner.eager(witness))
    row = forced.join(1, reference.tokens)
    forced.feed(row, reference.first, engine.runner.buckets.max_tokens)
    for _ in range(steps):
        forced.step([(row, 1)])
    forced.leave()
    yield from (witness.entries, witness.experts)


class Witness:
    """A pack that runs another and judges the choices of the last `tokens` tokens of every step."""

    def __init__(self, inner: Pack, stream: Stream, *, quantized: bool, tokens: int = 4) -> None:
        self._inner, self._stream, self._tokens = inner, stream, tokens
        self.entries = Choices("choices of the indexer", NEAR_ROUNDED if quantized else NEAR)
        self.experts = Choices("choices of the router", NEAR)

    def run(self, op: Op[Any], args: Any) -> None:
        routed = chosen(self._inner, self._stream, op, args) if op.name == "route" else None
        self._inner.run(op, args)
        if op.name not in ("index_topk", "route"):
            return
        self._stream.synchronize()
        live = np.flatnonzero(args.token_slots.numpy())[-self._tokens :]
        if op.name == "index_topk":
            for scores, got in _of_indexer(args, live):
                self.entries.take(scores, got, min(len(scores), args.selected.shape[1]))
        elif args.bias is not None and routed is not None:
            logits = _rows(args.logits, live).astype(np.float64)
            scores = np.sqrt(np.logaddexp(0, logits)) + args.bias.numpy()
            for of_token, got in zip(scores, routed[live], strict=True):
                self.experts.take(of_token, got, args.expert_ids.shape[1])


def _rows(tensor: Tensor, rows: Sequence[int] | Array) -> Array:
    """Rows of a tensor, on the host. The tensor may be a view that is not contiguous."""
    return np.stack([tensor[int(row)].numpy() for row in rows])


def _of_indexer(args: Any, tokens: Array) -> Iterator[tuple[Array, Array]]:
    """For each token: the scores of the entries that it sees, and the entries that it got."""
    keys, positions = args.keys, args.positions.numpy()
    per_page = keys.shape[1]
    for token in tokens:
        sees = int(positions[token] + 1) // args.window
        if not sees:
            continue
        table = args.block_tables[int(args.token_slots.numpy()[token])].numpy()
        held = f32(_rows(keys, table[: -(-sees // per_page)])).reshape(-1, keys.shape[2])[:sees]
        q = f32(_rows(args.q, [token]))
        turn = args.cos_sin[int(positions[token])].numpy()[None]
        query = rounded(rotated_pairs(q, turn, np.zeros(1, np.int32)), args.q.dtype)[0]
        if args.quantized:
            query = q4(rounded(hadamard(query), args.q.dtype))
        weights = _rows(args.weights, [token])[0].astype(np.float64)
        scores = weights @ np.maximum(query.astype(np.float64) @ held.T.astype(np.float64), 0)
        got = args.selected[int(token)].numpy()
        yield scores, got[got >= 0]
