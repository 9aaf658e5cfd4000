"""Attention as commands: the division of a step's tokens and vectors among a GPU's programs."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Generic

from openinfer.kernels.authoring import (
    CONSUMER_SHARED_BYTES,
    Aligned,
    Arg,
    Launch,
    Scratch,
    T,
    Target,
    aligned,
    expect_bf16,
    launch,
    power_of_two,
    require,
    shared_bytes,
    tensors,
)
from openinfer.recipes.deepseek_v4.ops import PAGE
from openinfer.tensor import Tensor, float16, float32

_ATTEND = "openinfer.recipes.deepseek_v4.device.sparse_attend"
_HOPPER = "openinfer.recipes.deepseek_v4.device.sparse_attend_hopper"

MOST_PARTS = 16
"""The most parts of a token's vectors. The bound is needed because all parts are merged at once."""


@dataclass(frozen=True, slots=True)
class AttendTuning:
    """`block`: vectors at a time. `splits`: parts of a token's vectors. `heads`: of a program. `stages`: the compiler's
    stages; a block ahead takes three of them where entries are selected, and two elsewhere."""

    block: int
    stages: int
    splits: int
    heads: int
    warps: int = 8


@dataclass(frozen=True, slots=True)
class HopperTuning:
    """Tuning of the kernel for Hopper: `stages` blocks of `block` vectors in shared memory, `splits` as above."""

    block: int
    stages: int
    splits: int


HOPPER_BLOCKS = ((32, 4, 1.2), (64, 2, 2.0))
"""Sizes of blocks, how many fit into shared memory beside the queries, and the microseconds that one takes (H200)."""


def hopper_tuning(target: Target, tokens: int, heads: int, vectors: int) -> HopperTuning:
    """The fastest tuning for tokens that see at most `vectors`, with at most one program an SM.

    The constants of `cost` are microseconds, measured on an H200. Merging has a fixed cost, a cost a part, and the cost
    of writing and reading the parts.
    """
    groups = tokens * (heads // 64)
    if target.batch_invariant:
        return HopperTuning(64, 2, 1)

    def cost(choice: tuple[int, int, float, int]) -> float:
        block, _, each, splits = choice
        merging = 2 + (0.1 + 0.012 * groups) * splits if splits > 1 else 0
        return each * -(-vectors // block // splits) + merging

    most = max(1, min(target.num_sms // groups, MOST_PARTS))
    block, stages, _, splits = min(
        (
            (*sizes, splits)
            for sizes in HOPPER_BLOCKS
            for splits in range(1, 1 + min(most, -(-vectors // sizes[0])))
        ),
        key=cost,
    )
    return HopperTuning(block, stages, splits)


def attend_tuning(target: Target, tokens: int, heads: int, vectors: int, *, selected: bool) -> AttendTuning:
    """The tuning for tokens that see at most `vectors`: as many parts as fill the GPU once, with one program an SM."""
    # With the queries and two blocks in shared memory, as the architecture's compiler lays them out.
    block = 64 if target.arch == 90 else 32 if shared_bytes(target.arch) > CONSUMER_SHARED_BYTES else 16
    rows = max(16, min(64, power_of_two(heads)))
    programs, blocks = tokens * -(-heads // rows), -(-vectors // block)
    splits = 1 if target.batch_invariant else max(1, min(target.num_sms // programs, blocks, MOST_PARTS))
    return AttendTuning(block, 4 if selected else 3, splits, rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseAttendArgs(Generic[T]):
    """out[t] = softmax(scale * q'[t] . X, sink) X over the vectors X that token t may see, rotated back.

    Token t is at position p = positions[t] of slot s = token_slots[t] (int32 [T], as expand_rows writes them). It sees
    the raw vectors of positions p - window < j <= p (its own is there already): kv [pages, 128, d], position j at
    kv_tables[s, j // 128], place j mod 128; and entries: none if `entries` is None, all w < (p + 1) // m if `selected`
    is None, or those that selected int32 [T, K] names: the first min(K, (p + 1) // m) of selected[t], in any order,
    each once. entries [pages, E, d] cover m = 128 / E tokens each, entry w at entry_tables[s, w // E], place w mod E.
    kv and entries are one layer, dense within a page, pages at any stride. Every vector is key and value at once, for
    all heads.

    With `block` B the tokens are blocks of B, one of each of R rows, token i of row r being number i R + r, and
    `entries` [T, d] has a vector of each. A token sees those of its row's block, and the raw vectors of the `window`
    positions before the block.

        q' = q / rms(q) of each head (with eps), rounded, its last r channels rotated in pairs (2i, 2i + 1) at
             positions[t], rounded
        p_i = exp(scale * q' . x_i - top);  o = sum of p_i x_i / (sum of p_i + exp(sinks[head] - top))    float32
        out = o rounded, its last r channels rotated at minus positions[t], rounded

    top: the largest of the logits and the sink. Probabilities are rounded to q's dtype before they meet the values; an
    implementation may leave out the roundings of q / rms(q) and of o before the rotations. q [T, A, d] and out [T, A d]
    of the dtype of kv; sinks float32 [A]; cos_sin float32 [P, 2, r / 2]; both tables int32 [S, B]. window is in
    [1, 128]. The output for tokens of slot 0, the padding slot, is finite and otherwise unspecified.
    """

    out: T
    q: T
    kv: T
    entries: T | None
    selected: T | None
    sinks: T
    cos_sin: T
    positions: T
    token_slots: T
    kv_tables: T
    entry_tables: T
    scale: float
    eps: float
    window: int
    block: int = 0

    @property
    def most(self: "SparseAttendArgs[Tensor]") -> int:
        """Entries that a token sees, at most."""
        if self.entries is None or self.block:
            return self.block
        if self.selected is None:
            return self.entry_tables.shape[1] * self.entries.shape[1]
        return self.selected.shape[1]

    @property
    def for_hopper(self: "SparseAttendArgs[Tensor]") -> bool:
        """Whether the kernel for Hopper takes the call: heads of 512 by the 64, pages that are rows of a matrix."""
        _, heads, dim = self.q.shape
        layers = (self.kv, *(() if self.entries is None else (self.entries,)))
        rows = all(layer.strides[0] % dim == 0 for layer in layers) and not self.block
        return heads % 64 == 0 and dim == 512 and self.cos_sin.shape[2] == 32 and rows

    def tuning(self: "SparseAttendArgs[Tensor]", target: Target) -> AttendTuning | HopperTuning:
        tokens, heads, _ = self.q.shape
        vectors = self.window + self.most
        if target.arch == 90 and not target.interpreted and self.for_hopper:
            return hopper_tuning(target, tokens, heads, vectors)
        return attend_tuning(target, tokens, heads, vectors, selected=self.selected is not None)

    def require_kernel(self: "SparseAttendArgs[Tensor]") -> None:
        """Raise ContractError for sizes that the kernel does not take."""
        expect_bf16(self.q, "q")
        dim, rotary = self.q.shape[2], 2 * self.cos_sin.shape[2]
        require(
            dim == power_of_two(dim) and dim >= 64 and rotary <= dim // 4,
            f"heads of {dim}, of which {rotary} channels rotate; on a GPU a power of two from 64, and a quarter",
        )

    def launches(
        self: "SparseAttendArgs[Tensor]", target: Target, tuning: AttendTuning | HopperTuning
    ) -> Iterator[Launch]:
        tokens, heads, dim = self.q.shape
        splits, early = tuning.splits, target.early(tokens)
        # A part is a mean of vectors that were normed: float16 holds it to 11 bits where bfloat16 has 8.
        partial = Scratch((tokens, splits, heads, dim), float16) if splits > 1 else self.out
        weight = Scratch((tokens, splits, heads), float32) if splits > 1 else self.sinks
        entries = self.entries or self.kv
        sees: dict[str, Arg] = {"heads": aligned(heads), "window": self.window, "most": aligned(self.most)}
        constants = {
            "D": dim,
            "PAGE_BITS": PAGE.bit_length() - 1,
            "ENTRY_BITS": -1 if self.most == self.block else entries.shape[1].bit_length() - 1,
            "BN": tuning.block,
            "SPLITS": splits,
        }
        rotary = {"ROTARY": 2 * self.cos_sin.shape[2], "BLOCK": self.block}
        args: dict[str, Arg] = {
            **tensors(replace(self, entries=entries, selected=self.selected or self.token_slots)),
            "partial": partial,
            "weight": weight,
            "kv_width": self.kv_tables.shape[1],
            "entry_width": self.entry_tables.shape[1],
            "kv_stride": Aligned(self.kv.strides[0]),
            "entry_stride": Aligned(entries.strides[0]),
            **sees,
            "scale": self.scale * math.log2(math.e),
            "eps": self.eps,
        }
        chosen = {"SELECTED": self.selected is not None}
        if isinstance(tuning, HopperTuning):
            own = constants | chosen | {"STAGES": tuning.stages}
            grid = (splits, tokens, heads // 64)
            yield launch(_HOPPER, "sparse_attend_hopper", grid, args, own, num_warps=4, early=early)
        else:
            yield launch(
                _ATTEND,
                "sparse_attend",
                (splits, tokens, -(-heads // tuning.heads)),
                args,
                constants | rotary | chosen | {"BM": tuning.heads},
                num_warps=tuning.warps,
                num_stages=tuning.stages,
                early=early,
            )
        if splits > 1:
            block = min(power_of_two(heads), max(1, 16 // power_of_two(splits)))
            args = {"out": self.out, "partial": partial, "weight": weight}
            args |= {**tensors(self, "sinks", "cos_sin", "positions", "token_slots"), **sees}
            yield launch(
                _ATTEND,
                "merge_parts",
                (tokens, -(-heads // block)),
                args,
                constants | rotary | {"HEADS": block},
                num_warps=2 * block,
                early=early,
            )
