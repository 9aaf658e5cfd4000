"""The kernels of Qwen3.5's gated attention against the references: in Triton's interpreter, and on a GPU as
published."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton; compile workers drop it

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import H200, Launch, NullPack, Op, Target, attention
from openinfer.kernels.measure.tuner import DeviceMeter
from openinfer.kernels.op.rounding import q8_codes, q8_values
from openinfer.kernels.testing import (
    coded_cache,
    error,
    paged_places,
    paged_rows,
    run_interpreted,
    run_on_gpu,
    run_reference,
)
from openinfer.recipes.qwen3_5.ops.gated_attention import gated_attention, sigmoid_gate
from openinfer.tensor import Tensor, bfloat16, float32

Array = np.ndarray[Any, Any]
Run = Callable[[Op[Any], Mapping[str, Any]], dict[str, Array]]
SMALL = Target(arch=90, num_sms=4, interpreted=True)
# For as many rows as here; with fewer SMs a decode step takes three kernels.
ONE_KERNEL = Target(arch=90, num_sms=32, interpreted=True)
ATTENDED = 6e-3
"""Relative error: probabilities and the result are rounded."""
LAYERS = 3  # of a cache, the middle one of which is used


def run_both(
    op: Op[Any], args: Mapping[str, Any], target: Target = SMALL
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The arrays of a call as the kernels leave them, and as the reference does."""
    return run_interpreted(op, args, target), run_reference(op, args)


def attention_step(
    rng: np.random.Generator,
    lengths: Sequence[int],
    before: Sequence[int],
    *,
    heads: tuple[int, int, int] = (8, 2, 64),
    page_size: int = 16,
    rotary: int = 16,
    tokens: int | None = None,
    dead: Sequence[int] = (),
) -> dict[str, Any]:
    """Arguments for rows of `lengths` tokens after `before` others (testing.paged_rows). heads: queries, keys, their
    size. What was never written is infinite."""
    count, kv_heads, dim = heads
    step = paged_rows(rng, lengths, before, page_size=page_size, tokens=tokens, dead=dead)
    pages, total = step["block_tables"].max() + 1, len(step["positions"])
    kv = np.full((pages, LAYERS, 2, kv_heads, page_size, dim), np.inf, bfloat16)[:, 1]
    for page, place in paged_places(step, before, page_size):
        kv[page, :, :, place] = rng.standard_normal((2, kv_heads, dim))
    angle = np.arange(step["positions"].max() + 1)[:, None] * 100.0 ** -np.linspace(0, 1, rotary // 2)
    return {
        "out": np.full((total, count * dim), np.nan, bfloat16),
        "kv": kv,
        "qkv": (rng.standard_normal((total, 2 * (count + kv_heads) * dim)) * 2).astype(bfloat16),
        "q_norm": rng.uniform(1, 3, dim).astype(float32),
        "k_norm": rng.uniform(0.5, 1.5, dim).astype(float32),
        "cos_sin": np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(float32),
        **step,
        "eps": 1e-6,
        "scale": dim**-0.5,
        "max_q_len": 1 if total == len(lengths) else total,
    }


def in_fp8(args: dict[str, Any]) -> dict[str, Any]:
    """The same call over an FP8 cache."""
    pages, _, heads, page_size, dim = args["kv"].shape
    arrays = coded_cache(pages, heads, page_size, dim)
    arrays["kv"][...], arrays["kv_scales"][...] = q8_codes(
        np.nan_to_num(args["kv"].astype(float32), posinf=0)
    )
    return args | arrays


def check_attention(args: dict[str, Any], target: Target = ONE_KERNEL) -> None:
    got, want = run_both(gated_attention, args, target)
    kv, kv_wanted = got.pop("kv").astype(float32), want.pop("kv").astype(float32)
    kv[0] = kv_wanted[0]  # the padding page may hold anything
    assert error(kv, kv_wanted) < 2e-3
    found, wanted = got.pop("out"), want.pop("out")
    assert all(got[name].tobytes() == want[name].tobytes() for name in got)
    for token in range(len(found)):  # each by itself
        live = args["token_slots"][token] != 0
        assert error(found[token], wanted[token]) < 2 * ATTENDED if live else not found[token].any(), token


@pytest.mark.parametrize(
    ("heads", "rotary", "page_size"),
    [((8, 2, 64), 16, 16), ((3, 1, 32), 32, 64), ((2, 2, 16), 2, 16)] + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (((8, 2, 64), 16, 64), ((4, 1, 256), 64, 16), ((4, 1, 256), 64, 64), ((3, 1, 32), 32, 16),
                     ((2, 2, 16), 2, 64))
    ],
)  # fmt: skip
def test_attention_of_a_decode_step(
    rng: np.random.Generator, heads: tuple[int, int, int], rotary: int, page_size: int
) -> None:
    lengths, before = [1, 1, 1, 0, 1, 1, 1], [0, 1, 63, 9, 64, 200, 70]
    sizes = {"heads": heads, "rotary": rotary, "page_size": page_size}
    step = attention_step(rng, lengths, before, tokens=7, dead=(6,), **sizes)
    check_attention(step)
    check_attention(step, SMALL)


@pytest.mark.parametrize("context", [0, 1, 63, 64, 127, 600])
def test_attention_of_one_row_is_split(rng: np.random.Generator, context: int) -> None:
    check_attention(attention_step(rng, [1], [context]))


def check_over_fp8(got: Mapping[str, Array], want: Mapping[str, Array], args: Mapping[str, Any]) -> None:
    """Every live token within the bound by itself, and what is written has the reference's values."""
    ours, right = (q8_values(x["kv"], x["kv_scales"])[1:] for x in (got, want))
    assert error(ours, right) < 2e-2  # a value beside a tie may get the code beside
    for token in np.flatnonzero(args["token_slots"]):
        assert error(got["out"][token], want["out"][token]) < 3 * ATTENDED, token


@pytest.mark.parametrize("target", [ONE_KERNEL, SMALL])
def test_attention_over_an_fp8_cache(rng: np.random.Generator, target: Target) -> None:
    sizes: dict[str, Any] = {"heads": (4, 2, 64), "rotary": 16}
    step = attention_step(rng, [1] * 5, [0, 1, 63, 200, 70], dead=(4,), **sizes)
    mixed = attention_step(rng, [1, 40, 3, 0, 1], [70, 30, 62, 5, 0], tokens=50, **sizes)
    for args in map(in_fp8, (step, mixed)):
        check_over_fp8(*run_both(gated_attention, args, replace(target, interpreted=True)), args)


PUBLISHED: dict[str, Any] = {"heads": (16, 4, 256), "rotary": 64}
"""Of Qwen3.5-4B."""


@pytest.fixture
def on_gpu(meter: DeviceMeter) -> Run:
    """on_gpu(op, args): the arrays of a call as a GPU leaves them, with the kernels of CUDA C++."""
    target = replace(meter.target, nvrtc=True)
    return lambda op, args: run_on_gpu(op, args, target, meter.driver, meter.stream)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 40, 200])
def test_a_decode_step_over_an_fp8_cache_on_a_gpu(on_gpu: Run, rng: np.random.Generator, rows: int) -> None:
    """One kernel, three kernels, and the kernel for many rows of codes."""
    before = rng.integers(1, 900, rows).tolist()
    dead = (rows // 2,) if rows > 1 else ()
    args = in_fp8(attention_step(rng, [1] * rows, before, dead=dead, **PUBLISHED))
    want = run_reference(gated_attention, args)
    check_over_fp8(on_gpu(gated_attention, args), want, args)
    args["kv_scales"][:, 1, 0] += 1  # negative control: the values of one head are twice as large
    found = on_gpu(gated_attention, args)["out"]
    assert max(error(found[t], want["out"][t]) for t in np.flatnonzero(args["token_slots"])) > 0.1


@pytest.mark.gpu
def test_a_mixed_step_over_an_fp8_cache_on_a_gpu(on_gpu: Run, rng: np.random.Generator) -> None:
    lengths, before = [1, 300, 0, 1, 65, 1, 9, 700], [800, 100, 7, 64, 0, 3, 130, 260]
    args = in_fp8(attention_step(rng, lengths, before, dead=(3, 6), tokens=1200, **PUBLISHED))
    check_over_fp8(on_gpu(gated_attention, args), run_reference(gated_attention, args), args)


PAIRS = ((24, 4, 256), (16, 2, 256), (5, 1, 128))
FEW = ([1] * 7, [4], [1, 4, 0, 3, 2, 4], [2] * 30)


def planned(args: Mapping[str, Any], target: Target) -> list[Launch]:
    pack = NullPack(target)
    gated_attention(
        pack, **{k: Tensor.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in args.items()}
    )
    return [command for command in pack.calls[0].commands if isinstance(command, Launch)]


def test_rows_of_few_tokens_take_the_kernel_of_cuda(rng: np.random.Generator) -> None:
    """Where they leave SMs idle. Both kernels are early: the second one reads cached keys while the first one runs."""
    cuda = replace(H200, nvrtc=True)
    for lengths in ([1], [1] * 4, [4], [5], [0, 5]):
        args = {**attention_step(rng, lengths, [0] * len(lengths), heads=PAIRS[0]), "max_q_len": max(lengths)}
        found = [(launch.spec.function, launch.early) for launch in planned(args, cuda)]
        assert found == [("qk_norm_rope_write", True), ("attend_pairs", True)], lengths
    calls = [(lengths, cuda, PAIRS[0], 16) for lengths in ([1] * 5, [6])]  # too many rows, too many pairs
    changes: list[dict[str, Any]] = [{"nvrtc": False}, {"batch_invariant": True}, {"arch": 100}]
    calls += [([1], replace(cuda, **change), PAIRS[0], 16) for change in changes]
    for lengths, target, heads, page_size in [*calls, ([1], cuda, (4, 1, 64), 16), ([1], cuda, PAIRS[0], 8)]:
        args = attention_step(rng, lengths, [0] * len(lengths), heads=heads, page_size=page_size)
        assert "attend_pairs" not in {one.spec.function for one in planned(args, target)}, (lengths, heads)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("heads", PAIRS)
@pytest.mark.parametrize("lengths", FEW, ids=str)
def test_rows_of_few_tokens_on_a_gpu(
    meter: DeviceMeter, on_gpu: Run, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch,
    heads: Any, lengths: list[int], page_size: int,
) -> None:  # fmt: skip
    """Rows that one program has, that many share, that are dead, and tokens after the last row; the same bits again."""
    if meter.target.arch != 90:
        pytest.skip("the kernel is for sm_90")
    monkeypatch.setattr(attention, "PAIRS_SMS", 1)
    before = [5000, *rng.integers(0, 700, len(lengths)).tolist()][: len(lengths)]
    sizes = {"heads": heads, "rotary": heads[2] // 4, "page_size": page_size}
    dead = (5,) if len(lengths) > 5 else ()
    tokens = sum(lengths) + 3 * (max(lengths) > 1)
    args = attention_step(rng, lengths, before, tokens=tokens, dead=dead, **sizes)
    args["max_q_len"] = max(lengths)
    assert planned(args, replace(meter.target, nvrtc=True))[-1].spec.function == "attend_pairs"
    got, want = on_gpu(gated_attention, args), run_reference(gated_attention, args)
    for token, live in enumerate(args["token_slots"] != 0):
        found = got["out"][token]
        assert error(found, want["out"][token]) < 2 * ATTENDED if live else not found.any(), token
    assert on_gpu(gated_attention, args)["out"].tobytes() == got["out"].tobytes()
    args["qkv"][0, heads[2] : 2 * heads[2]] *= -4  # negative control: a token's gates of one head
    assert error(on_gpu(gated_attention, args)["out"][0], want["out"][0]) > 4 * ATTENDED


def test_attention_of_a_mixed_step(rng: np.random.Generator) -> None:
    args = attention_step(rng, [1, 40, 3, 0, 1, 1], [70, 30, 62, 5, 0, 8], tokens=60, dead=(5,))
    check_attention(args)


@pytest.mark.parametrize("name", ["q_norm", "k_norm", "cos_sin", "qkv"])
def test_the_comparison_of_attention_notices_a_small_change(rng: np.random.Generator, name: str) -> None:
    """Negative control: one key head's norm, one angle or one head's gates a little off."""
    args = attention_step(rng, [1, 1], [80, 3])
    good = run_both(gated_attention, args, ONE_KERNEL)[1]
    args[name] = args[name].copy()
    changed = args[name][..., 64:128] if name == "qkv" else args[name]  # the first query head's gates
    changed *= changed.dtype.type(1.1)
    bad = run_both(gated_attention, args, ONE_KERNEL)[0]
    assert max(error(bad["out"][t], good["out"][t]) for t in range(2)) > 2 * ATTENDED


@pytest.mark.parametrize("columns", [64, 1])
def test_sigmoid_gate(rng: np.random.Generator, columns: int) -> None:
    wide = rng.standard_normal((5, 3, 200)).astype(bfloat16) * bfloat16.type(9)
    out = rng.standard_normal((5, 3, 64)).astype(bfloat16)
    got, want = run_both(sigmoid_gate, {"out": out, "gate": wide[..., 64 : 64 + columns]})
    assert error(got["out"], want["out"]) < 1e-3
    assert error(out, want["out"]) > 0.1  # negative control
