"""Routing flips of mixtures, counted apart.

Near a tie the last bit of a router's logit decides which expert a token gets. Another expert moves the token's logits
further than rounding does. So the positions whose experts agree with the reference's in every mixture are judged apart,
like positions of a dense model. Their limits come from the positions where the reference's own two runs agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from openinfer.kernels import Op, Pack
from openinfer.recipes.engine.verdict import Reference, Verdict, judge, limits
from openinfer.tensor import Stream

Array = np.ndarray[Any, Any]

ROUTERS = ("route", "route_topk")
"""Ops that choose experts; both write `expert_ids`."""


def chosen(pack: Pack, stream: Stream, op: Op[Any], args: Any) -> Array:
    """The experts of a router's call, those of other ranks too. The caller runs the call itself afterwards, and that
    alone changes a shared expert's layer."""
    gated = {"shared": None, "gate": None} if op.name == "route_topk" else {}
    pack.run(op, replace(args, first_expert=0, num_experts=args.logits.shape[1], **gated))
    stream.synchronize()
    return np.array(args.expert_ids.numpy())


class Recorder:
    """A pack that runs another and keeps the experts of every router's call."""

    def __init__(self, inner: Pack, stream: Stream) -> None:
        self._inner, self._stream = inner, stream
        self.calls: list[Array] = []

    def run(self, op: Op[Any], args: Any) -> None:
        if op.name in ROUTERS:
            self.calls.append(chosen(self._inner, self._stream, op, args))
        self._inner.run(op, args)

    def experts(self, sequences: Sequence[Reference]) -> list[Array]:
        """The experts [P, mixtures, chosen], ascending, at the compared positions of each sequence. The steps before
        were these positions, all sequences together, one token a step."""
        steps = max(len(s.top_ids) for s in sequences)
        (mixtures,) = {s.experts["bf16"].shape[1] for s in sequences}
        calls = self.calls[-steps * mixtures :]
        found: list[list[Array]] = [[] for _ in sequences]
        for step in range(steps):
            live = [n for n, s in enumerate(sequences) if step < len(s.top_ids)]
            layers = calls[step * mixtures : (step + 1) * mixtures]
            for row, n in enumerate(live):
                found[n].append(np.sort([ids[row] for ids in layers], -1))
        return [np.stack(rows) for rows in found]


@dataclass(frozen=True, slots=True)
class Routed:
    """The verdict on the positions whose experts are the reference's. `agree`: the share of these positions; `own`: the
    share of positions at which the reference's bf16 and float32 runs chose the same experts."""

    verdict: Verdict | None
    agree: float
    own: float
    path: str = "experts as the reference's"

    @property
    def passed(self) -> bool:
        return self.verdict is not None and self.verdict.passed

    def as_dict(self) -> dict[str, Any]:
        judged = self.verdict.as_dict() if self.verdict else {"passed": False, "positions": 0}
        return {**judged, "path": self.path, "agree": self.agree, "own": self.own}

    def __str__(self) -> str:
        own = f"the reference's own runs: {self.own:.1%}"
        shares = f"experts agree at {self.agree:.1%} of the positions ({own})"
        judged = str(replace(self.verdict, path=self.path)) if self.verdict else f"FAIL {self.path}"
        return f"{judged}; {shares}"


def routed(sequences: Sequence[Reference], found: Sequence[Array], experts: Sequence[Array]) -> Routed:
    """Judge a run by the positions at which it chose the reference's experts. found: as for `judge`; experts: of each
    sequence, [P, mixtures, chosen], ascending."""
    same = [_same(s.experts["bf16"], ids) for s, ids in zip(sequences, experts, strict=True)]
    own = [_same(s.experts["bf16"], s.experts["fp32"]) for s in sequences]
    agree, own_share = (float(np.concatenate(masks).mean()) for masks in (same, own))
    if not agree or not own_share:
        return Routed(None, agree, own_share)
    allowed = limits([_at(s, mask) for s, mask in zip(sequences, own, strict=True)])
    judged = [_at(s, mask) for s, mask in zip(sequences, same, strict=True)]
    rows = [rows[mask] for rows, mask in zip(found, same, strict=True)]
    return Routed(judge("", allowed, judged, rows), agree, own_share)


def _same(a: Array, b: Array) -> Array:
    return np.asarray((a == b).all((1, 2)))


def _at(reference: Reference, mask: Array) -> Reference:
    return replace(
        reference, top_ids=reference.top_ids[mask], bf16=reference.bf16[mask], fp32=reference.fp32[mask]
    )
