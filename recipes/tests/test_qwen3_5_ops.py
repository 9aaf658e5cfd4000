"""The ops that only Qwen3.5 has: their references against the published formulas, by whole sequences and by chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import ContractError, CpuPack
from openinfer.recipes.qwen3_5.ops.gated_attention import sigmoid_gate
from openinfer.recipes.qwen3_5.ops.gated_delta_net import STATE_CHUNK, gated_delta_net
from openinfer.tensor import Tensor, bfloat16

Array = np.ndarray[Any, Any]
KEY_HEADS, HEADS, DIM, TAPS, EPS = 2, 4, 16, 4, 1e-6
WIDTH = (2 * KEY_HEADS + HEADS) * DIM


def run(op: Any, **args: Any) -> None:
    op(CpuPack(), **{k: Tensor.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in args.items()})


class Layer:
    """A linear-attention layer with random weights, five slots and memory full of NaN."""

    def __init__(self, rng: np.random.Generator) -> None:
        f = np.float32
        self.rng = rng
        self.weights = {
            "conv_weight": rng.standard_normal((WIDTH, TAPS)).astype(f),
            "decay": -np.exp(rng.uniform(-2, 1, HEADS)).astype(f),
            "dt_bias": rng.standard_normal(HEADS).astype(f),
            "norm_weight": rng.standard_normal(DIM).astype(f),
        }
        self.conv_state = np.full((20, TAPS, WIDTH), np.nan, f)
        self.state = np.full((20, HEADS, DIM, DIM), np.nan, f)
        self.lengths = np.zeros(5, np.int32)
        self.alive = np.array([0, 1, 1, 1, 1], np.int32)
        self.state_from = np.arange(5, dtype=np.int32)
        self.state_to = np.arange(5, dtype=np.int32)

    def tokens(self, count: int) -> Array:
        """q|k|v before the convolution, z, b and a of `count` tokens, next to each other."""
        return self.rng.standard_normal((count, WIDTH + HEADS * DIM + 2 * HEADS)).astype(np.float32)

    def args(self, rows: Sequence[tuple[int, Array]], snapshots: Array | None = None) -> dict[str, Any]:
        mixed = np.concatenate([tokens for _, tokens in rows])
        lengths = [len(tokens) for _, tokens in rows]
        wanted = np.zeros((len(rows), 2, 1), np.int32) if snapshots is None else snapshots
        return {
            "out": np.full((len(mixed), HEADS * DIM), np.nan, np.float32),
            "qkv": mixed[:, :WIDTH],
            "z": mixed[:, WIDTH : WIDTH + HEADS * DIM],
            "ba": mixed[:, WIDTH + HEADS * DIM :],
            **self.weights,
            "conv_state": self.conv_state,
            "state": self.state,
            "slots": np.array([slot for slot, _ in rows], np.int32),
            "q_starts": np.cumsum([0, *lengths]).astype(np.int32),
            "seq_lens": self.lengths,
            "alive": self.alive,
            "state_from": self.state_from,
            "state_to": self.state_to,
            "snapshot_ends": np.ascontiguousarray(wanted[:, 0]),
            "snapshot_blocks": np.ascontiguousarray(wanted[:, 1]),
            "eps": EPS,
            "max_q_len": max(lengths),
        }

    def step(self, *rows: tuple[int, Array], snapshots: Array | None = None) -> list[Array]:
        """One call for (slot, tokens) rows; the outputs by row."""
        args = self.args(rows, snapshots)
        run(gated_delta_net, **args)
        for slot, tokens in rows:
            self.lengths[slot] += len(tokens)
        return np.split(args["out"], args["q_starts"][1:-1])

    def expected(self, tokens: Array) -> Array:
        """The layer over a whole sequence in float64, by the chunked form: a solve in place of the recurrence."""
        w = {name: value.astype(np.float64) for name, value in self.weights.items()}
        wide = tokens.astype(np.float64)
        m, z, b, a = np.split(wide, np.cumsum([WIDTH, HEADS * DIM, HEADS]), axis=1)
        padded = np.concatenate([np.zeros((TAPS - 1, WIDTH)), m])
        c = sum(w["conv_weight"][:, j] * padded[j : j + len(m)] for j in range(TAPS))
        c = c / (1 + np.exp(-c))
        q, k, v = np.split(c, [KEY_HEADS * DIM, 2 * KEY_HEADS * DIM], axis=1)
        out = np.zeros((len(m), HEADS, DIM))
        for head in range(HEADS):
            own = slice(head // 2 * DIM, (head // 2 + 1) * DIM)
            qh, kh, vh = q[:, own], k[:, own], v[:, head * DIM : (head + 1) * DIM]
            qh = qh / np.sqrt((qh**2).sum(1, keepdims=True) + 1e-6) * DIM**-0.5
            kh = kh / np.sqrt((kh**2).sum(1, keepdims=True) + 1e-6)
            beta = 1 / (1 + np.exp(-b[:, head]))
            g = np.cumsum(w["decay"][head] * np.log1p(np.exp(a[:, head] + w["dt_bias"][head])))
            fade = np.tril(np.exp(np.minimum(g[:, None] - g[None, :], 0)))
            mixing = np.tril(beta[:, None] * (kh @ kh.T) * fade, -1)
            u = np.linalg.solve(np.eye(len(m)) + mixing, beta[:, None] * vh)
            out[:, head] = ((qh @ kh.T) * fade) @ u
        out = w["norm_weight"] * out / np.sqrt((out**2).mean(-1, keepdims=True) + EPS)
        return out.reshape(len(m), -1) * (z / (1 + np.exp(-z)))


@pytest.fixture
def layer(request: pytest.FixtureRequest) -> Iterator[Layer]:
    return Layer(np.random.default_rng(list(request.node.name.encode())))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 70])
def test_a_whole_sequence_is_the_published_formula(layer: Layer, length: int) -> None:
    tokens = layer.tokens(length)
    (got,) = layer.step((1, tokens))
    np.testing.assert_allclose(got, layer.expected(tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("term", ["conv_weight", "decay", "dt_bias", "norm_weight"])
def test_every_weight_matters(layer: Layer, term: str) -> None:
    """Negative control: the comparison above notices a wrong weight."""
    tokens = layer.tokens(30)
    (got,) = layer.step((1, tokens))
    layer.weights[term] = layer.weights[term] * np.float32(1.01)
    assert np.abs(got - layer.expected(tokens)).max() > 1e-3


@pytest.mark.parametrize("cuts", [[1] * 70, [3, 64, 3], [69, 1], [1, 69], [2, 2, 66]])
def test_any_chunks_give_the_same_bits(layer: Layer, cuts: list[int]) -> None:
    tokens = layer.tokens(70)
    (whole,) = layer.step((1, tokens))
    parts, start = [], 0
    for count in cuts:
        parts += layer.step((2, tokens[start : start + count]))
        start += count
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(layer.state[2], layer.state[1])
    np.testing.assert_array_equal(layer.conv_state[2], layer.conv_state[1])


def test_rows_do_not_meet(layer: Layer) -> None:
    one, two, three = layer.tokens(9), layer.tokens(1), layer.tokens(20)
    alone = [layer.step((slot, tokens))[0] for slot, tokens in ((1, one), (2, two), (3, three))]
    layer.lengths[:] = 0
    for got, want in zip(
        layer.step((3, three), (1, one), (2, two)), [alone[2], alone[0], alone[1]], strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_dead_rows_and_padding_change_nothing(layer: Layer) -> None:
    layer.step((1, layer.tokens(5)), (2, layer.tokens(5)))
    before = layer.state.copy(), layer.conv_state.copy()
    layer.alive[2] = 0
    args = layer.args([(2, layer.tokens(3)), (1, layer.tokens(1)), (0, layer.tokens(4))])
    args["q_starts"] = np.array([0, 3, 4, 4], np.int32)  # four tokens of padding
    run(gated_delta_net, **args)
    others = [block for block in range(20) if block not in (0, 1)]
    np.testing.assert_array_equal(layer.state[others], before[0][others])
    np.testing.assert_array_equal(layer.conv_state[others], before[1][others])
    assert np.isfinite(args["out"]).all()
    assert (layer.state[1] != before[0][1]).any()


def test_snapshots_are_the_state_at_their_ends_and_can_be_gone_on_from(layer: Layer) -> None:
    tokens = layer.tokens(150)
    layer.step((1, tokens[:10]))
    ends = np.array([[[64, 128, 0], [7, 8, 9]]], np.int32)
    whole = layer.step((1, tokens[10:]), snapshots=ends)[0]
    assert np.isnan(layer.state[9]).all()
    for end, block in ((64, 7), (128, 8)):
        layer.lengths[2] = end
        layer.state_from[2] = block
        kept = layer.state[block].copy()
        (rest,) = layer.step((2, tokens[end : end + 1]))
        np.testing.assert_array_equal(layer.state[block], kept)  # a snapshot is read, and stays as it is
        layer.state_from[2] = 2
        (more,) = layer.step((2, tokens[end + 1 :]))
        np.testing.assert_array_equal(np.concatenate([rest, more]), whole[end - 10 :])
    assert STATE_CHUNK == 64


def test_bf16_rounds_and_stays_close(layer: Layer) -> None:
    tokens = layer.tokens(40).astype(bfloat16)
    want = layer.expected(tokens.astype(np.float32))
    args = layer.args([(1, tokens)])
    args |= {
        "out": args["out"].astype(bfloat16),
        "conv_weight": args["conv_weight"].astype(bfloat16),
        "conv_state": args["conv_state"].astype(bfloat16),
    }
    want_weights = layer.weights["conv_weight"]
    layer.weights["conv_weight"] = args["conv_weight"].astype(np.float32)
    want = layer.expected(tokens.astype(np.float32))
    run(gated_delta_net, **args)
    assert (want_weights != layer.weights["conv_weight"]).any()
    error = np.linalg.norm(args["out"].astype(np.float64) - want) / np.linalg.norm(want)
    assert 1e-5 < error < 2e-2


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("qkv", np.zeros((3, WIDTH + 16), np.float32), "leave"),
        ("z", np.zeros((3, HEADS * DIM + 1), np.float32), "z has shape"),
        ("decay", np.zeros(HEADS, np.float64), "decay is float64"),
        ("state_to", np.zeros(4, np.int32), "state_to has shape"),
        ("max_q_len", 4, "max_q_len is 4"),
    ],
)
def test_wrong_arguments_are_named(layer: Layer, name: str, value: Any, complaint: str) -> None:
    args = layer.args([(1, layer.tokens(3))])
    with pytest.raises(ContractError, match=complaint):
        run(gated_delta_net, **{**args, name: value})


@pytest.mark.parametrize("columns", [6, 1])
def test_sigmoid_gate(columns: int) -> None:
    rng = np.random.default_rng(3)
    out, both = rng.standard_normal((5, 3, 6)), rng.standard_normal((5, 3, 9)).astype(np.float32)
    gate, got = both[..., 2 : 2 + columns], out.astype(np.float32)
    run(sigmoid_gate, out=got, gate=gate)
    np.testing.assert_allclose(got, out / (1 + np.exp(-gate.astype(np.float64))), rtol=1e-5)
    with pytest.raises(ContractError, match="gate has 2 columns"):
        run(sigmoid_gate, out=got, gate=both[..., :2])
