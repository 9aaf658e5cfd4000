"""The ops of latent attention. Of a token are cached a latent of C numbers and r rotated ones, of all heads.

write_latents: a token's latent into its page, beside the query's low-rank vector, and the indexer's key. split_queries:
the heads' queries. latent_attend: attention of all heads to one vector a token, whose first numbers are its value too.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels import authoring as op
from openinfer.kernels.authoring import Arg, Array, Command, Cost, Op, Scratch, T, Target, Workload
from openinfer.tensor import Tensor, float16, float32, int32

_DEVICE = "openinfer.recipes.deepseek_v3.device.latents"
_HOPPER = "openinfer.recipes.deepseek_v3.device.latents_hopper"
KEY_EPS = 1e-6
"""Of the LayerNorm of the indexer's keys, whatever config.json says of other norms."""
MOST_PARTS = 128
"""The most parts of a token's context. The bound is needed because all parts are merged at once."""


def expect_latents(kv: Tensor, block_tables: Tensor) -> None:
    """Raise ContractError unless kv [pages, page_size, C + r] is a layer of pages, dense within a page, pages at any
    stride, and block_tables int32 [S, B] names them."""
    op.expect_columns("kv", kv, (-1, -1, -1), *op.FLOATS)
    op.expect("block_tables", block_tables, (-1, -1), int32)
    size = kv.shape[1]
    op.require(size == op.power_of_two(size), f"pages have {size} tokens; it must be a power of two")


@dataclass(frozen=True, kw_only=True, slots=True)
class _WriteArgs(Generic[T]):
    """Split qkv [T, >= Q + C + r], rows at any stride, into the query's low-rank vector, the latent and the key; and
    write the key of an indexer, where there is one.

    qr [T, Q] = q_norm * q / rms(q), rounded. The cache gets kv_norm * c / rms(c), rounded, and the key rotated in pairs
    (2i, 2i + 1), rounded: kv [pages, page_size, C + r], one layer of the pages (expect_latents); position p of slot s
    is at block_tables[s, p // page_size], place p mod page_size. All of one float dtype; q_norm float32 [Q], kv_norm
    float32 [C], cos_sin float32 [P, 2, r / 2]; positions, token_slots int32 [T]. Slot 0's table names page 0, which no
    row reads, so tokens of slot 0 may write there or not at all.

    index_key [T, D], rows at any stride: index_pages [pages, page_size, D] get its LayerNorm (KEY_EPS; index_norm
    float32 [2, D] is weight and bias), with the last r numbers rotated, rounded once.
    """

    qr: T
    kv: T
    qkv: T
    q_norm: T
    kv_norm: T
    cos_sin: T
    positions: T
    token_slots: T
    block_tables: T
    eps: float
    index_key: T | None = None
    index_norm: T | None = None
    index_pages: T | None = None


def _write_check(a: _WriteArgs[Tensor]) -> None:
    expect_latents(a.kv, a.block_tables)
    tokens, width = a.positions.shape[0], a.q_norm.shape[0]
    latent, rotary = a.kv_norm.shape[0], 2 * a.cos_sin.shape[2]
    op.expect_columns("qkv", a.qkv, (tokens, -1), a.kv.dtype)
    op.expect("qr", a.qr, (tokens, width), a.kv.dtype)
    op.expect("q_norm", a.q_norm, (width,), float32)
    op.expect("kv_norm", a.kv_norm, (latent,), float32)
    op.expect_cos_sin(a.cos_sin, rotary)
    op.expect_each(a, (tokens,), int32, "positions", "token_slots")
    op.require(
        a.kv.shape[2] == latent + rotary and a.qkv.shape[1] >= width + latent + rotary,
        f"kv has vectors of {a.kv.shape[2]} and qkv {a.qkv.shape[1]} columns; a latent has {latent} numbers, a key "
        f"{rotary}, a query {width}",
    )
    op.require(a.eps > 0, f"eps is {a.eps}; it must be positive")
    if a.index_key is None or a.index_norm is None or a.index_pages is None:
        op.require(
            a.index_key is a.index_norm is a.index_pages is None, "an indexer's key has a norm and pages"
        )
        return
    dim = a.index_norm.shape[-1]
    op.expect("index_norm", a.index_norm, (2, dim), float32)
    op.expect_columns("index_key", a.index_key, (tokens, dim), a.kv.dtype)
    op.expect_columns("index_pages", a.index_pages, (*a.kv.shape[:2], dim), a.kv.dtype)
    op.require(dim >= rotary, f"an indexer's keys have {dim} numbers, of which {rotary} rotate")


def _write_reference(a: _WriteArgs[Array]) -> None:
    width, latent, rotary = len(a.q_norm), len(a.kv_norm), 2 * a.cos_sin.shape[2]
    a.qr[:] = op.rms_norm(a.qkv[:, :width], a.q_norm, a.eps)
    live = np.flatnonzero(a.token_slots)
    own, position = a.qkv[live, width : width + latent + rotary], a.positions[live]
    page = a.block_tables[a.token_slots[live], position // a.kv.shape[1]], position % a.kv.shape[1]
    key = op.rotated_pairs(op.f32(own[:, latent:]), a.cos_sin, position)
    a.kv[page] = np.concatenate([op.f32(op.rms_norm(own[:, :latent], a.kv_norm, a.eps)), key], axis=1)
    if a.index_key is not None and a.index_norm is not None and a.index_pages is not None:
        x = op.f32(a.index_key[live])
        x = x - x.mean(axis=1, keepdims=True)
        x = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(KEY_EPS))
        a.index_pages[page] = op.rotated_pairs(x * a.index_norm[0] + a.index_norm[1], a.cos_sin, position)


def _write_launches(target: Target, a: _WriteArgs[Tensor]) -> Iterator[Command]:
    (tokens, width), latent = a.qr.shape, a.kv_norm.shape[0]
    op.expect_bf16(a.kv, "kv")
    op.require(latent == op.power_of_two(latent), f"latents have {latent} numbers; on a GPU a power of two")
    key, pages = a.index_key or a.qkv, a.index_pages or a.kv
    dim = 0 if a.index_key is None else a.index_key.shape[1]
    fits = dim == 0 or dim == op.power_of_two(dim)
    op.require(fits, f"an indexer's keys have {dim} numbers; on a GPU a power of two")
    args: dict[str, Arg] = {**op.tensors(a), "index_key": key, "index_norm": a.index_norm or a.kv_norm}
    args |= {"index_pages": pages, "width": op.aligned(width), "qkv_stride": op.aligned(a.qkv.strides[0])}
    args |= {"key_stride": op.aligned(key.strides[0]), "table_width": a.block_tables.shape[1]}
    args |= {"page_stride": op.Aligned(a.kv.strides[0]), "key_page_stride": op.Aligned(pages.strides[0])}
    args |= {"eps": a.eps, "key_eps": KEY_EPS}
    constants = {"BLOCK": op.power_of_two(width), "C": latent, "ROTARY": 2 * a.cos_sin.shape[2]}
    constants |= {"PAGE": a.kv.shape[1], "KEY": dim}
    yield op.launch(_DEVICE, "write_latents", (tokens, 3 if dim else 2), args, constants)


def _write_cost(workload: Workload, a: _WriteArgs[Tensor]) -> Cost:
    columns = a.qr.shape[1] + a.kv.shape[2] + (0 if a.index_pages is None else a.index_pages.shape[2])
    return Cost(2 * workload.tokens * columns * a.kv.itemsize, 8 * workload.tokens * columns)


write_latents = Op(
    "write_latents", _WriteArgs[Tensor], _write_check, _write_reference, _write_launches, _write_cost
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _SplitArgs(Generic[T]):
    """The heads' queries q [T, A (n + r)] as plain [T, A n], the first n numbers of each head, and turned [T, A r], the
    others rotated in pairs (2i, 2i + 1) at `positions` int32 [T] and rounded; all of one float dtype. cos_sin float32
    [P, 2, r / 2]."""

    plain: T
    turned: T
    q: T
    cos_sin: T
    positions: T


def _split_check(a: _SplitArgs[Tensor]) -> None:
    op.expect("q", a.q, (-1, -1), *op.FLOATS)
    (tokens, width), rotary = a.q.shape, 2 * a.cos_sin.shape[2]
    op.expect_cos_sin(a.cos_sin, rotary)
    op.expect("turned", a.turned, (tokens, -1), a.q.dtype)
    heads, rest = divmod(a.turned.shape[1], rotary)
    op.require(heads > 0 and not rest, f"turned has {a.turned.shape[1]} columns; heads have {rotary} each")
    op.expect("plain", a.plain, (tokens, width - heads * rotary), a.q.dtype)
    op.require(
        a.plain.shape[1] % heads == 0, f"{heads} heads cannot share {a.plain.shape[1]} columns of plain"
    )
    op.expect("positions", a.positions, (tokens,), int32)


def _split_reference(a: _SplitArgs[Array]) -> None:
    rotary = 2 * a.cos_sin.shape[2]
    q = a.q.reshape(len(a.q), a.turned.shape[1] // rotary, -1)
    a.plain[:] = q[:, :, :-rotary].reshape(a.plain.shape)
    a.turned[:] = op.rotated_pairs(op.f32(q[:, :, -rotary:]), a.cos_sin, a.positions).reshape(a.turned.shape)


def _split_launches(target: Target, a: _SplitArgs[Tensor]) -> Iterator[Command]:
    rotary = 2 * a.cos_sin.shape[2]
    heads = a.turned.shape[1] // rotary
    plain = a.plain.shape[1] // heads
    yield op.launch(
        _DEVICE, "split_queries", (a.q.shape[0], -(-heads // 16)), {**op.tensors(a), "heads": heads},
        {"PLAIN": plain, "BLOCK": op.power_of_two(plain), "ROTARY": rotary, "HEADS": 16},
    )  # fmt: skip


def _split_cost(workload: Workload, a: _SplitArgs[Tensor]) -> Cost:
    return Cost(2 * workload.tokens * a.q.shape[1] * a.q.itemsize, 4 * workload.tokens * a.turned.shape[1])


split_queries = Op(
    "split_queries", _SplitArgs[Tensor], _split_check, _split_reference, _split_launches, _split_cost
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _AttendArgs(Generic[T]):
    """out[t, h] = sum of p_j c_j over the positions j <= p that token t sees, with p_j = softmax of
    scale * (q[t, h] . c_j + turned[t, h] . k_j): c_j, k_j are the latent and the rotated key of position j, of all
    heads. With `selected` int32 [T, K] it sees the first min(K, p + 1) of selected[t] instead, each once.

    Token t is at position p = positions[t] of slot s = token_slots[t] (int32 [T]); its own is there already. kv
    [pages, page_size, C + r]: one layer of the pages; position j is at block_tables[s, j // page_size], place j mod
    page_size (expect_latents). q, out [T, A C] and turned [T, A r] of the dtype of kv. Scores and sums in
    float32; weights are rounded to the dtype before they meet the latents, and the result is rounded. The output for
    tokens of slot 0, the padding slot, is finite and otherwise unspecified.
    """

    out: T
    q: T
    turned: T
    kv: T
    positions: T
    token_slots: T
    block_tables: T
    scale: float
    selected: T | None = None

    @property
    def heads(self: "_AttendArgs[Tensor] | _AttendArgs[Array]") -> int:
        return int(self.q.shape[1] + self.turned.shape[1]) // int(self.kv.shape[2])

    @property
    def kernels_for(self: "_AttendArgs[Tensor]") -> str:
        """See Call.kind: the heads of a program, where they fill the tensor cores' rows."""
        return "" if self.heads % 64 else "64 heads"


def _attend_check(a: _AttendArgs[Tensor]) -> None:
    expect_latents(a.kv, a.block_tables)
    op.expect("q", a.q, (-1, -1), a.kv.dtype)
    tokens, width = a.q.shape
    op.expect("turned", a.turned, (tokens, -1), a.kv.dtype)
    op.expect("out", a.out, (tokens, width), a.kv.dtype)
    heads = a.heads
    op.require(
        heads > 0 and width % heads == 0 and width + a.turned.shape[1] == heads * a.kv.shape[2],
        f"q and turned have {width} and {a.turned.shape[1]} columns; together they are heads of {a.kv.shape[2]}",
    )
    op.expect_each(a, (tokens,), int32, "positions", "token_slots")
    if a.selected is not None:
        op.expect("selected", a.selected, (tokens, -1), int32)
    op.require(a.scale > 0, f"scale is {a.scale}; it must be positive")


def _attend_reference(a: _AttendArgs[Array]) -> None:
    (tokens, width), dtype, size = a.q.shape, a.q.dtype, a.kv.shape[1]
    latent = width // a.heads
    q = np.concatenate([a.q.reshape(tokens, a.heads, -1), a.turned.reshape(tokens, a.heads, -1)], axis=2)
    a.out[a.token_slots == 0] = 0
    for token in np.flatnonzero(a.token_slots):  # one at a time: the result must not depend on the chunk
        end = a.positions[token] + 1
        seen = np.arange(end) if a.selected is None else a.selected[token, :end]
        keys = op.f32(a.kv[a.block_tables[a.token_slots[token], seen // size], seen % size])
        logits = (op.f32(q[token]) @ keys.T) * np.float32(a.scale)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        total = weights.sum(axis=1, keepdims=True)
        a.out[token] = (op.rounded(weights, dtype) @ keys[:, :latent] / total).reshape(-1)


def _attend_launches(target: Target, a: _AttendArgs[Tensor]) -> Iterator[Command]:
    (tokens, width), heads, size = a.q.shape, a.heads, a.kv.shape[1]
    latent, rotary = width // heads, a.turned.shape[1] // heads
    op.expect_bf16(a.kv, "kv")
    fits = all(one == op.power_of_two(one) for one in (latent, rotary)) and latent >= 64 and rotary >= 16
    op.require(fits, f"latents of {latent} and keys of {rotary}; on a GPU powers of two from 64 and from 16")
    most = 0 if a.selected is None else a.selected.shape[1]
    aligned_sizes = not (heads % 64 or latent % 128 or a.kv.strides[0] % 64) and rotary == 64
    hopper = target.arch == 90 and not target.interpreted and aligned_sizes
    rows, block = max(16, min(64, op.power_of_two(heads))), 64 if target.arch == 90 else 16
    programs, blocks = tokens * -(-heads // rows), -(-(most or a.block_tables.shape[1] * size) // block)
    parts = target.num_sms * (1 if rows == 64 else 2) // programs  # programs that an SM has at a time
    splits = 1 if target.batch_invariant else max(1, min(parts, blocks, MOST_PARTS))
    # A part is a mean of vectors that were normed: float16 holds it to 11 bits where bfloat16 has 8.
    partial = Scratch((tokens, splits, heads, latent), float16) if splits > 1 else a.out
    weight = Scratch((tokens, splits, heads), float32) if splits > 1 else a.positions
    sees = {**op.tensors(a, "positions", "token_slots"), "heads": op.aligned(heads)}
    constants: dict[str, int] = {"C": latent, "BN": block, "SPLITS": splits}
    own, warps, stages = {"ROTARY": rotary, "BM": rows}, 4 if rows == 16 else 8, 3 if rows == 16 else 2
    if hopper:
        own, warps = {"STAGES": 2, "TURNS": 1}, 4
    args: dict[str, Arg] = {**op.tensors(a, "out", "q", "turned", "kv")}
    args |= {"selected": a.selected or a.positions, "block_tables": a.block_tables}
    args |= {"partial": partial, "weight": weight, **sees}
    args |= {"table_width": a.block_tables.shape[1], "page_stride": op.Aligned(a.kv.strides[0])}
    args["scale"] = a.scale * math.log2(math.e)
    kernel = (_HOPPER, "latent_attend_hopper") if hopper else (_DEVICE, "latent_attend")
    own |= {"PAGE_BITS": size.bit_length() - 1, "MOST": most}
    grid = splits, tokens, -(-heads // rows)
    yield op.launch(*kernel, grid, args, constants | own, num_warps=warps, num_stages=stages)
    if splits > 1:
        args = {"out": a.out, "partial": partial, "weight": weight, **sees}
        constants["PARTS"] = op.power_of_two(splits)
        grid, warps = (tokens, heads, 4), 4 if splits <= 32 else 8
        yield op.launch(_DEVICE, "merge_latents", grid, args, constants, num_warps=warps)


def _attend_cost(workload: Workload, a: _AttendArgs[Tensor]) -> Cost:
    """A row's context counts once, and each pair of a token and one that it sees in every head."""
    width = a.q.shape[1]
    most = workload.qk_pairs if a.selected is None else workload.tokens * a.selected.shape[1]
    moved = int(min(workload.kv_tokens, most)) * a.kv.shape[2] * a.kv.itemsize
    moved += workload.tokens * (2 * width + a.turned.shape[1]) * a.q.itemsize
    return Cost(moved, int(2 * min(workload.qk_pairs, most) * (2 * width + a.turned.shape[1])))


latent_attend = Op(
    "latent_attend", _AttendArgs[Tensor], _attend_check, _attend_reference, _attend_launches, _attend_cost
)
