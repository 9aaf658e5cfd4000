"""compress: the tokens of a window become one entry, by a softmax per channel that is carried from token to token."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels import authoring as op
from openinfer.kernels.authoring import Arg, Array, Command, Cost, Op, T, Target, Workload
from openinfer.recipes.deepseek_v4.ops import PAGE
from openinfer.recipes.deepseek_v4.ops.queries import KV_BLOCK, rounded_key
from openinfer.tensor import Tensor, float32, int32

ROUNDINGS = ("none", "q8", "hadamard_q4")
"""How a finished entry may be rounded.

"none": not at all. "q8": q8 of the channels that are not rotated, in blocks of 64. "hadamard_q4": the Hadamard
transform and q4 of all channels."""

_DEVICE = "openinfer.recipes.deepseek_v4.device.compress"

STAGES = 6
"""Stages of a program's loop over a chunk: it reads STAGES - 1 tokens ahead."""

A_PREVIOUS, A, B = 0, 1, 2
"""The accumulations of an overlapping compressor: the A half of the window before (complete), A and B of this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Args(Generic[T]):
    """Take the step's tokens into the open windows of their rows; write the entries of the windows that end.

    Rows, slots, q_starts, seq_lens and alive as in expand_rows. Window w of a row is its tokens w m .. w m + m - 1,
    with m = ape.shape[0]. az float32 [T, 2 c], rows at any stride: a, then z, of c columns each; z_t += ape[t mod m]
    (float32 [m, c]). All values up to the entry are float32. An accumulation has three numbers for each of d channels:
    the largest z, s = sum of exp(z - largest), and v = sum of exp(z - largest) * a. The empty one is (-inf, 0, 0). It
    takes tokens in order:

        top = max(largest, z)
        s = s * exp(largest - top) + exp(z - top)
        v = v * exp(largest - top) + exp(z - top) * a

    c = d (one accumulation: no overlap): it is empty before the first token of a window; after its last, e = v / s.
    c = 2d (three: A of the previous window, A, B): before the first token of a window, A becomes the previous one's
    (empty at token 0), and A and B are empty. Columns :d of a and z go to A, d: to B. After the window's last token, e
    is v / s of the previous A and B together: with top = the larger of their largest, (vA exp(largestA - top) + vB
    exp(largestB - top)) / (the same of s).

    The entry: norm_weight * e / rms(e) with e rounded first, rounded (norm_weight float32 [d]); its last r channels
    rotated in pairs at position w m (cos_sin float32 [P, 2, r / 2]), rounded; then `rounding` of ROUNDINGS. It goes to
    entries [pages, 128 / m, d] (float dtype; dense within a page, pages at any stride), page entry_tables[slot,
    w m // 128], place w mod (128 / m). m divides 128.

    State: state float32 [pages, accumulations, 3, d], dense within a page, pages at any stride. A row reads page
    state_tables[slot, (n - 1) // 128] with n = seq_lens[slot], and nothing if n is 0. For every page of which the row
    has tokens, it writes the accumulations after the last of these tokens into that page, state_tables[slot, p // 128].
    These are the pages it fills, and the page of its last token. Both tables int32 [S, B].

    With recent, tokens at the end of a row may be drafts that do not count in its next step. recent is float32 [S, L,
    accumulations, 3, d], L a power of two. A row of at most L / 2 tokens writes the accumulations after its token at
    position p to recent[slot, p % L], for each token; a longer row for its last token. A row of at most L / 2 tokens
    reads recent[slot, (n - 1) % L] in place of the page, unless n is a multiple of 128.

    Dead rows and tokens past q_starts[R] change nothing but page 0 of entries and state, which no row reads.
    max_q_len: no row has more tokens than this (1 in a decode step).
    """

    az: T
    entries: T
    state: T
    ape: T
    norm_weight: T
    cos_sin: T
    slots: T
    q_starts: T
    seq_lens: T
    alive: T
    state_tables: T
    entry_tables: T
    eps: float
    rounding: str
    max_q_len: int
    recent: T | None = None


def _check(a: _Args[Tensor]) -> None:
    op.expect_columns("state", a.state, (-1, -1, 3, -1), float32)
    dim, kinds, window = a.state.shape[3], a.state.shape[1], a.ape.shape[0]
    op.require(kinds in (1, 3), f"state has {kinds} accumulations; it must be 1, or 3 where windows overlap")
    columns = dim * (2 if kinds == 3 else 1)
    fits = window >= 1 and PAGE % window == 0
    op.require(fits, f"ape is of windows of {window} tokens; that must divide {PAGE}")
    op.expect("ape", a.ape, (window, columns), float32)
    op.expect_columns("az", a.az, (-1, 2 * columns), float32)
    op.expect_columns("entries", a.entries, (-1, PAGE // window, dim), *op.FLOATS)
    op.expect("norm_weight", a.norm_weight, (dim,), float32)
    op.expect_cos_sin(a.cos_sin, dim)
    _, size = op.expect_rows(a.slots, a.q_starts, seq_lens=a.seq_lens, alive=a.alive)
    op.expect("state_tables", a.state_tables, (size, -1), int32)
    op.expect("entry_tables", a.entry_tables, (size, -1), int32)
    op.require(a.eps > 0, f"eps is {a.eps}; it must be positive")
    op.require(
        a.rounding in ROUNDINGS, f"rounding is {a.rounding!r}; it must be one of {', '.join(ROUNDINGS)}"
    )
    plain = dim - 2 * a.cos_sin.shape[2]
    whole = a.rounding != "q8" or plain % KV_BLOCK == 0
    op.require(whole, f"{plain} channels are not rotated; q8 takes multiples of {KV_BLOCK}")
    fits = a.rounding != "hadamard_q4" or (dim & (dim - 1) == 0 and dim >= 32)
    op.require(fits, f"entries of {dim}; a Hadamard transform takes powers of two from 32")
    if a.recent is not None:
        op.expect("recent", a.recent, (size, -1, *a.state.shape[1:]), float32, dense=False)
        ring = a.recent.shape[1]
        op.require(
            ring == op.power_of_two(ring), f"recent has room for {ring} tokens; it must be a power of two"
        )
    possible = 1 <= a.max_q_len <= a.az.shape[0]
    op.require(possible, f"max_q_len is {a.max_q_len}; it must be in [1, {a.az.shape[0]}]")


def _empty(windows: int, dim: int) -> Array:
    """Accumulations of several windows side by side, [windows, 3, d]: largest z, s, v."""
    sums = np.zeros((windows, 3, dim), np.float32)
    sums[:, 0] = -np.inf
    return sums


def _take(sums: Array, a: Array, z: Array) -> None:
    top = np.maximum(sums[:, 0], z)
    shrink, weight = np.exp(sums[:, 0] - top), np.exp(z - top)
    sums[:, 1] = sums[:, 1] * shrink + weight
    sums[:, 2] = sums[:, 2] * shrink + weight * a
    sums[:, 0] = top


def _merged(first: Array, second: Array) -> Array:
    """v / s of two accumulations [windows, 3, d] together, of which the second is not empty."""
    top = np.maximum(first[:, 0], second[:, 0])
    one, two = np.exp(first[:, 0] - top), np.exp(second[:, 0] - top)
    return np.asarray((first[:, 2] * one + second[:, 2] * two) / (first[:, 1] * one + second[:, 1] * two))


def _windows(start: int, a: Array, z: Array, old: Array | None, window: int, kinds: int, dim: int) -> Array:
    """The accumulations [windows, kinds, 3, d] of every window that a row has tokens of, after the last of these: the
    first is at position `start`. `old` [kinds, 3, d]: the state before. Windows are side by side, the tokens of one in
    order: how a row is cut into steps changes no bit."""
    end, low = start + len(a), start // window
    windows = -(-end // window) - low
    halves = [_empty(windows, dim) for _ in range(2 if kinds == 3 else 1)]
    if start % window and old is not None:
        for half, kept in zip(halves, old[-len(halves) :], strict=True):
            half[0] = kept
    for j in range(window):
        first = -(-(start - j) // window) - low
        last = -(-(end - j) // window) - low
        if first < last:
            at = slice((first + low) * window + j - start, None, window)
            for h, half in enumerate(halves):
                columns = slice(h * dim, (h + 1) * dim)
                _take(half[first:last], a[at, columns][: last - first], z[at, columns][: last - first])
    if kinds == 1:
        return halves[0][:, None]
    before = _empty(windows, dim)
    before[1:] = halves[0][:-1]
    if old is not None:
        before[0] = old[A_PREVIOUS] if start % window else old[A]
    return np.stack([before, *halves], axis=1)


def _reference(a: _Args[Array]) -> None:
    (_, kinds, _, dim), (window, columns) = a.state.shape, a.ape.shape
    dtype, per_page = a.entries.dtype, a.entries.shape[1]
    for row, slot in enumerate(a.slots):
        tokens, start = a.az[a.q_starts[row] : a.q_starts[row + 1]], int(a.seq_lens[slot])
        end = start + len(tokens)
        if start == end or not a.alive[slot]:
            continue
        z = tokens[:, columns:] + a.ape[np.arange(start, end) % window]
        numbers = np.ascontiguousarray(tokens[:, :columns])
        short = a.recent is not None and len(tokens) <= a.recent.shape[1] // 2
        old = a.state[a.state_tables[slot, (start - 1) // PAGE]] if start else None
        if a.recent is not None and short and start % PAGE:
            old = a.recent[slot, (start - 1) % a.recent.shape[1]].copy()
        sums = _windows(start, numbers, z, old, window, kinds, dim)
        low = start // window
        if a.recent is not None:
            for count in range(1 if short else len(tokens), len(tokens) + 1):
                part = _windows(start, numbers[:count], z[:count], old, window, kinds, dim)
                a.recent[slot, (start + count - 1) % a.recent.shape[1]] = part[-1]
        for page in range(start // PAGE, -(-end // PAGE)):
            last = min(end, (page + 1) * PAGE) - 1
            a.state[a.state_tables[slot, page]] = sums[last // window - low]
        done = end // window - low
        if done:
            full = sums[:done]
            e = _merged(full[:, A_PREVIOUS], full[:, B]) if kinds == 3 else full[:, 0, 2] / full[:, 0, 1]
            w = low + np.arange(done)
            y = op.f32(op.rms_norm(e.astype(dtype), a.norm_weight, a.eps))
            y = op.rounded(op.rotated_pairs(y, a.cos_sin, w * window), dtype)
            if a.rounding == "q8":
                y = rounded_key(y, 2 * a.cos_sin.shape[2])
            elif a.rounding == "hadamard_q4":
                y = op.q4(op.rounded(op.hadamard(y), dtype))
            a.entries[a.entry_tables[slot, w // per_page], w % per_page] = y


def _launches(target: Target, a: _Args[Tensor]) -> Iterator[Command]:
    dim, rows, alike = a.state.shape[3], a.slots.shape[0], target.batch_invariant
    single = a.max_q_len == 1 and not alike
    op.expect_bf16(a.entries, "entries")
    op.require(dim == op.power_of_two(dim), f"entries of {dim}; on a GPU a power of two")
    args: dict[str, Arg] = {**op.tensors(a, "entries", "state", "az", "ape", "norm_weight", "cos_sin")}
    args |= op.tensors(a, "slots", "q_starts", "seq_lens", "alive", "state_tables", "entry_tables")
    args["recent"] = a.state if a.recent is None else a.recent
    args["recent_stride"] = op.Aligned(0 if a.recent is None else a.recent.strides[0])
    args |= {"az_stride": op.aligned(a.az.strides[0]), "state_stride": op.Aligned(a.state.strides[0])}
    args |= {"entry_stride": op.Aligned(a.entries.strides[0]), "state_width": a.state_tables.shape[1]}
    args |= {"entry_width": a.entry_tables.shape[1], "rows": rows, "eps": a.eps}
    window, overlap, early = a.ape.shape[0], a.state.shape[1] == 3, target.early(a.az.shape[0])
    constants: dict[str, int | str] = {"D": dim, "ROTARY": 2 * a.cos_sin.shape[2], "WINDOW": window}
    ring = 0 if a.recent is None else a.recent.shape[1]
    constants |= {"PAGE": PAGE, "ROUNDING": a.rounding, "RING": ring}
    if overlap and not single and not alike:
        windows = 16 if a.rounding == "hadamard_q4" else min(16, max(1, 2048 // dim))
        grid = (a.az.shape[0] // (windows * window) + 2 * rows,)
        own = {**constants, "WINDOWS": windows}
        yield op.launch(_DEVICE, "compress_windows", grid, args, own, early=early)
    grid = (rows if single else a.az.shape[0] // PAGE + 2 * rows,)
    constants |= {"OVERLAP": overlap, "SINGLE": single, "STAGES": 1 if single else STAGES}
    constants["ENTRIES"] = single or alike or not overlap
    yield op.launch(_DEVICE, "compress", grid, args, constants, early=early)


def _cost(workload: Workload, a: _Args[Tensor]) -> Cost:
    """Every row reads and writes its state; a token is read, and is 1 / m of an entry."""
    _, kinds, _, dim = a.state.shape
    window, columns = a.ape.shape
    states = 2 * workload.rows * kinds * 3 * dim * 4
    tokens = workload.tokens * (2 * columns * 4 + dim * a.entries.itemsize // window)
    return Cost(states + tokens + a.ape.nbytes, 8 * workload.tokens * columns)


compress = Op(
    "compress", _Args[Tensor], _check, _reference, _launches, _cost, writes=("entries", "state", "recent")
)
