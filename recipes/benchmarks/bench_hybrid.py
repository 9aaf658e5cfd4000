"""Measure the kernels of Qwen3.5 on this GPU, the choices beside each other.

    python recipes/benchmarks/bench_hybrid.py                         everything, for the 4B shape
    python recipes/benchmarks/bench_hybrid.py --only delta,moe        parts whose names contain one of these

Small shapes are checked against the reference first. Times are medians of a CUDA graph of calls on one layer after
another, so that the L2 cache does not serve them. `floor`: the op's cost at 4.59 TB/s and 780 TFLOP/s. A variant that
fails is reported, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[2] / "libs/kernels/benchmarks"), str(Path(__file__).parent)]

from openinfer.kernels import (  # noqa: E402
    GPUS,
    H200,
    Command,
    Cost,
    CpuPack,
    KernelsError,
    Launch,
    Op,
    Scratch,
    Workload,
    attend,
    experts,
    experts_add,
)
from openinfer.kernels.attention import Call as AttendCall  # noqa: E402
from openinfer.kernels.attention import HopperTile, Tile, launches  # noqa: E402
from openinfer.kernels.attention import choose as choose_attend  # noqa: E402
from openinfer.kernels.products import matmul, normed_product, product  # noqa: E402
from openinfer.kernels.tuner import DeviceMeter as Bench  # noqa: E402
from openinfer.kernels.tuning import Choice, depth  # noqa: E402
from openinfer.recipes.qwen3_5 import delta  # noqa: E402
from openinfer.recipes.qwen3_5.ops.gated_delta_net import gated_delta_net  # noqa: E402
from openinfer.tensor import Tensor, bfloat16, float8_e4m3fn, float32  # noqa: E402

BANDWIDTH, FLOPS = GPUS[H200.gpu].measured.bytes_per_s, GPUS[H200.gpu].measured.flops_per_s
LAYERS, KEY_HEADS, HEADS, DIM, TAPS = 24, 16, 32, 128, 4
WIDTH = (2 * KEY_HEADS + HEADS) * DIM
DECODE, PROMPTS = (1, 8, 32, 64, 128, 256), (128, 1024, 4096, 16384)

Variant = tuple[str, Callable[[int], list[Command]]]
"""A name, and the commands of a call on the n-th layer."""


class Report:
    """Prints lines and keeps them for the JSON."""

    def __init__(self, bench: Bench, only: str) -> None:
        self.bench, self.only = bench, only
        self.results: list[dict[str, object]] = []

    def add(self, case: str, variant: str, seconds: float, cost: Cost | None, calls: int) -> None:
        """One time a call; `calls`: how many of them a step of the model has."""
        line = f"{case:26} {variant:44} {seconds * 1e6:9.2f} us  x{calls} {seconds * calls * 1e3:8.3f} ms"
        entry: dict[str, object] = {"case": case, "variant": variant, "us": seconds * 1e6}
        if cost is not None:
            floor = cost.floor_s(BANDWIDTH, FLOPS)
            line += f"  {cost.bytes / seconds / 1e9:6.0f} GB/s {cost.flops / seconds / 1e12:6.1f} TFLOP/s"
            line += f"  floor {floor * 1e6:8.1f} us = {floor / seconds:4.0%}"
            entry |= {"bytes": cost.bytes, "flops": cost.flops, "floor_us": floor * 1e6}
        self.results.append(entry)
        print(line, flush=True)

    def guarded(self, case: str, variant: str, work: Callable[[], None]) -> None:
        """Do it; a failure is a line."""
        try:
            work()
        except Exception as e:
            print(f"{case:26} {variant:44} FAILED {type(e).__name__}: {str(e)[:300]}", flush=True)
            if not isinstance(e, ValueError | RuntimeError):
                traceback.print_exc()
            self.results.append(
                {"case": case, "variant": variant, "error": f"{type(e).__name__}: {e}"[:1000]}
            )

    def time(
        self, case: str, variants: list[Variant], cost: Cost | None, layers: int, *, parts: bool = True
    ) -> None:
        """Time variants of a call that a step has `layers` of. With `parts` the commands of the first also by
        themselves: they find anything in scratch memory then, so it must be no index."""
        specs = [c.spec for _, commands in variants for c in commands(0) if isinstance(c, Launch)]
        self.guarded(case, "compiling", lambda: self.bench.store.prepare(specs) and None)
        for number, (name, commands) in enumerate(variants):

            def work(name: str = name, commands: Any = commands, parts: bool = parts and number == 0) -> None:
                made = [commands(n) for n in range(layers)]
                submit = self.bench.pack.submit
                calls = [functools.partial(submit, name, c) for c in made]
                self.add(case, name, self.bench.seconds(calls), cost, layers)
                for i in range(len(made[0]) if parts and len(made[0]) > 1 else 0):
                    alone = [functools.partial(submit, name, [c[i]]) for c in made]
                    kernel = getattr(made[0][i], "spec", None)
                    label = f"  of it {kernel.function if kernel else 'cuBLASLt'}"
                    self.add(case, label, self.bench.seconds(alone), None, layers)

            self.guarded(case, name, work)


def upload(bench: Bench, array: np.ndarray) -> Tensor:
    tensor = Tensor.empty(array.shape, array.dtype, bench.device)
    tensor.copy_from(np.ascontiguousarray(array), bench.stream)
    bench.stream.synchronize()
    return tensor


def check(
    bench: Bench, op: Op[Any], args: Mapping[str, Any], outputs: tuple[str, ...], commands: Any = None
) -> dict[str, float]:
    """Relative errors of what the GPU writes against the reference. All arrays are dense."""
    want = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in args.items()}
    CpuPack().run(op, {k: Tensor.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in want.items()})
    sent = {k: upload(bench, v) if isinstance(v, np.ndarray) else v for k, v in args.items()}
    bench.pack.submit(op.name, commands(sent) if commands else op.plan(bench.target, sent))
    bench.stream.synchronize()
    errors = {}
    for name in outputs:
        g, w = sent[name].numpy().astype(np.float64), want[name].astype(np.float64)
        known = np.isfinite(w)
        errors[name] = float(np.linalg.norm((g - w)[known]) / np.linalg.norm(w[known]))
    return errors


# Delta rule


def delta_small(lengths: list[int], before: list[int]) -> dict[str, Any]:
    """A small call with random numbers: 4 key heads, 8 value heads."""
    rng, key_heads, heads = np.random.default_rng(0), 4, 8
    rows, tokens, width = len(lengths), sum(lengths), (2 * key_heads + heads) * DIM
    size = rows + 1
    seq_lens = np.array([0, *before], np.int32)
    return {
        "out": np.zeros((tokens, heads * DIM), bfloat16),
        "qkv": rng.standard_normal((tokens, width)).astype(bfloat16),
        "z": rng.standard_normal((tokens, heads * DIM)).astype(bfloat16),
        "ba": rng.standard_normal((tokens, 2 * heads)).astype(bfloat16),
        "conv_weight": (rng.standard_normal((width, TAPS)) * 0.5).astype(bfloat16),
        "decay": -rng.uniform(0.1, 4, heads).astype(float32),
        "dt_bias": (rng.standard_normal(heads) - 2).astype(float32),
        "norm_weight": rng.uniform(0.5, 1.5, DIM).astype(float32),
        "conv_state": rng.standard_normal((3 * size, TAPS, width)).astype(bfloat16),
        "state": (rng.standard_normal((3 * size, heads, DIM, DIM)) * 0.3).astype(float32),
        "slots": np.arange(1, size, dtype=np.int32),
        "q_starts": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        "seq_lens": seq_lens,
        "alive": np.ones(size, np.int32),
        "state_from": np.arange(size, dtype=np.int32),
        "state_to": np.arange(size, dtype=np.int32) + size * (np.arange(size, dtype=np.int32) % 2),
        "snapshot_ends": np.where(np.array(lengths) > 64, (np.array(before) // 64 + 1) * 64, 0)
        .astype(np.int32)
        .reshape(-1, 1),
        "snapshot_blocks": (2 * size + np.arange(rows, dtype=np.int32)).reshape(-1, 1),
        "eps": 1e-6,
        "max_q_len": max(lengths),
    }


def delta_call(tensors: Mapping[str, Any]) -> delta.Call:
    heads = tensors["state"].shape[1]
    key_heads = (tensors["qkv"].shape[1] - heads * DIM) // (2 * DIM)
    return delta.Call({k: v for k, v in tensors.items() if isinstance(v, Tensor)}, key_heads, 1e-6)


TUNINGS: dict[str, dict[str, int]] = {
    "as chosen": {},
    "scan 64 columns 4 warps 3 stages": {"columns": 64},
    "scan 2 stages": {"scan_stages": 2},
    "inputs any registers": {"inputs_registers": 0},
    "inputs 64 registers": {"inputs_registers": 64},
    "prepare any registers": {"prepare_registers": 0},
}
STEPS: dict[str, dict[str, int]] = {
    f"step {columns} columns {warps} warps {registers or 'any'} registers": {
        "step_columns": columns,
        "step_warps": warps,
        "step_registers": registers,
    }
    for columns, warps, registers in (
        (128, 4, 0), (32, 1, 0), (64, 2, 0), (128, 8, 0), (64, 4, 0), (128, 4, 168), (32, 1, 168),
    )
}  # fmt: skip


def delta_checks(report: Report) -> None:
    bench = report.bench
    for case, lengths, before in (
        ("check step", [1] * 9, [0, 7, 8, 0, 4, 63, 64, 65, 500]),
        ("check mixed", [1, 130, 64, 1, 3, 70, 200], [9, 0, 70, 0, 2, 63, 31]),
        ("check prompt", [333], [5]),
    ):
        args = delta_small(lengths, before)
        for name, change in (STEPS if max(lengths) == 1 else TUNINGS).items():
            tuning = dataclasses.replace(delta.Tuning(), **change)

            def work(name: str = name, args: Any = args, tuning: Any = tuning, case: str = case) -> None:
                errors = check(
                    bench, gated_delta_net, args, ("out", "state", "conv_state"),
                    lambda sent: list(delta.launches(delta_call(sent), args["max_q_len"], tuning)),
                )  # fmt: skip
                verdict = "ok" if max(errors.values()) < 1e-2 else "WRONG"
                print(
                    f"{case:26} {name:44} {verdict} { ({k: f'{v:.1e}' for k, v in errors.items()}) }",
                    flush=True,
                )

            report.guarded(case, name, work)


class DeltaLayers:
    """Tensors of all linear layers of a 4B model for steps of `tokens` tokens of `rows` rows after `context` others."""

    def __init__(self, bench: Bench, tokens: int, rows: int, context: int) -> None:
        self.bench, rng = bench, np.random.default_rng(1)
        self.groups = max(1, 16 // rows)  # of slots, so that states of few rows do not stay in the L2 cache
        blocks = rows * self.groups + 1

        def random(*shape: int, dtype: Any = bfloat16, scale: float = 1.0) -> Tensor:
            tensor = Tensor.empty(shape, dtype, bench.device)
            bench.fill(tensor, scale, rng)
            return tensor

        self.state = random(blocks, LAYERS, HEADS, DIM, DIM, dtype=float32, scale=0.3)
        self.rings = random(blocks, LAYERS, TAPS, WIDTH)
        mixed = random(tokens, WIDTH + HEADS * DIM + 2 * HEADS)
        every = upload(bench, np.arange(blocks, dtype=np.int32))
        self.fixed: dict[str, Any] = {
            "out": Tensor.empty((tokens, HEADS * DIM), bfloat16, bench.device),
            "qkv": mixed[:, :WIDTH],
            "z": mixed[:, WIDTH : WIDTH + HEADS * DIM],
            "ba": mixed[:, WIDTH + HEADS * DIM :],
            "conv_weight": random(WIDTH, TAPS, scale=0.5),
            "decay": upload(bench, -np.exp(rng.uniform(-3, 1, HEADS)).astype(float32)),
            "dt_bias": upload(bench, (rng.standard_normal(HEADS) - 2).astype(float32)),
            "norm_weight": upload(bench, np.ones(DIM, float32)),
            "q_starts": upload(bench, np.linspace(0, tokens, rows + 1).astype(np.int32)),
            "seq_lens": upload(bench, np.full(blocks, context, np.int32)),
            "alive": upload(bench, np.ones(blocks, np.int32)),
            "state_from": every,
            "state_to": every,
            "snapshot_ends": upload(bench, np.zeros((rows, 2), np.int32)),
            "snapshot_blocks": upload(bench, np.zeros((rows, 2), np.int32)),
        }
        self.slots = [
            upload(bench, np.arange(1 + g * rows, 1 + (g + 1) * rows, dtype=np.int32))
            for g in range(self.groups)
        ]
        cost = gated_delta_net.cost
        full = {**self.fixed, "state": self.state[:, 0], "conv_state": self.rings[:, 0]}
        self.cost = cost(Workload(tokens, rows, 0, 0), **full, slots=None, eps=0, max_q_len=0)
        self.max_q_len = tokens // rows

    def commands(self, tuning: delta.Tuning, n: int) -> list[Command]:
        """On the n-th of LAYERS * groups layers."""
        layer, slots = n % LAYERS, self.slots[n // LAYERS % self.groups]
        tensors = {
            **self.fixed,
            "state": self.state[:, layer],
            "conv_state": self.rings[:, layer],
            "slots": slots,
        }
        return list(delta.launches(delta_call(tensors), self.max_q_len, tuning))


def delta_times(report: Report) -> None:
    for rows in DECODE:
        layers = DeltaLayers(report.bench, rows, rows, 1024)
        variants: list[Variant] = []
        for name, change in STEPS.items():
            tuning = dataclasses.replace(delta.Tuning(), **change)
            variants.append((name, functools.partial(layers.commands, tuning)))
        report.time(
            f"delta decode {rows}", variants, layers.cost, LAYERS * (layers.groups if rows < 8 else 1)
        )
    for tokens, rows in [*((t, 1) for t in PROMPTS), (4096, 8)]:
        layers = DeltaLayers(report.bench, tokens, rows, 0)
        variants = []
        for name, change in TUNINGS.items():
            tuning = dataclasses.replace(delta.Tuning(), **change)
            variants.append((name, functools.partial(layers.commands, tuning)))
        report.time(f"delta prompt {rows} x {tokens // rows}", variants, layers.cost, LAYERS)


# Attention with heads of 256

ATTEND_LAYERS, ATTEND_HEADS, ATTEND_KV_HEADS, ATTEND_DIM, PAGE = 8, 16, 4, 256, 16
LONG = [
    Tile(128, 64, 8, 3), Tile(128, 64, 8, 4), HopperTile(64, 2, False, True), HopperTile(64, 2, True, True),
    HopperTile(32, 4, False, True), HopperTile(32, 4, True, True), HopperTile(64, 2, False, False),
]  # fmt: skip
SHORT = [Tile(16, 64, 4, 3), Tile(16, 32, 4, 5), Tile(16, 16, 4, 5), Tile(16, 16, 4, 7), Tile(16, 32, 8, 5)]


def attend_times(report: Report) -> None:
    bench = report.bench
    cases = [(f"attend decode {r} x 1024", r, 1, 1023) for r in DECODE]
    cases += [(f"attend prompt {t}", 1, t, 0) for t in PROMPTS]
    cases += [("attend chunk 2048 after 14336", 1, 2048, 14336)]
    for case, rows, length, before in cases:
        report.guarded(case, "", functools.partial(attend_case, report, bench, case, rows, length, before))


def attend_case(report: Report, bench: Bench, case: str, rows: int, length: int, before: int) -> None:
    rng, pages = np.random.default_rng(2), -(-(before + length) // PAGE)
    shape = (rows * pages, ATTEND_LAYERS, 2, ATTEND_KV_HEADS, PAGE, ATTEND_DIM)
    cache = Tensor.empty(shape, bfloat16, bench.device)
    bench.fill(cache, 1.0, rng)
    tokens = rows * length
    q = Tensor.empty((tokens, ATTEND_HEADS, ATTEND_DIM), bfloat16, bench.device)
    bench.fill(q, 1.0, rng)
    out = Tensor.empty((tokens, ATTEND_HEADS * ATTEND_DIM), bfloat16, bench.device)
    table = np.zeros((rows, 2560), np.int32)
    table[:, :pages] = rng.permutation(rows * pages).reshape(rows, pages)
    tensors = {
        "out": out,
        "q": q,
        "kv": cache[:, 0],
        "slots": upload(bench, np.arange(rows, dtype=np.int32)),
        "q_starts": upload(bench, (np.arange(rows + 1) * length).astype(np.int32)),
        "seq_lens": upload(bench, np.full(rows, before, np.int32)),
        "alive": upload(bench, np.ones(rows, np.int32)),
        "block_tables": upload(bench, table),
    }
    total = before + length
    pairs = rows * (total * (total + 1) - before * (before + 1)) // 2
    cost = attend.cost(Workload(tokens, rows, rows * total, pairs), **tensors)
    plain = choose_attend(bench.target, AttendCall.of(tensors, ATTEND_DIM**-0.5, 0))
    field = "long" if length > 1 else "short"
    choices = {f"as chosen {getattr(plain, field)}": plain}
    for tile in LONG if length > 1 else SHORT:
        choices.setdefault(f"{field} {tile}", dataclasses.replace(plain, **{field: tile}))

    def commands(choice: Any, n: int) -> list[Command]:
        call = AttendCall.of({**tensors, "kv": cache[:, n]}, ATTEND_DIM**-0.5, 0)
        return list(launches(call, choice, length))

    def result(choice: Any) -> np.ndarray:
        out.zero_(bench.stream)
        bench.pack.submit("attend", commands(choice, 0))
        bench.stream.synchronize()
        return np.concatenate([out[:300].numpy(), out[-300:].numpy()]).astype(float32)

    variants: list[Variant] = []
    want = result(dataclasses.replace(plain, long=Tile(64, 64, 8, 3)))
    for name, choice in choices.items():
        error = float("nan")
        with contextlib.suppress(KernelsError):
            error = float(np.linalg.norm(result(choice) - want) / np.linalg.norm(want))
        if error < 1e-2:
            variants.append((name, functools.partial(commands, choice)))
        else:
            print(f"{case:26} {name:44} WRONG or not compiled: error {error:.1e}", flush=True)
    report.time(case, variants, cost, ATTEND_LAYERS)


# Linear layers of float8 weights

SHAPES = [
    ("norm_linear", 12288, 2560), ("norm_linear", 10240, 2560), ("linear_add", 2560, 4096),
    ("gate_up_silu", 18432, 2560), ("linear_add", 2560, 9216),
]  # fmt: skip
GEMV = [
    (8, 512, 4, 3),
    (4, 1024, 4, 3),
    (8, 1024, 4, 3),
    (8, 1024, 8, 3),
    (16, 512, 8, 3),
    (4, 512, 4, 4),
    (4, 512, 2, 4),
]
SMALL = [
    (64, 128, 4, 4),
    (64, 128, 4, 5),
    (128, 128, 8, 4),
    (128, 128, 4, 3),
    (32, 128, 4, 5),
    (64, 64, 4, 6),
]
F8 = np.dtype(float8_e4m3fn)


def scaled_times(report: Report) -> None:
    for op, n, k in SHAPES:
        for m in (1, 8, 32, 64, 128, 1024):
            case = f"fp8 {op} {n}x{k} M {m}"
            report.guarded(case, "", functools.partial(scaled_case, report, case, op, m, n, k))


def scaled_case(report: Report, case: str, op: str, m: int, n: int, k: int) -> None:
    bench, rng, gated = report.bench, np.random.default_rng(3), op == "gate_up_silu"
    copies = max(2, min(16, (256 << 20) // (n * k)))
    weights = [Tensor.empty((n, k), F8, bench.device) for _ in range(copies)]
    scales = [Tensor.empty((-(-n // 128), -(-k // 128)), float32, bench.device) for _ in range(copies)]
    for tensor in weights:
        bench.fill(tensor, 40.0, rng)
    for tensor in scales:
        bench.fill(tensor, 1e-3, rng)
    x = Tensor.empty((m, k), bfloat16, bench.device)
    bench.fill(x, 1.0, rng)
    out = Tensor.empty((m, n // 2 if gated else n), bfloat16, bench.device)
    gain = upload(bench, np.ones(k, float32))
    cost = Cost(n * k + 2 * m * (n + k), 2 * m * n * k)

    def chosen(i: int) -> list[Command]:
        w, s = weights[i % copies], scales[i % copies]
        if op == "linear_add":
            return list(product(bench.target, op, out, x, w, s, add=True))
        return list(normed_product(bench.target, op, out, x, gain, 1e-6, w, s, gated=gated))

    def alone(choice: Choice, i: int) -> list[Command]:
        w, s = weights[i % copies], scales[i % copies]
        return [matmul(choice, bench.target, out, x, w, s, add=op == "linear_add", gated=gated)]

    variants: list[Variant] = [("as chosen, with the norm", chosen)]
    if m == 1:
        for bn, bk, warps, stages in GEMV:
            choice = Choice("gemv", 1, bn, depth(k, bk), 1, warps, stages)
            variants.append((f"gemv {bn} {bk} w{warps} s{stages}", functools.partial(alone, choice)))
    elif m <= 128:
        for bn, bk, warps, stages in SMALL:
            for split in (1, 2, 4, 8):
                tiles = n // bn // (2 if gated else 1)
                if split > 1 and (tiles * split > 4 * bench.target.num_sms or k // bk < 2 * split):
                    continue
                choice = Choice("small", max(16, m), bn, depth(k, bk), split, warps, stages)
                variants.append(
                    (f"small {bn} {bk} /{split} w{warps} s{stages}", functools.partial(alone, choice))
                )
    report.time(case, variants, cost, 24)


# Mixtures of experts

EXPERTS, CHOSEN, HIDDEN, INTER, MOE_LAYERS = 256, 8, 2048, 512, 3
TALL = [
    experts.Tile(16, 64, 128, True, 4, 3), experts.Tile(16, 32, 128, True, 4, 4), experts.Tile(16, 64, 128, True, 4, 4),
    experts.Tile(16, 32, 256, True, 4, 3), experts.Tile(16, 128, 128, True, 8, 3),
    experts.Tile(32, 64, 128, True, 4, 3),
]  # fmt: skip
WIDE = [
    experts.Tile(128, 64, 64, False, 8, 3), experts.Tile(128, 128, 64, False, 8, 3),
    experts.Tile(64, 128, 64, False, 4, 3), experts.Tile(128, 128, 64, False, 8, 4),
    experts.Tile(64, 64, 128, False, 4, 3),
]  # fmt: skip


def mixture(bench: Bench, tokens: int, scaled: bool) -> dict[str, Any]:
    """The tensors of MOE_LAYERS layers; weights of the first axis."""
    rng, dtype = np.random.default_rng(4), F8 if scaled else bfloat16
    ids = np.stack([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(tokens)]).astype(np.int32)

    def random(*shape: int, dtype: Any = bfloat16, scale: float = 1.0) -> Tensor:
        tensor = Tensor.empty(shape, dtype, bench.device)
        bench.fill(tensor, scale, rng)
        return tensor

    tensors: dict[str, Any] = {
        "x": random(tokens, HIDDEN),
        "norm_weight": upload(bench, np.ones(HIDDEN, float32)),
        "expert_ids": upload(bench, ids),
        "expert_weights": random(tokens, CHOSEN, scale=0.1),
        "gate_up": random(MOE_LAYERS, EXPERTS, 2 * INTER, HIDDEN, dtype=dtype, scale=0.02),
        "down": random(MOE_LAYERS, EXPERTS, HIDDEN, INTER, dtype=dtype, scale=0.02),
    }
    if scaled:
        tensors["gate_up_scales"] = random(EXPERTS, 2 * INTER // 128, HIDDEN // 128, dtype=float32)
        tensors["down_scales"] = random(EXPERTS, HIDDEN // 128, INTER // 128, dtype=float32)
    return tensors


def experts_times(report: Report) -> None:
    for scaled in (False, True):
        for tokens in (1, 8, 64, 256, 1024, 8192):
            case = f"moe {'fp8' if scaled else 'bf16'} {tokens}"
            report.guarded(case, "", functools.partial(experts_case, report, case, tokens, scaled))


def experts_case(report: Report, case: str, tokens: int, scaled: bool) -> None:
    bench = report.bench
    tensors = mixture(bench, tokens, scaled)

    def on(n: int) -> dict[str, Any]:
        layer = n % MOE_LAYERS
        return {**tensors, "gate_up": tensors["gate_up"][layer], "down": tensors["down"][layer], "eps": 1e-6}

    def tiled(first: experts.Tile, second: experts.Tile, n: int) -> list[Command]:
        args = on(n)
        hidden = Scratch(args["x"].shape, bfloat16)
        call = experts.Call(
            args["x"], hidden, args["expert_ids"], args["expert_weights"], args["gate_up"], args["down"],
            args.get("gate_up_scales"), args.get("down_scales"),
        )  # fmt: skip
        return list(experts.launches(call, first, second))

    workload = Workload(tokens, tokens, 0, 0)
    variants: list[Variant] = [("as chosen", lambda n: op_commands(bench, on(n)))]
    for tile in TALL if tokens * CHOSEN <= 32 * EXPERTS else WIDE:
        deep = dataclasses.replace(tile, bk=min(tile.bk, 128))
        variants.append((f"{tile}"[4:], functools.partial(tiled, tile, deep)))
    report.time(case, variants, experts_add.cost(workload, **on(0)), MOE_LAYERS * 2, parts=False)


def op_commands(bench: Bench, args: dict[str, Any]) -> list[Command]:
    return list(experts_add.plan(bench.target, args))


def parts() -> Iterator[tuple[str, Callable[[Report], None]]]:
    yield "delta check", delta_checks
    yield "delta", delta_times
    yield "attend", attend_times
    yield "fp8", scaled_times
    yield "moe", experts_times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="parts whose name contains one of these, comma between them"
    )
    parser.add_argument("--json", help="write the results to a file")
    options = parser.parse_args()
    bench = Bench()
    print(
        f"{bench.device.name}, sm_{bench.target.arch}, {bench.target.num_sms} SMs, cuBLASLt {bench.target.cublas}"
    )
    report = Report(bench, options.only)
    for name, part in parts():
        if any(word in name for word in options.only.split(",")):
            report.guarded(name, "", functools.partial(part, report))
    if options.json:
        text = json.dumps(dataclasses.asdict(bench.target) | {"results": report.results}, indent=2)
        Path(options.json).write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
