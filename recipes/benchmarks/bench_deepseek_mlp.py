"""Measure the kernels of DeepSeek-V4's projections, experts, router and hyper-connections on this GPU.

    python recipes/benchmarks/bench_deepseek_mlp.py                        every op, V4-Flash shapes
    python recipes/benchmarks/bench_deepseek_mlp.py --only experts,hc      ops whose names contain one of these
    python recipes/benchmarks/bench_deepseek_mlp.py --tiles --tokens 1 32  the experts' tiles beside each other

Times are medians of a CUDA graph of calls that rotate among copies of the weights, so that the L2 cache does not serve
them. `floor`: the op's cost at 4.59 TB/s and 990 TFLOP/s, what an H200 reads and what it multiplies in bf16. An op's
kernels are timed by leaving out those after them.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from openinfer.kernels import GPUS, H200, Command, Cost, KernelsError, Launch, Op, Target, Workload
from openinfer.kernels import packed_experts as mixture
from openinfer.kernels.formats import q8
from openinfer.kernels.ops.experts import experts
from openinfer.kernels.ops.project import gate_up_clamped, project
from openinfer.kernels.ops.route import route
from openinfer.kernels.tuner import DeviceMeter
from openinfer.recipes.deepseek_v4.ops.hyper_connections import hc_head, hc_post, hc_pre
from openinfer.tensor import Tensor, bfloat16, float8_e4m3fn, float32, int32, uint8

BANDWIDTH, FLOPS = GPUS[H200.gpu].measured.bytes_per_s, GPUS[H200.gpu].peak.flops_per_s
COLD = 300 << 20
"""Bytes that the copies of an op's weights have together, at least."""

WIDTH, INTER, EXPERTS, CHOSEN, VOCABULARY = 4096, 2048, 256, 6, 129280
PROJECTIONS = {  # rows, columns, groups, float8, output
    "project wq_a wkv": (1536, 4096, 1, True, bfloat16),
    "project wq_b": (32768, 1024, 1, True, bfloat16),
    "project indexer.wq_b": (8192, 1024, 1, True, bfloat16),
    "project wo_a": (8192, 4096, 8, True, bfloat16),
    "project wo_b": (4096, 8192, 1, True, bfloat16),
    "project csa": (2048 + 512 + 64, 4096, 1, False, float32),
    "project hca": (1024, 4096, 1, False, float32),
    "project router": (256, 4096, 1, False, float32),
    "project shared down": (4096, 2048, 1, True, bfloat16),
}

New = Callable[..., Tensor]
"""new(shape, dtype, make): a tensor with the values that make(shape) gives."""


class Case(NamedTuple):
    """An op, and its arguments on the n-th copy of its weights."""

    name: str
    op: Op[Any]
    args: Sequence[dict[str, Any]]


def normal(rng: np.random.Generator, scale: float) -> Callable[[tuple[int, ...]], np.ndarray]:
    return lambda shape: rng.standard_normal(shape, np.float32) * np.float32(scale)


def rounded(rng: np.random.Generator) -> Callable[[tuple[int, ...]], np.ndarray]:
    """What q8 leaves of normal numbers."""
    return lambda shape: q8(rng.standard_normal(shape, np.float32), 128)


def codes(rng: np.random.Generator, low: int, high: int) -> Callable[[tuple[int, ...]], np.ndarray]:
    return lambda shape: rng.integers(low, high, shape, np.uint8)


def float8(rng: np.random.Generator) -> Callable[[tuple[int, ...]], np.ndarray]:
    """Float8 numbers of all signs and sizes up to 1."""
    return lambda shape: (
        rng.integers(0, 2, shape, np.uint8) << 7 | rng.integers(0, 57, shape, np.uint8)
    ).view(float8_e4m3fn)


def copies(nbytes: int) -> int:
    return max(1, min(40, math.ceil(COLD / nbytes)))


def projections(tokens: int, new: New, rng: np.random.Generator) -> Iterator[Case]:
    for name, (n, k, groups, packed, kind) in PROJECTIONS.items():
        rounds = packed and groups == 1
        x = new((tokens, groups * k), bfloat16, rounded(rng) if rounds else normal(rng, 1))
        out = new((tokens, n), kind, None)
        args = []
        for _ in range(copies(n * k * (1 if packed else 2))):
            weight = new(
                (n, k), float8_e4m3fn if packed else bfloat16, float8(rng) if packed else normal(rng, k**-0.5)
            )
            scales = new((-(-n // 128), k // 128), uint8, codes(rng, 118, 121)) if packed else None
            args.append(
                {
                    "out": out,
                    "x": x,
                    "weight": weight,
                    "scales": scales,
                    "groups": groups,
                    "rounded_x": rounds,
                }
                | {"quantized": False}
            )
        yield Case(name, project, args)


def shared_gate(tokens: int, new: New, rng: np.random.Generator) -> Iterator[Case]:
    x, out = new((tokens, WIDTH), bfloat16, rounded(rng)), new((tokens, INTER), bfloat16, None)
    args = []
    for _ in range(copies(2 * INTER * WIDTH)):
        weight = new((2 * INTER, WIDTH), float8_e4m3fn, float8(rng))
        scales = new((2 * INTER // 128, WIDTH // 128), uint8, codes(rng, 118, 121))
        args.append(
            {"out": out, "x": x, "weight": weight, "scales": scales, "limit": 10.0, "quantized": True}
        )
    yield Case("gate_up_clamped", gate_up_clamped, args)


def hyper_connections(tokens: int, new: New, rng: np.random.Generator) -> Iterator[Case]:
    args: dict[str, list[dict[str, Any]]] = {"hc_pre": [], "hc_post": [], "hc_head": []}
    out, rounded = (new((tokens, WIDTH), bfloat16, None) for _ in range(2))
    mix = new((tokens, 20), float32, lambda shape: rng.uniform(0, 0.3, shape))
    norm = new((WIDTH,), float32, lambda shape: np.ones(shape))
    for _ in range(copies(24 * 4 * WIDTH * 4 + tokens * 4 * WIDTH * 2)):
        streams = new((tokens, 4, WIDTH), bfloat16, normal(rng, 1))
        fn = new((24, 4 * WIDTH), float32, normal(rng, (4 * WIDTH) ** -0.5))
        base, scale = new((24,), float32, normal(rng, 1)), new((3,), float32, normal(rng, 1))
        both = {"streams": streams, "eps": 1e-6, "hc_eps": 1e-6}
        args["hc_pre"].append({
            "out": out, "rounded_out": rounded, "mix": mix, "fn": fn, "base": base, "scale": scale, "norm_weight": norm,
            "iters": 20, **both,
        })  # fmt: skip
        args["hc_post"].append({"streams": streams, "y": rounded, "mix": mix})
        args["hc_head"].append({"out": out, "fn": fn[:4], "base": base[:4], "scale": scale[:1], **both})
    for name, op in (("hc_pre", hc_pre), ("hc_post", hc_post), ("hc_head", hc_head)):
        yield Case(name, op, args[name])


def routers(tokens: int, new: New, rng: np.random.Generator) -> Iterator[Case]:
    table = new((VOCABULARY, CHOSEN), int32, lambda shape: rng.integers(0, EXPERTS, shape))
    args = {
        "expert_ids": new((tokens, CHOSEN), int32, None),
        "expert_weights": new((tokens, CHOSEN), float32, None),
        "logits": new((tokens, EXPERTS), float32, normal(rng, 1)),
        "token_ids": new((tokens,), int32, lambda shape: rng.integers(0, VOCABULARY, shape)),
        "token_slots": new((tokens,), int32, lambda shape: np.ones(shape)),
        "scaling": 1.5, "first_expert": 0, "num_experts": EXPERTS,
    }  # fmt: skip
    bias = new((EXPERTS,), float32, normal(rng, 0.1))
    yield Case("route learned", route, [args | {"bias": bias, "table": None}])
    yield Case("route hash", route, [args | {"bias": None, "table": table}])


def mixtures(tokens: int, new: New, rng: np.random.Generator, packed: bool) -> Iterator[Case]:
    """One layer, and as many choices of experts as it takes for the L2 cache."""
    n, k = (2 * INTER, WIDTH), (WIDTH, INTER)
    weights: dict[str, Any] = {}
    for name, (rows, columns) in (("gate_up", n), ("down", k)):
        if packed:
            weights[name] = new((EXPERTS, rows, columns // 2), uint8, codes(rng, 0, 256))
            weights[name + "_scales"] = new((EXPERTS, rows, columns // 32), uint8, codes(rng, 117, 120))
        else:
            weights[name] = new((EXPERTS, rows, columns), float8_e4m3fn, float8(rng))
            weights[name + "_scales"] = new(
                (EXPERTS, rows // 128, columns // 128), uint8, codes(rng, 118, 121)
            )
    fixed: dict[str, Any] = {
        "out": new((tokens, WIDTH), bfloat16, None),
        "x": new((tokens, WIDTH), bfloat16, rounded(rng)),
        "shared": new((tokens, WIDTH), bfloat16, normal(rng, 1)),
        "expert_weights": new((tokens, CHOSEN), float32, lambda shape: rng.uniform(0.1, 0.4, shape)),
        "limit": 10.0, "quantized": True,
    }  # fmt: skip
    args = []
    order = rng.permutation(EXPERTS)
    for copy in range(12 if tokens < 16 else 2):
        if tokens == 1:  # other experts in every copy
            chosen = np.roll(order, copy * CHOSEN)[None, :CHOSEN]
        else:
            chosen = np.stack([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(tokens)])
        ids = new(chosen.shape, int32, lambda shape, chosen=chosen: chosen)
        args.append({**fixed, **weights, "expert_ids": ids})
    yield Case("experts fp4" if packed else "experts float8", experts, args)


def cases(tokens: int, new: New, only: Sequence[str]) -> Iterator[Case]:
    rng = np.random.default_rng(tokens)
    makers: dict[str, Callable[[int, New, np.random.Generator], Iterator[Case]]] = {
        "project": projections,
        "gate_up_clamped": shared_gate,
        "hc": hyper_connections,
        "route": routers,
        "experts fp4": functools.partial(mixtures, packed=True),
        "experts float8": functools.partial(mixtures, packed=False),
    }
    for name, make in makers.items():
        if any(word in name for word in only):
            yield from make(tokens, new, rng)


def on_device(meter: DeviceMeter) -> New:
    """Tensors whose values are those of a block, again and again."""

    def new(shape: tuple[int, ...], dtype: Any, make: Any) -> Tensor:
        tensor = Tensor.empty(shape, dtype, meter.device)
        if make is None:
            tensor.zero_(meter.stream)
            meter.stream.synchronize()
            return tensor
        whole = tensor.numel <= 1 << 20
        block = np.ascontiguousarray(make(shape if whole else (1 << 20,)).astype(tensor.dtype)).reshape(-1)
        flat = tensor.reshape(-1)
        flat[: block.size].copy_from(block, meter.stream)
        filled = block.size
        while filled < tensor.numel:  # doubling: what is there once more
            part = min(filled, tensor.numel - filled)
            flat[filled : filled + part].copy_from(flat[:part], meter.stream)
            filled += part
        meter.stream.synchronize()
        return tensor

    return new


def line(case: str, variant: str, seconds: float, cost: Cost | None) -> dict[str, Any]:
    """Print a time; its entry of the JSON."""
    text = f"{case:30} {variant:40} {seconds * 1e6:9.2f} us"
    entry: dict[str, Any] = {"case": case, "variant": variant, "us": seconds * 1e6}
    if cost is not None:
        floor = cost.floor_s(BANDWIDTH, FLOPS)
        text += f"  {cost.bytes / seconds / 1e9:6.0f} GB/s {cost.flops / seconds / 1e12:6.1f} TFLOP/s"
        text += f"  floor {floor * 1e6:8.2f} us = {floor / seconds:4.0%}"
        entry |= {
            "bytes": cost.bytes,
            "flops": cost.flops,
            "floor_us": floor * 1e6,
            "fraction": floor / seconds,
        }
    print(text, flush=True)
    return entry


def measure(
    meter: DeviceMeter, label: str, variant: str, made: list[list[Command]], cost: Cost, *, parts: bool = True
) -> list[Any]:
    """The time of an op and, with `parts`, of each of its kernels: what it adds to those before it."""
    meter.store.prepare([c.spec for c in made[0] if isinstance(c, Launch)])
    entries, before = [], 0.0
    for count in range(1 if parts else len(made[0]), len(made[0]) + 1):
        calls = [functools.partial(meter.pack.submit, label, commands[:count]) for commands in made]
        seconds = meter.seconds(calls)
        if parts and len(made[0]) > 1:
            spec = getattr(made[0][count - 1], "spec", None)
            entries.append(
                line(label, f"  of it {spec.function if spec else 'cuBLASLt'}", seconds - before, None)
            )
        before = seconds
    entries.append(line(label, variant, before, cost))
    return entries


TILES: list[tuple[Any, ...]] = [
    (64, 16, 4, 4), (128, 16, 4, 4), (64, 16, 4, 3, "coded_product", 2), (64, 16, 4, 4, "coded_product", 2),
    (64, 16, 4, 4, "coded_product"), (128, 16, 4, 3, "coded_product", 2), (128, 32, 8, 4, "fp4_product"),
]  # fmt: skip
WIDE_TILES: list[tuple[Any, ...]] = [
    (128, 64, 8, 3), (128, 128, 4, 3), (128, 32, 8, 4, "fp4_product"), (128, 64, 8, 4, "fp4_product"),
    (128, 128, 8, 4, "fp4_product"), (64, 64, 4, 3, "coded_product", 2), (64, 128, 4, 3, "coded_product"),
]  # fmt: skip


def tiles(meter: DeviceMeter, tokens: int) -> Iterator[Any]:
    """The experts' tiles beside each other, FP4."""
    (case,) = mixtures(tokens, on_device(meter), np.random.default_rng(tokens), True)
    cost = experts.cost(Workload(tokens, tokens, 0, 0), **case.args[0])
    for tile in TILES if tokens <= 512 else WIDE_TILES:
        found = mixture.Tile(*tile)
        try:
            made = [list(mixture.launches(meter.target, mixture.Call(**a), found)) for a in case.args]
            yield from measure(meter, f"experts fp4 {tokens}", f"{found}", made, cost, parts=False)
        except (KernelsError, RuntimeError) as e:
            print(f"experts fp4 {tokens} {found} FAILED {type(e).__name__}: {str(e)[:300]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="ops whose name contains one of these, comma between them")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 4096])
    parser.add_argument("--tiles", action="store_true", help="the experts' tiles, beside each other")
    parser.add_argument("--json", type=Path, help="write the results to a file")
    options = parser.parse_args()
    meter = DeviceMeter()
    target: Target = meter.target
    print(f"{meter.device.name}, sm_{target.arch}, {target.num_sms} SMs, cuBLASLt {target.cublas}")
    results: list[Any] = []
    for tokens in options.tokens:
        if options.tiles:
            results += tiles(meter, tokens)
            continue
        workload = Workload(tokens, tokens, 0, 0)
        for name, op, args in cases(tokens, on_device(meter), options.only.split(",")):
            made = [op.plan(target, a) for a in args]
            results += measure(meter, f"{name} {tokens}", "all", made, op.cost(workload, **args[0]))
    if options.json:
        options.json.write_text(json.dumps({"gpu": meter.device.name, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
