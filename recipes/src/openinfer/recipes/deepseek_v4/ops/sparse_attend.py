"""sparse_attend: attention over a window of raw vectors and chosen compressed entries, with sinks."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Generic

import numpy as np

from openinfer.kernels import authoring as op
from openinfer.kernels.authoring import Arg, Array, Command, Cost, Launch, Op, Scratch, T, Target, Workload
from openinfer.recipes.deepseek_v4.ops import PAGE
from openinfer.tensor import Tensor, float16, float32, int32

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
    choices = ((*s, n) for s in HOPPER_BLOCKS for n in range(1, 1 + min(most, -(-vectors // s[0]))))
    block, stages, _, splits = min(choices, key=cost)
    return HopperTuning(block, stages, splits)


def attend_tuning(target: Target, tokens: int, heads: int, vectors: int, *, selected: bool) -> AttendTuning:
    """The tuning for tokens that see at most `vectors`: as many parts as fill the GPU once, with one program an SM."""
    # With the queries and two blocks in shared memory, as the architecture's compiler lays them out.
    block = 64 if target.arch == 90 else 32 if op.shared_bytes(target.arch) > op.CONSUMER_SHARED_BYTES else 16
    rows = max(16, min(64, op.power_of_two(heads)))
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

    def launches(
        self: "SparseAttendArgs[Tensor]", target: Target, tuning: AttendTuning | HopperTuning
    ) -> Iterator[Launch]:
        tokens, heads, dim = self.q.shape
        splits, early = tuning.splits, target.early(tokens)
        # A part is a mean of vectors that were normed: float16 holds it to 11 bits where bfloat16 has 8.
        partial = Scratch((tokens, splits, heads, dim), float16) if splits > 1 else self.out
        weight = Scratch((tokens, splits, heads), float32) if splits > 1 else self.sinks
        entries = self.entries or self.kv
        every = replace(self, entries=entries, selected=self.selected or self.token_slots)
        sees: dict[str, Arg] = {
            "heads": op.aligned(heads),
            "window": self.window,
            "most": op.aligned(self.most),
        }
        args: dict[str, Arg] = {**op.tensors(every), "partial": partial, "weight": weight}
        args |= {"kv_width": self.kv_tables.shape[1], "entry_width": self.entry_tables.shape[1]}
        args |= {"kv_stride": op.Aligned(self.kv.strides[0]), "entry_stride": op.Aligned(entries.strides[0])}
        args |= {**sees, "scale": self.scale * math.log2(math.e), "eps": self.eps}
        constants = {"D": dim, "PAGE_BITS": PAGE.bit_length() - 1, "BN": tuning.block, "SPLITS": splits}
        constants["ENTRY_BITS"] = -1 if self.most == self.block else entries.shape[1].bit_length() - 1
        rotary = {"ROTARY": 2 * self.cos_sin.shape[2], "BLOCK": self.block}
        own = constants | {"SELECTED": self.selected is not None}
        if isinstance(tuning, HopperTuning):
            own, grid = own | {"STAGES": tuning.stages}, (splits, tokens, heads // 64)
            yield op.launch(_HOPPER, "sparse_attend_hopper", grid, args, own, num_warps=4, early=early)
        else:
            grid, stages = (splits, tokens, -(-heads // tuning.heads)), tuning.stages
            own |= {**rotary, "BM": tuning.heads}
            yield op.launch(
                _ATTEND, "sparse_attend", grid, args, own, num_warps=8, num_stages=stages, early=early
            )
        if splits > 1:
            block = min(op.power_of_two(heads), max(1, 16 // op.power_of_two(splits)))
            args = {"out": self.out, "partial": partial, "weight": weight}
            args |= {**op.tensors(self, "sinks", "cos_sin", "positions", "token_slots"), **sees}
            merge, own = (tokens, -(-heads // block)), constants | rotary | {"HEADS": block}
            yield op.launch(_ATTEND, "merge_parts", merge, args, own, num_warps=2 * block, early=early)


def _check(a: SparseAttendArgs[Tensor]) -> None:
    op.expect("q", a.q, (-1, -1, -1), *op.FLOATS)
    tokens, heads, dim = a.q.shape
    op.expect("out", a.out, (tokens, heads * dim), a.q.dtype)
    op.expect_columns("kv", a.kv, (-1, PAGE, dim), a.q.dtype)
    if a.block and a.entries is not None:
        op.require(a.selected is None, "a block has its entries, of which none are selected")
        op.require(tokens % a.block == 0, f"{tokens} tokens cannot be divided into blocks of {a.block}")
        op.expect("entries", a.entries, (tokens, dim), a.q.dtype)
    elif a.entries is not None:
        op.expect_columns("entries", a.entries, (-1, -1, dim), a.q.dtype)
        per_page = a.entries.shape[1]
        op.require(PAGE % per_page == 0, f"entries has {per_page} a page; that must divide {PAGE}")
    if a.selected is not None:
        op.require(a.entries is not None, "selected is given, and no entries to select from")
        op.expect("selected", a.selected, (tokens, -1), int32)
    op.expect("sinks", a.sinks, (heads,), float32)
    op.expect_cos_sin(a.cos_sin, dim)
    op.expect_each(a, (tokens,), int32, "positions", "token_slots")
    op.expect("kv_tables", a.kv_tables, (-1, -1), int32)
    op.expect("entry_tables", a.entry_tables, (a.kv_tables.shape[0], -1), int32)
    op.require(a.scale > 0, f"scale is {a.scale}; it must be positive")
    op.require(a.eps > 0, f"eps is {a.eps}; it must be positive")
    op.require(not a.block or a.entries is not None, "a block has entries")
    op.require(1 <= a.window <= PAGE, f"window is {a.window}; it must be in [1, {PAGE}]")


def _reference(a: SparseAttendArgs[Array]) -> None:
    dtype = a.q.dtype
    unit = op.f32(op.rms_norm(a.q, np.ones(a.q.shape[2], np.float32), a.eps))
    turned = op.rounded(op.rotated_pairs(unit, a.cos_sin, a.positions), dtype)
    o = np.zeros_like(turned)
    for token in np.flatnonzero(a.token_slots):
        # One query at a time: the result must not depend on the chunk.
        slot, p = a.token_slots[token], int(a.positions[token])
        rows = len(o) // a.block if a.block else 1
        end = int(a.positions[token % rows]) if a.block else p + 1
        position = np.arange(max(0, end - a.window), end)
        parts = [op.f32(a.kv[a.kv_tables[slot, position // PAGE], position % PAGE])]
        if a.block and a.entries is not None:
            parts.append(op.f32(a.entries[token % rows :: rows]))
        elif a.entries is not None:
            per_page = a.entries.shape[1]
            w = np.arange((p + 1) // (PAGE // per_page))
            if a.selected is not None:
                w = a.selected[token, : len(w)]
            parts.append(op.f32(a.entries[a.entry_tables[slot, w // per_page], w % per_page]))
        keys = np.concatenate(parts)
        logits = (turned[token] @ keys.T) * np.float32(a.scale)
        top = np.maximum(logits.max(axis=1), a.sinks)[:, None]
        weights = np.exp(logits - top)
        total = weights.sum(axis=1, keepdims=True) + np.exp(a.sinks[:, None] - top)
        o[token] = op.rounded(op.rounded(weights, dtype) @ keys / total, dtype)
    a.out[:] = op.rotated_pairs(o, a.cos_sin, a.positions, back=True).reshape(a.out.shape)


def _launches(target: Target, a: SparseAttendArgs[Tensor]) -> Iterator[Command]:
    op.expect_bf16(a.q, "q")
    dim, rotary = a.q.shape[2], 2 * a.cos_sin.shape[2]
    op.require(
        dim == op.power_of_two(dim) and dim >= 64 and rotary <= dim // 4,
        f"heads of {dim}, of which {rotary} channels rotate; on a GPU a power of two from 64, and a quarter",
    )
    yield from a.launches(target, a.tuning(target))


def _cost(workload: Workload, a: SparseAttendArgs[Tensor]) -> Cost:
    """A row's window and entries count once, or, where tokens choose their own, once a token (at most all of them)."""
    _, heads, dim = a.q.shape
    context = workload.qk_pairs / max(1, workload.tokens)  # tokens that a query sees, on average
    raw = workload.rows * a.window + workload.tokens - workload.rows
    pairs, held = workload.tokens * min(a.window, context), float(min(raw, workload.kv_tokens))
    if a.block:
        pairs += workload.tokens * a.block
        held += workload.tokens
    elif a.entries is not None:
        ratio = PAGE // a.entries.shape[1]
        each = context / ratio if a.selected is None else min(a.selected.shape[1], context / ratio)
        pairs += workload.tokens * each
        held += min(workload.kv_tokens / ratio, workload.tokens * each)
    moved = int(held) * dim * a.kv.itemsize + 2 * workload.tokens * heads * dim * a.q.itemsize
    chosen = 4 * workload.tokens * a.selected.shape[1] if a.selected is not None else 0
    return Cost(moved + chosen, int(4 * pairs * heads * dim))


sparse_attend = Op("sparse_attend", SparseAttendArgs[Tensor], _check, _reference, _launches, _cost)
