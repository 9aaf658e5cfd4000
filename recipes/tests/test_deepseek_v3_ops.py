"""The kernels of latent attention against the references, in Triton's interpreter and on a GPU; and the references
against attention with keys and values that were made of latents."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton; compile workers drop it

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import ContractError, Op, Target
from openinfer.kernels.testing import error, paged_places, paged_rows, run_reference
from openinfer.recipes.deepseek_v3.ops import latent_attend, split_queries, write_latents
from openinfer.tensor import Tensor, bfloat16, float32

Array = np.ndarray[Any, Any]
Both = Callable[..., tuple[dict[str, Array], dict[str, Array]]]
LAYERS = 3  # of a cache, the middle one of which is used
LATENT, ROTARY, PLAIN = 64, 16, 32


def angles(positions: int, rotary: int = ROTARY) -> Array:
    turn = np.arange(positions)[:, None] * 100.0 ** -np.linspace(0, 1, rotary // 2)
    return np.stack([np.cos(turn), np.sin(turn)], axis=1).astype(float32)


def step(
    rng: np.random.Generator, lengths: Sequence[int], before: Sequence[int], width: int = LATENT + ROTARY,
    **sizes: Any,
) -> dict[str, Any]:  # fmt: skip
    """Arguments that ops of the cache share. What no token wrote is NaN."""
    rows = paged_rows(rng, lengths, before, page_size=16, **sizes)
    kv = np.full((rows["block_tables"].max() + 1, LAYERS, 16, width), np.nan, bfloat16)[:, 1]
    counts = [a + b for a, b in zip(lengths, before, strict=True)]
    for place in paged_places(rows, counts, 16):
        kv[place] = rng.standard_normal(width)
    return {"kv": kv, **{name: rows[name] for name in ("positions", "token_slots", "block_tables")}}


def attend_args(
    rng: np.random.Generator, lengths: Sequence[int], before: Sequence[int], heads: int = 4, latent: int = LATENT,
    rotary: int = ROTARY, **sizes: Any,
) -> dict[str, Any]:  # fmt: skip
    args = step(rng, lengths, before, latent + rotary, **sizes)
    tokens = len(args["positions"])
    return {
        **args,
        "out": np.full((tokens, heads * latent), np.nan, bfloat16),
        "q": rng.standard_normal((tokens, heads * latent)).astype(bfloat16),
        "turned": rng.standard_normal((tokens, heads * rotary)).astype(bfloat16),
        "scale": 0.2,
    }


@pytest.mark.parametrize("sms", [1, 132], ids=["one part", "parts"])
@pytest.mark.parametrize("heads", [1, 4, 20])
def test_attention(run_both: Both, rng: np.random.Generator, heads: int, sms: int, request: Any) -> None:
    """A prompt, decode rows of 1, 17 and 70 tokens, a dead row, and padding."""
    args = attend_args(rng, [5, 1, 1, 1, 1], [12, 0, 16, 69, 3], heads, tokens=11, dead=[4])
    target = None if "gpu" in request.node.name else Target(arch=90, num_sms=sms, interpreted=True)
    got, want = run_both(latent_attend, args, target)
    live = args["token_slots"] > 0
    assert np.isfinite(got["out"].astype(float32)).all()
    assert error(got["out"][live], want["out"][live]) < 5e-3
    other = run_reference(latent_attend, args | {"scale": 0.21})["out"].astype(float32)
    assert error(other[live], want["out"][live]) > 2e-2  # the bound notices another scale


@pytest.mark.parametrize(("sms", "parts"), [(6, 6), (132, 24)])
def test_a_long_context_in_many_parts(run_both: Both, rng: np.random.Generator, sms: int, parts: int) -> None:
    """Two rows, of which one has no keys in most parts."""
    args = attend_args(rng, [1, 1], [1500, 3])
    target, op = Target(arch=90, num_sms=sms, interpreted=True), latent_attend
    tensors = {k: Tensor.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in args.items()}
    assert [one.grid[0] for one in op.plan(target, op.args(**tensors))] == [parts, 2]
    got, want = run_both(op, args, target)
    assert error(got["out"], want["out"]) < 5e-3


@pytest.mark.parametrize("sms", [1, 132], ids=["one part", "parts"])
def test_attention_to_chosen_tokens(run_both: Both, rng: np.random.Generator, sms: int, request: Any) -> None:
    """Of 40: rows that see fewer, as many and more, in any order; behind a row's choice there may be anything."""
    args = attend_args(rng, [5, 1, 1, 1, 1], [70, 0, 39, 129, 3], 20, tokens=11, dead=[4])
    chosen = np.full((11, 40), 1 << 30, np.int32)
    for token, position in enumerate(args["positions"]):
        some = rng.permutation(position + 1)[:40]
        chosen[token, : len(some)] = some
    target = None if "gpu" in request.node.name else Target(arch=90, num_sms=sms, interpreted=True)
    got, want = run_both(latent_attend, args | {"selected": chosen}, target)
    live = args["token_slots"] > 0
    assert np.isfinite(got["out"].astype(float32)).all()
    assert error(got["out"][live], want["out"][live]) < 5e-3
    token, heads = 0, 20  # by hand: a token that sees 71
    slot, held = args["token_slots"][token], chosen[token]
    keys = args["kv"][args["block_tables"][slot, held // 16], held % 16].astype(np.float64)
    q = [args[name][token].reshape(heads, -1).astype(np.float64) for name in ("q", "turned")]
    e = np.exp(0.2 * np.concatenate(q, axis=1) @ keys.T)
    by_hand = (e / e.sum(axis=1, keepdims=True)) @ keys[:, :LATENT]
    assert error(want["out"][token].reshape(heads, -1), by_hand) < 5e-3
    other = run_reference(latent_attend, args | {"selected": chosen[:, :39].copy()})["out"]
    assert error(other[live], want["out"][live]) > 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 40, 140])
@pytest.mark.parametrize("most", [0, 300])
def test_published_sizes_on_gpu(on_gpu: Any, rng: np.random.Generator, rows: int, most: int) -> None:
    """In parts and whole; contexts of one block and of many, and a dead row."""
    before = [700, *rng.integers(0, 900, rows - 1).tolist()]
    args = attend_args(rng, [1] * rows, before, 128, 512, 64, tokens=rows, dead=[3] if rows > 1 else [])
    args["scale"] = 0.02
    if most:
        args["selected"] = np.full((rows, most), 1 << 30, np.int32)
        for token, position in enumerate(args["positions"]):
            some = rng.permutation(position + 1)[:most]
            args["selected"][token, : len(some)] = some
    want, got = (run(latent_attend, args)["out"] for run in (run_reference, on_gpu))
    live = args["token_slots"] > 0
    assert np.isfinite(got.astype(float32)).all()
    assert error(got[live], want[live]) < 5e-3
    other = on_gpu(latent_attend, args | {"scale": 0.021})["out"]
    assert error(other[live], want[live]) > 1e-2  # the bound notices another scale


def test_the_absorbed_form_is_attention_over_made_keys_and_values(rng: np.random.Generator) -> None:
    heads, value, count, slot = 3, 24, 40, 2
    latent, turned_key = rng.standard_normal((count, LATENT)), rng.standard_normal((count, ROTARY))
    w_k, w_v = rng.standard_normal((heads, PLAIN, LATENT)), rng.standard_normal((heads, value, LATENT))
    plain, turned = rng.standard_normal((heads, PLAIN)), rng.standard_normal((heads, ROTARY))
    keys = np.einsum("hkc,tc->thk", w_k, latent)
    scores = 0.1 * (np.einsum("hk,thk->ht", plain, keys) + turned @ turned_key.T)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    want = np.einsum("ht,thv->hv", weights, np.einsum("hvc,tc->thv", w_v, latent))
    kv = np.zeros((4, 16, LATENT + ROTARY), float32)
    kv[1:].reshape(-1, LATENT + ROTARY)[:count] = np.concatenate([latent, turned_key], axis=1)
    out = run_reference(latent_attend, {
        "out": np.empty((1, heads * LATENT), float32), "kv": kv, "scale": 0.1,
        "q": np.einsum("hk,hkc->hc", plain, w_k).reshape(1, -1).astype(float32),
        "turned": turned.reshape(1, -1).astype(float32), "positions": np.array([count - 1], np.int32),
        "token_slots": np.array([slot], np.int32), "block_tables": np.array([[0, 0, 0]] * slot + [[1, 2, 3]], np.int32),
    })["out"]  # fmt: skip
    np.testing.assert_allclose(
        np.einsum("hvc,hc->hv", w_v, out.reshape(heads, LATENT)), want, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(("width", "dim"), [(32, 0), (48, 0), (48, 32)])
def test_latents_are_written(run_both: Both, rng: np.random.Generator, width: int, dim: int) -> None:
    """dim: of an indexer's keys."""
    args = step(rng, [5, 1, 2], [13, 40, 0], tokens=10, dead=[2])
    tokens, columns = len(args["positions"]), width + LATENT + ROTARY
    args |= {
        "qr": np.full((tokens, width), np.nan, bfloat16),
        "qkv": rng.standard_normal((tokens, columns + 16)).astype(bfloat16)[:, :columns],
        "q_norm": rng.uniform(0.5, 2, width).astype(float32),
        "kv_norm": rng.uniform(0.5, 2, LATENT).astype(float32),
        "cos_sin": angles(64),
        "eps": 1e-6,
    }
    args["kv"][:] = np.nan
    if dim:
        args |= {
            "index_key": (3 + 2 * rng.standard_normal((tokens, dim + 9))).astype(bfloat16)[:, 1 : dim + 1],
            "index_norm": rng.uniform(0.5, 2, (2, dim)).astype(float32),
            "index_pages": np.full((len(args["kv"]), 2, 16, dim), np.nan, bfloat16)[:, 1],
        }
    got, want = run_both(write_latents, args)
    for name in ("qr", "kv", "index_pages")[: 3 if dim else 2]:
        np.testing.assert_array_equal(
            np.isnan(got[name][name != "qr" :]), np.isnan(want[name][name != "qr" :])
        )
        assert error(np.nan_to_num(got[name][1:]), np.nan_to_num(want[name][1:])) < 4e-3
    token = 3  # by hand: the key of one token
    p, slot = args["positions"][token], args["token_slots"][token]
    x = args["qkv"][token, -ROTARY:].astype(float32)
    turn = (x[0::2] + 1j * x[1::2]) * (args["cos_sin"][p, 0] + 1j * args["cos_sin"][p, 1])
    key = want["kv"][args["block_tables"][slot, p // 16], p % 16, LATENT:].astype(float32)
    np.testing.assert_allclose(key[0::2] + 1j * key[1::2], turn, atol=2e-2)
    if dim:
        x = args["index_key"][token].astype(np.float64)
        x = (x - x.mean()) / np.sqrt(x.var() + 1e-6) * args["index_norm"][0] + args["index_norm"][1]
        turn = (x[-ROTARY::2] + 1j * x[1 - ROTARY :: 2]) * (
            args["cos_sin"][p, 0] + 1j * args["cos_sin"][p, 1]
        )
        x[-ROTARY::2], x[1 - ROTARY :: 2] = turn.real, turn.imag
        found = want["index_pages"][args["block_tables"][slot, p // 16], p % 16].astype(float32)
        np.testing.assert_allclose(found, x, atol=2e-2)


@pytest.mark.parametrize("heads", [2, 17])
def test_queries_are_split(run_both: Both, rng: np.random.Generator, heads: int) -> None:
    tokens = 5
    args = {
        "plain": np.full((tokens, heads * PLAIN), np.nan, bfloat16),
        "turned": np.full((tokens, heads * ROTARY), np.nan, bfloat16),
        "q": rng.standard_normal((tokens, heads * (PLAIN + ROTARY))).astype(bfloat16),
        "cos_sin": angles(90),
        "positions": rng.integers(0, 90, tokens).astype(np.int32),
    }
    got, want = run_both(split_queries, args)
    np.testing.assert_array_equal(got["plain"], want["plain"])
    assert error(got["turned"], want["turned"]) < 4e-3
    own = args["q"].reshape(tokens, heads, -1)[:, :, :PLAIN].reshape(tokens, -1)
    np.testing.assert_array_equal(want["plain"], own)


@pytest.mark.parametrize(
    ("op", "change", "complaint"),
    [
        (latent_attend, {"scale": 0.0}, "scale is 0.0"),
        (latent_attend, {"turned": np.zeros((6, 3 * ROTARY), bfloat16)}, "together they are heads of 80"),
        (latent_attend, {"kv": np.zeros((9, 12, LATENT + ROTARY), bfloat16)}, "pages have 12 tokens"),
        (latent_attend, {"token_slots": np.zeros(7, np.int32)}, "token_slots"),
        (latent_attend, {"selected": np.zeros((5, 9), np.int32)}, "selected has shape"),
    ],
)
def test_wrong_calls_are_refused(
    rng: np.random.Generator, op: Op[Any], change: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ContractError, match=complaint):
        run_reference(op, attend_args(rng, [5, 1], [0, 3]) | change)
