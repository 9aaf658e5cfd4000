"""The ops that only DeepSeek-V4 has: their references against the published formulas, whole and by chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import ContractError, CpuPack, index_topk
from openinfer.kernels.op.op import mapped
from openinfer.kernels.op.rounding import hadamard, q4, q8
from openinfer.kernels.testing import never_coded
from openinfer.recipes.deepseek_v4.ops.compress import compress
from openinfer.recipes.deepseek_v4.ops.hyper_connections import hc_head, hc_post, hc_pre, sinkhorn
from openinfer.recipes.deepseek_v4.ops.sparse_attend import sparse_attend
from openinfer.tensor import Tensor

Array = np.ndarray[Any, Any]
F = np.float32
EPS = 1e-6
SLOTS = 4
DIM, ROTARY = 128, 64


def run(op: Any, **args: Any) -> None:
    op(CpuPack(), **mapped(args, np.ndarray, Tensor.from_numpy))


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(F)


def angles(positions: int) -> Array:
    """float32 [positions, 2, ROTARY / 2]."""
    turn = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(ROTARY // 2) / (ROTARY // 2))
    return np.stack([np.cos(turn), np.sin(turn)], axis=1).astype(F)


def turned(x: Array, position: int, sign: int = 1) -> Array:
    """x [..., d] with its last channels rotated as complex numbers, in float64."""
    pairs = x[..., -ROTARY:].astype(np.float64).reshape(*x.shape[:-1], -1, 2)
    theta = position * 10000.0 ** (-np.arange(ROTARY // 2) / (ROTARY // 2))
    z = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * sign * theta)
    last = np.stack([z.real, z.imag], axis=-1).reshape(*x.shape[:-1], ROTARY)
    return np.concatenate([x[..., :-ROTARY], last], axis=-1)


class Cache:
    """Lengths and block tables of SLOTS - 1 sequences (slot 0 is padding) of up to 5 pages, pages in no order."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.lengths = np.zeros(SLOTS, np.int32)
        self.alive = np.array([0, 1, 1, 1], np.int32)
        self.tables = np.zeros((SLOTS, 5), np.int32)
        self.tables[1:] = 1 + rng.permutation(15).reshape(3, 5)

    def rows(self, counts: Sequence[tuple[int, int]]) -> dict[str, Any]:
        lengths = [count for _, count in counts]
        return {
            "slots": np.array([slot for slot, _ in counts], np.int32),
            "q_starts": np.cumsum([0, *lengths]).astype(np.int32),
            "seq_lens": self.lengths,
            "alive": self.alive,
            "max_q_len": max(lengths),
        }

    def positions(self, counts: Sequence[tuple[int, int]]) -> Array:
        return np.concatenate([self.lengths[slot] + np.arange(n) for slot, n in counts]).astype(np.int32)

    def token_slots(self, counts: Sequence[tuple[int, int]]) -> Array:
        return np.concatenate([np.full(n, slot) for slot, n in counts]).astype(np.int32)

    def advance(self, counts: Sequence[tuple[int, int]]) -> None:
        for slot, count in counts:
            self.lengths[slot] += count


class Compressor:
    """One compressor with random weights, whose memory is full of NaN."""

    def __init__(self, window: int, rng: np.random.Generator) -> None:
        self.window, self.overlap = window, window == 4
        self.columns = DIM * (2 if self.overlap else 1)
        self.ape, self.norm = normal(rng, window, self.columns), normal(rng, DIM)
        self.cache = Cache(rng)
        self.state = np.full((16, 3 if self.overlap else 1, 3, DIM), np.nan, F)
        self.entries = np.full((16, 128 // window, DIM), np.nan, F)
        self.angles = angles(640)

    def step(self, *rows: tuple[int, Array], rounding: str = "none") -> None:
        counts = [(slot, len(az)) for slot, az in rows]
        run(
            compress,
            entries=self.entries,
            state=self.state,
            az=np.concatenate([az for _, az in rows]),
            ape=self.ape,
            norm_weight=self.norm,
            cos_sin=self.angles,
            state_tables=self.cache.tables,
            entry_tables=self.cache.tables,
            eps=EPS,
            rounding=rounding,
            **self.cache.rows(counts),
        )
        self.cache.advance(counts)

    def made(self, slot: int) -> Array:
        """All entries of a sequence."""
        pages = self.entries[self.cache.tables[slot]].reshape(-1, DIM)
        return pages[: self.cache.lengths[slot] // self.window]

    def expected(self, az: Array) -> Array:
        """The entries of a sequence by the published formula, in float64."""
        c, m = self.columns, self.window
        a, z = az[:, :c].astype(float), az[:, c:] + np.tile(self.ape, (-(-len(az) // m), 1))[: len(az)]
        found = []
        for w in range(len(az) // m):
            now, before = slice(w * m, w * m + m), slice(w * m - m, w * m)
            values, logits = a[now, c - DIM :], z[now, c - DIM :]
            if self.overlap and w:
                values = np.concatenate([a[before, :DIM], values])
                logits = np.concatenate([z[before, :DIM], logits])
            p = np.exp(logits - logits.max(axis=0))
            e = (p * values).sum(axis=0) / p.sum(axis=0)
            found.append(turned(self.norm * e / np.sqrt(np.mean(e * e) + EPS), w * m))
        return np.stack(found)


@pytest.mark.parametrize("window", [4, 128])
def test_entries_are_the_published_ones_and_chunks_change_no_bit(window: int) -> None:
    rng = np.random.default_rng(window)
    c = Compressor(window, rng)
    az = [normal(rng, n, 2 * c.columns) * F(2) for n in (390, 517)]
    c.step((1, az[0]), (2, az[1]))
    for slot in (1, 2):
        assert np.abs(c.made(slot) - c.expected(az[slot - 1])).max() < 2e-5
    for size in (1, 3, 127, 128, 129):
        other = Compressor(window, np.random.default_rng(window))
        for start in range(0, len(az[1]), size):
            other.step((2, az[1][start : start + size]))
        np.testing.assert_array_equal(other.made(2), c.made(2))
        for end in (128, 256, 384, 512, 517):  # every page keeps what its last token left
            page = c.cache.tables[2, (end - 1) // 128]
            np.testing.assert_array_equal(other.state[page], c.state[page])


def test_a_prefix_goes_on_from_the_state_of_its_last_page() -> None:
    rng = np.random.default_rng(1)
    c = Compressor(4, rng)
    az = normal(rng, 300, 2 * c.columns)
    c.step((1, az))
    c.cache.tables[3, :2], c.cache.lengths[3] = c.cache.tables[1, :2], 256
    c.step((3, az[256:]))
    np.testing.assert_array_equal(c.made(3), c.made(1))
    c.cache.tables[2, :2], c.cache.lengths[2] = (
        c.cache.tables[1, [0, 0]],
        256,
    )  # a page that is not the prefix's
    c.step((2, az[256:]))
    assert np.abs(c.made(2)[64] - c.made(1)[64]).max() > 0.1


def test_dead_rows_leave_state_and_entries_alone() -> None:
    rng = np.random.default_rng(2)
    c = Compressor(4, rng)
    c.cache.alive[1] = 0
    c.step((1, normal(rng, 130, 2 * c.columns)))
    assert np.isnan(c.state[1:]).all()
    assert np.isnan(c.entries[1:]).all()


def test_entries_are_rounded_as_asked() -> None:
    az = normal(np.random.default_rng(4), 64, 4 * DIM)
    made = {}
    for rounding in ("none", "q8", "hadamard_q4"):
        c = Compressor(4, np.random.default_rng(3))
        c.step((1, az), rounding=rounding)
        made[rounding] = c.made(1)
    plain = made["none"][:, :-ROTARY]
    np.testing.assert_array_equal(made["q8"][:, :-ROTARY], q8(plain, 64))
    np.testing.assert_array_equal(made["q8"][:, -ROTARY:], made["none"][:, -ROTARY:])
    np.testing.assert_array_equal(made["hadamard_q4"], q4(hadamard(made["none"])))
    with pytest.raises(ContractError, match="rounding is 'q2'"):
        Compressor(4, np.random.default_rng(3)).step((1, az), rounding="q2")


def test_sparse_attention_is_softmax_over_window_entries_and_sink() -> None:
    rng = np.random.default_rng(5)
    cache, kv, entries = Cache(rng), normal(rng, 16, 128, DIM), normal(rng, 16, 32, DIM)
    cache.lengths[:] = [0, 200, 0, 40]
    counts = [(1, 6), (3, 1), (2, 3)]
    positions = cache.positions(counts)
    q, sinks = normal(rng, 10, 2, DIM), normal(rng, 2)
    selected = np.full((10, 8), -1, np.int32)
    for t, p in enumerate(positions):
        sees = (p + 1) // 4
        selected[t, : min(8, sees)] = rng.permutation(sees)[:8]
    window, scale = 32, DIM**-0.5
    for case in ("raw", "all", "selected"):
        out = np.full((10, 2 * DIM), np.nan, F)
        run(
            sparse_attend,
            out=out,
            q=q,
            kv=kv,
            entries=None if case == "raw" else entries,
            selected=selected if case == "selected" else None,
            sinks=sinks,
            cos_sin=angles(640),
            positions=positions,
            token_slots=cache.token_slots(counts),
            kv_tables=cache.tables,
            entry_tables=cache.tables,
            scale=scale,
            eps=EPS,
            window=window,
        )
        slots = np.repeat([slot for slot, _ in counts], [n for _, n in counts])
        for t, (slot, p) in enumerate(zip(slots, positions, strict=True)):
            keys = kv[cache.tables[slot]].reshape(-1, DIM)[max(0, p + 1 - window) : p + 1]
            made = entries[cache.tables[slot]].reshape(-1, DIM)
            chosen = {"raw": [], "all": range((p + 1) // 4), "selected": selected[t][selected[t] >= 0]}[case]
            keys = np.concatenate([keys, made[list(chosen)]]).astype(float)
            unit = q[t] / np.sqrt(np.mean(q[t] ** 2, axis=1, keepdims=True) + EPS)
            e = np.exp(turned(unit, p) @ keys.T * scale)
            o = e @ keys / (e.sum(axis=1) + np.exp(sinks))[:, None]
            assert np.abs(turned(o, p, -1).reshape(-1) - out[t]).max() < 2e-5, (case, t)


def test_the_indexer_takes_the_best_and_the_first_of_equals() -> None:
    rng = np.random.default_rng(6)
    cache, keys = Cache(rng), normal(rng, 16, 32, DIM)
    cache.lengths[1:] = [300, 10, 0]
    keys[cache.tables[1, 0], 5] = keys[cache.tables[1, 1], 7]  # two entries with equal scores
    counts = [(1, 3), (2, 2)]
    q, weights, positions = normal(rng, 5, 4, DIM), normal(rng, 5, 4), cache.positions(counts)
    selected = np.zeros((5, 9), np.int32)
    run(
        index_topk,
        selected=selected,
        q=q,
        weights=weights,
        keys=keys,
        cos_sin=angles(640),
        positions=positions,
        token_slots=cache.token_slots(counts),
        block_tables=cache.tables,
        scale=0.1,
        window=4,
        quantized=False,
    )
    held = keys[cache.tables[1]].reshape(-1, DIM)
    for t, p in enumerate(positions[:3]):
        scores = weights[t] @ np.maximum(turned(q[t], p) @ held[: (p + 1) // 4].T, 0)
        assert scores[5] == scores[39]
        order = sorted(range(len(scores)), key=lambda w: (-scores[w], w))
        assert set(selected[t]) == set(order[:9])
    np.testing.assert_array_equal(selected[3:], [[0, 1, *[-1] * 7], [0, 1, 2, *[-1] * 6]])


def test_hyper_connections_mix_as_published() -> None:
    rng = np.random.default_rng(7)
    n, width = 4, 128
    x, fn, base, scale = (
        normal(rng, 3, n, width),
        normal(rng, 24, n * width) * F(0.1),
        normal(rng, 24),
        normal(rng, 3),
    )
    gain, y = normal(rng, width), normal(rng, 3, width)
    out, rounded_out, mix = np.empty((3, width), F), never_coded(3, width, np.dtype(F)), np.empty((3, 20), F)
    run(
        hc_pre,
        out=out,
        rounded_out=rounded_out,
        mix=mix,
        streams=x,
        fn=fn,
        base=base,
        scale=scale,
        norm_weight=gain,
        eps=EPS,
        hc_eps=EPS,
    )
    flat = x.reshape(3, -1).astype(float)
    m = flat @ fn.T / np.sqrt((flat**2).mean(axis=1, keepdims=True) + EPS)
    m = m * np.repeat(scale, [4, 4, 16]) + base
    pre, post = 1 / (1 + np.exp(-m[:, :4])) + EPS, 2 / (1 + np.exp(-m[:, 4:8]))
    h = np.einsum("ts,tsd->td", pre, x)
    assert np.abs(out - gain * h / np.sqrt((h**2).mean(axis=1, keepdims=True) + EPS)).max() < 1e-4
    np.testing.assert_array_equal(rounded_out.values(), q8(out, 128))
    assert np.abs(mix - m[:, 4:]).max() < 1e-5
    comb = sinkhorn(mix[:, 4:].reshape(3, 4, 4), EPS, 20)
    assert np.abs(comb.sum(axis=1) - 1).max() < 1e-4
    assert np.abs(comb - np.swapaxes(comb, 1, 2)).max() > 0.01
    mixed = x.copy()
    run(hc_post, streams=mixed, y=y, mix=mix, hc_eps=EPS, iters=20)
    assert np.abs(mixed - (post[:, :, None] * y[:, None] + np.einsum("tjk,tjd->tkd", comb, x))).max() < 1e-4
    head = np.empty((3, width), F)
    run(hc_head, out=head, streams=x, fn=fn[:4], base=base[:4], scale=scale[:1], eps=EPS, hc_eps=EPS)
    assert np.abs(head - h).max() < 1e-4
