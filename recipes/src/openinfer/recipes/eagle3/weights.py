"""The weights of an EAGLE-3 head: their places, and their names in its checkpoint."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer.kernels.authoring import LinearPlaces, WeightPart
from openinfer.recipes.eagle3.config import READ, Head, TargetConfig
from openinfer.tensor import Arena, Checkpoint, Device, Stream, Tensor, float32, int32, int64

AT = "midlayer."


@dataclass(frozen=True, slots=True)
class Weights:
    """A rank's weights of a head: its heads, its part of the MLP, and all else whole. qkv and fc take two and three
    hidden states; each has its own columns. sources int32 [V]: the row of lm_head of a token, -1 where it has none."""

    fc: tuple[Tensor, ...]  # [H, H] each
    input_norm: Tensor  # [H], of the embedding
    hidden_norm: Tensor  # float32 [H]
    of_embedding: Tensor  # [(A + 2 G) d, H]
    of_hidden: Tensor  # [(A + 2 G) d, H]
    o: Tensor  # [H, A d]
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2 I, H]
    down: Tensor  # [H, I]
    norm: Tensor  # [H]
    lm_head: Tensor  # [D, H]
    sources: Tensor
    places: LinearPlaces

    @classmethod
    def allocate(cls, head: Head, target: TargetConfig, arena: Arena, dtype: np.dtype[Any]) -> "Weights":
        """Uninitialised weights in `arena`."""
        p, h, vocab, rank = (
            LinearPlaces(arena, dtype),
            target.hidden_size,
            target.vocab_size,
            target.part.rank,
        )
        q, kv, inter = head.sizes(target)
        first = target.part.first(target.num_kv_heads) * target.head_dim
        sizes = (("q_proj", q, rank * q), ("k_proj", kv, first), ("v_proj", kv, first))

        def part(name: str, rows: int, row: int = 0, column: int = 0) -> WeightPart:
            return WeightPart(name, rows, row, column)

        def qkv(column: int) -> Tensor:
            return p.linear(
                *(part(f"{AT}self_attn.{n}", rows, row, column) for n, rows, row in sizes), columns=h
            ).weight

        def sources(offsets: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            found, rows = np.full(vocab, -1, np.int32), np.arange(head.draft_vocab_size)
            ids = rows + offsets
            if len(set(ids.tolist())) != len(rows) or ids.min() < 0 or ids.max() >= vocab:
                raise ValueError(f"its ids must be distinct and below {vocab}")
            found[ids] = rows
            return found

        gate_up = (part(f"{AT}mlp.{name}_proj", inter, rank * inter) for name in ("gate", "up"))
        return cls(
            fc=tuple(p.linear(part("fc", h, 0, n * h), columns=h).weight for n in range(READ)),
            input_norm=p.plain(f"{AT}input_layernorm.weight", h),
            hidden_norm=p.plain(f"{AT}hidden_norm.weight", h, dtype=float32),
            of_embedding=qkv(0),
            of_hidden=qkv(h),
            o=p.linear(part(f"{AT}self_attn.o_proj", h, 0, rank * q), columns=q).weight,
            post_norm=p.plain(f"{AT}post_attention_layernorm.weight", h),
            gate_up=p.linear(*gate_up, columns=h).weight,
            down=p.linear(part(f"{AT}mlp.down_proj", h, 0, rank * inter), columns=inter).weight,
            norm=p.plain("norm.weight", h),
            lm_head=p.plain("lm_head.weight", head.draft_vocab_size, h),
            sources=p.converted("d2t", vocab, convert=sources, dtype=int32),
            places=p,
        )

    def load(self, head: Head, target: TargetConfig, stream: Stream) -> None:
        """Fill the weights from the head's folder. target: the whole model's. Raises CheckpointError."""
        whole = Weights.allocate(head, target, Arena(Device("null"), None), self.norm.dtype)
        expected = whole.places.expected() | {"d2t": ((head.draft_vocab_size,), (int32, int64))}
        with Checkpoint(head.path) as checkpoint:
            checkpoint.require(expected, ignore=("*",))  # a head may have tensors that other servers use
            self.places.load(checkpoint, stream)
