"""Batch: the rows of a step on the device, and the buffers that every model's step has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from openinfer.graph.rows import Field, Rows
from openinfer.graph.runner.scoring import padded, score_fields
from openinfer.graph.runner.verifying import Proposals, draft_fields, proposal_fields
from openinfer.kernels import (
    Pack,
    expand_rows,
    gather_columns,
    linear_add,
    norm_linear,
    reduce_add,
    select_rows,
)
from openinfer.kernels.formats.linear import Linear, linear_of
from openinfer.kernels.lora.adapters import Adapters
from openinfer.kernels.lora.low_rank import Lora
from openinfer.sampler.gpu import SampleBuffers
from openinfer.sampler.gpu import fields as sampler_fields
from openinfer.scheduler import Row
from openinfer.tensor import Arena, Stream, Tensor, float32, int32, nbytes_of

Array = np.ndarray[Any, Any]


class StepRows(TypedDict):
    """A step's rows and tokens, by the names under which ops take them. T tokens, R rows, S slots, all int32."""

    positions: Tensor
    """[T]: a token's place in its sequence."""
    token_slots: Tensor
    """[T]: the slot of a token's sequence; 0 for padding and for dead rows."""
    slots: Tensor
    """[R]"""
    q_starts: Tensor
    """[R + 1]: where a row's tokens begin."""
    seq_lens: Tensor
    """[S]: tokens of a sequence before the step."""
    alive: Tensor
    """[S]"""


class Read(TypedDict):
    """The input of a product: x [T, H], of which it makes the norm; without a weight x is normalised already."""

    x: Tensor
    norm_weight: Tensor | None
    eps: float | None


@dataclass(frozen=True, slots=True)
class Batch:
    """The buffers that every model's step reads and writes, for at most T tokens and R rows. A smaller step uses the
    first elements. N is R, or R * (1 + max_drafts): a row with drafts has logits at each of its last positions.

    The arena of `allocate` owns the memory; `rows.close()` gives back the host's staging buffers.
    """

    rows: Rows
    token_ids: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]
    token_slots: Tensor  # int32 [T]
    last: Tensor  # [N, W]: the hidden states that logits are made of
    sampled: SampleBuffers
    adapters: Adapters | None = None  # the row field "adapters" has the place of each slot's, 0 for none
    max_drafts: int = 0
    proposals: Proposals | None = None  # None: no layer drafts
    normed: Tensor | None = None  # [T, W]: of several ranks or a mixture, the norm of what was added up
    part: Tensor | None = None  # float32 [N, V / ranks]: of several ranks, the logits of this one's tokens

    @classmethod
    def allocate(
        cls,
        arena: Arena,
        stream: Stream,
        own_fields: Sequence[Field],
        *,
        max_rows: int,
        max_tokens: int,
        vocab_size: int,
        width: int,
        dtype: np.dtype[Any],
        adapters: Adapters | None = None,
        max_drafts: int = 0,
        proposes: bool = False,
        ranks: int = 1,
        adds: bool = True,
        mixture: bool = False,
        seen: int | None = None,
    ) -> "Batch":
        """own_fields: row fields of the model, block tables among them. width, dtype: of a token's hidden states.
        max_drafts: of a row; 0: the fields of drafts do not exist. proposes: layers of the model make the drafts.
        adds: whether several ranks add up hidden states by `add`. mixture: several products read the norm that follows
        an `add`, so that one rank makes it once, too. seen: the width of what layers that draft read of a token; None:
        that of its hidden states."""
        logits = max_rows * (1 + max_drafts)
        fields = row_fields(max_rows, max_tokens, vocab_size, logits)
        fields += draft_fields(max_rows, max_drafts, vocab_size, proposes) + list(own_fields)
        fields += [Field("adapters", (max_rows + 1,))] if adapters else []
        fields += proposal_fields(max_rows, max_tokens, vocab_size) if proposes else []
        return cls(
            Rows(arena, fields, stream),
            token_ids=arena.alloc((max_tokens,), int32),
            positions=arena.alloc((max_tokens,), int32),
            token_slots=arena.alloc((max_tokens,), int32),
            last=arena.alloc((logits, width), dtype),
            sampled=SampleBuffers.allocate(
                arena, max_rows, padded(max_tokens, logits), vocab_size, max_drafts
            ),
            adapters=adapters,
            max_drafts=max_drafts,
            proposals=Proposals.allocate(
                arena, stream, max_rows, max_tokens, width=seen or width, dtype=dtype
            )
            if proposes
            else None,
            normed=arena.alloc((max_tokens, width), dtype) if (ranks > 1 and adds) or mixture else None,
            part=arena.alloc((logits, vocab_size // ranks), float32) if ranks > 1 else None,
        )

    @property
    def logits(self) -> Tensor:
        """float32 [N, V]: of each row's last token, then of the tokens after it (sampler.gpu.verify_rows)."""
        return self.sampled.logits

    @property
    def nbytes(self) -> int:
        """Device memory of the buffers, the rows aside."""
        parts = (self, self.sampled, self.proposals)
        return sum(nbytes_of(part) for part in parts if part is not None)

    def step(self, num_tokens: int, num_rows: int) -> StepRows:
        """The rows and tokens of a step, after `expand`."""
        return StepRows(
            positions=self.positions[:num_tokens],
            token_slots=self.token_slots[:num_tokens],
            slots=self.rows["slots"][:num_rows],
            q_starts=self.rows["q_starts"][: num_rows + 1],
            seq_lens=self.rows["seq_lens"],
            alive=self.rows["alive"],
        )

    def adapted(self, weight: Linear[Tensor] | Tensor, num_tokens: int) -> Lora[Tensor] | None:
        """What each row's adapter adds to a product with `weight`, after `expand`; None without adapters."""
        if self.adapters is None:
            return None
        return self.adapters.of(
            linear_of(weight).weight, self.rows["adapters"], self.token_slots[:num_tokens]
        )

    def add(
        self,
        pack: Pack,
        x: Tensor,
        *,
        h: Tensor,
        weight: Linear[Tensor] | Tensor,
        ranks: int = 1,
        norm: Tensor | None = None,
        eps: float | None = None,
    ) -> Read:
        """x += h @ weight^T and what each row's adapter adds to it (linear_add); the sum of all ranks. The result is
        for a product of the norm of x, which several ranks make with their sum, and mixtures for several products."""
        lora = self.adapted(weight, x.shape[0])
        if self.normed is None:
            linear_add(pack, x=x, h=h, weight=weight, lora=lora)
            return Read(x=x, norm_weight=norm, eps=eps)
        normed = self.normed[: x.shape[0]] if norm is not None else None
        linear_add(
            pack, x=x, h=h, weight=weight, lora=lora, ranks=ranks,
            normed=normed, norm_weight=norm, eps=eps if norm is not None else None,
        )  # fmt: skip
        return Read(x=x if normed is None else normed, norm_weight=None, eps=None)

    def add_sum(
        self, pack: Pack, x: Tensor, *, y: Tensor, ranks: int, norm: Tensor | None, eps: float
    ) -> Read:
        """x += the sum of the y of all ranks, where one rank has its y in x already. The result is that of `add`."""
        if ranks == 1 or self.normed is None:
            return Read(x=x, norm_weight=norm, eps=eps)
        if norm is None:
            reduce_add(pack, x=x, y=y, ranks=ranks)
            return Read(x=x, norm_weight=None, eps=None)
        normed = self.normed[: x.shape[0]]
        reduce_add(pack, x=x, y=y, ranks=ranks, normed=normed, norm_weight=norm, eps=eps)
        return Read(x=normed, norm_weight=None, eps=None)

    def expand(self, pack: Pack, num_tokens: int, num_rows: int) -> Tensor:
        """Write id, position and slot of each token of the step; every forward pass begins so. The ids, int32 [T]."""
        token_ids = self.token_ids[:num_tokens]
        expand_rows(
            pack,
            token_ids=token_ids,
            prompt=self.rows["prompt"][:num_tokens],
            last_tokens=self.rows["last_tokens"],
            **self.step(num_tokens, num_rows),
            drafts=self.rows["drafts"] if self.max_drafts else None,
        )
        return token_ids

    def select(self, pack: Pack, x: Tensor, num_rows: int, num_drafts: int) -> int:
        """Take from x [T, W] the hidden states that the step's logits are made of into `last`; every forward pass ends
        so, with `head`. Returns their number. num_drafts: the most drafts of a row; 0: each row has its last token."""
        count = num_rows * (1 + num_drafts)
        ends = self.rows["sampled_ends" if num_drafts else "q_starts"][: count + 1]
        select_rows(pack, out=self.last[:count], x=x, q_starts=ends)
        return count

    def head(
        self, pack: Pack, x: Tensor, *, norm: Tensor, eps: float, weight: Linear[Tensor] | Tensor
    ) -> None:
        """The first logits: x [r, H], normalised, times a weight [V, H] (norm_linear). Several ranks have V / ranks
        rows of it each, and get the logits of all."""
        logits = self.logits[: x.shape[0]]
        own = logits if self.part is None else self.part[: x.shape[0]]
        norm_linear(pack, out=own, x=x, norm_weight=norm, eps=eps, weight=weight)
        if self.part is not None:
            gather_columns(pack, out=logits, x=own, ranks=logits.shape[1] // own.shape[1])


def row_fields(max_rows: int, max_tokens: int, vocab_size: int, logits: int) -> list[Field]:
    """The fields of every model's batch. By slot (0 is padding): the state of a sequence, the sampler's among it. By
    row: the sequences of the step. By token: ids that prompt chunks bring, -1 where the token sampled last is fed;
    and what is asked about prompts. `logits`: rows of the buffer of logits."""
    slots = max_rows + 1
    return [
        Field("alive", (slots,), device_written=True),
        Field("seq_lens", (slots,), device_written=True),
        Field("last_tokens", (slots,), device_written=True),
        *[Field(f.name, (slots, *f.shape), f.dtype, f.device_written) for f in sampler_fields(vocab_size)],
        Field("slots", (max_rows,)),
        Field("q_starts", (max_rows + 1,)),
        Field("emits", (max_rows,)),
        Field("prompt", (max_tokens,)),
        *score_fields(logits, max_tokens),
    ]


def fed_ids(placed: Sequence[tuple[Row[Any], int]], num_tokens: int) -> Array:
    """The ids that chunks bring, int32 [num_tokens]; -1 where the token sampled last is fed."""
    prompt = np.full(num_tokens, -1, np.int32)
    for row, start in placed:
        if row.start is not None:
            prompt[start : start + row.num_tokens] = row.seq.tokens[row.start : row.start + row.num_tokens]
    return prompt
