"""Programmatic launches: each kernel that may start early waits before it reads what the kernel ahead writes."""

import dataclasses
import importlib
import inspect
from importlib.resources import files

import numpy as np
import pytest

from openinfer.kernels import (
    H200,
    CudaSpec,
    NullPack,
    Store,
    experts_add,
    gate_up_silu,
    linear_add,
    norm_linear,
    norm_rope_attend,
    route_topk,
)
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.norms import norm
from openinfer.kernels.op.reference import normed
from openinfer.kernels.packs.cuda import LaunchPack
from openinfer.kernels.packs.interp import InterpDriver
from openinfer.kernels.testing import INTERPRETED, of_the_day
from openinfer.tensor import Tensor, bfloat16, float8_e4m3fn, float32, int32

TARGET = dataclasses.replace(H200, nvrtc=True)


def early_launches(arena, rows, drafts, norm_rope_args):
    """The early ones of a layer of Qwen3-4B whose rows have `drafts` drafts."""
    pack, tokens = NullPack(TARGET), rows * (1 + drafts)
    hidden, qkv, heads, inter = 2560, 6144, 4096, 9728
    x, gain = arena.alloc((tokens, hidden), bfloat16), arena.alloc((hidden,), bfloat16)
    shapes = (qkv, hidden), (hidden, heads), (2 * inter, hidden), (hidden, inter)
    weights = [arena.alloc(shape, bfloat16) for shape in shapes]
    out, attended, mlp = (arena.alloc((tokens, n), bfloat16) for n in (qkv, heads, inter))
    norm_linear(pack, out=out, x=x, norm_weight=gain, weight=weights[0], eps=1e-6)
    args = norm_rope_args([1 + drafts] * rows, [40] * rows, heads=32, kv_heads=8, dim=128, page_size=16)
    args["kv"] = np.zeros((args["block_tables"].max() + 1, 2, 8, 16, 128), bfloat16)
    tensors = {k: Tensor.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in args.items()}
    norm_rope_attend(pack, **tensors)
    linear_add(pack, x=x, h=attended, weight=weights[1])
    gate_up_silu(pack, out=mlp, x=x, norm_weight=gain, weight=weights[2], eps=1e-6)
    linear_add(pack, x=x, h=mlp, weight=weights[3])
    return [c for call in pack.calls for c in call.commands if getattr(c, "early", False)]


def waits(spec):
    """Whether a kernel waits for the one ahead."""
    if isinstance(spec, CudaSpec):
        return "griddepcontrol.wait" in (files(spec.module) / spec.file).read_text()
    kernel = getattr(importlib.import_module(spec.module), spec.function).fn
    begun = inspect.getsource(kernel.__globals__["start_next"].fn)
    assert "    if EARLY:\n        gdc_launch_dependents()\n        gdc_wait()\n" in begun
    return "    start_next(EARLY)\n" in inspect.getsource(kernel)


@pytest.mark.parametrize(
    ("rows", "drafts", "names"),
    [
        (1, 0, {"gemv_ring"}),
        (1, 1, {"gemv_ring_tokens", "qk_norm_rope_write", "attend_short"}),
        (8, 0, {"cluster_product", "rms_norm"}),
        (8, 3, {"cluster_product", "rms_norm", "qk_norm_rope_write", "attend_short"}),
        (96, 0, {"cluster_product", "rms_norm"}),
        (200, 0, set()),
    ],
)
def test_each_kernel_that_may_start_early_waits(arena, norm_rope_args, rows, drafts, names):
    found = early_launches(arena, rows, drafts, norm_rope_args)
    assert {launch.spec.function for launch in found} == names
    for launch in found:
        assert isinstance(launch.spec, CudaSpec) or dict(launch.spec.constants)["EARLY"]
        assert waits(launch.spec)


@pytest.mark.parametrize("coding", of_the_day(["block", "token"]))
def test_kernels_that_make_codes_wait_too(arena, cubins, coding):
    pack, tokens, n, k = NullPack(TARGET), 8, 6144, 2560
    x, gain, out = (arena.alloc(shape, bfloat16) for shape in ((tokens, k), (k,), (tokens, n)))
    blocks = (n // 128, k // 128) if coding == "block" else (n, 1)
    more = {"weight": Linear(arena.alloc((n, k), float8_e4m3fn), arena.alloc(blocks, float32), coding)}
    norm_linear(pack, out=out, x=x, norm_weight=gain, eps=1e-6, **more)
    linear_add(pack, x=out, h=x, **more)
    specs = [c.spec for call in pack.calls for c in call.commands if c.early]
    names = [spec.function for spec in specs]
    assert names == ["norm_codes", "cluster_product", "code_rows", "cluster_product"]
    for spec in specs[::2]:
        assert waits(spec)
    assert Store(90, cubins, folders=[]).prepare(specs[::2])[0] == 2


@pytest.mark.parametrize(
    ("tokens", "dtype"), of_the_day([(n, dtype) for dtype in (bfloat16, float8_e4m3fn) for n in (1, 16)])
)
def test_all_kernels_of_a_mixture_but_its_products_start_early_and_wait(arena, cubins, tokens, dtype):
    pack, (count, chosen, hidden, inter) = NullPack(TARGET), (64, 8, 2048, 512)

    def weight(n, k):
        blocks = arena.alloc((count, n // 128, k // 128), float32) if dtype != bfloat16 else None
        return Linear(arena.alloc((count, n, k), dtype), blocks)

    x, gain = arena.alloc((tokens, hidden), bfloat16), arena.alloc((hidden,), float32)
    ids, weights = arena.alloc((tokens, chosen), int32), arena.alloc((tokens, chosen), bfloat16)
    logits, slots = arena.alloc((tokens, count), bfloat16), arena.alloc((tokens,), int32)
    more = {"expert_ids": ids, "expert_weights": weights}
    route_topk(pack, **more, logits=logits, token_slots=slots, first_expert=0, num_experts=count)
    gate_up, down = weight(2 * inter, hidden), weight(hidden, inter)
    experts_add(pack, x=x, norm_weight=gain, eps=1e-6, gate_up=gate_up, down=down, **more)
    commands = [c for call in pack.calls for c in call.commands]
    early = [command.spec for command in commands if command.early]
    ring = {"experts_ring"} if tokens > 1 and dtype != bfloat16 else set()  # of few pairs of float8
    several = {"sort_pairs", "add_chosen"} if tokens > 1 else set()
    assert {spec.function for spec in early} == {"route_topk", "rms_norm"} | several | ring
    late = {c.spec.function.split("_")[0] for c in commands if not c.early}
    assert late == (set() if ring else {"experts"})
    for spec in early:
        assert waits(spec)
    assert Store(90, cubins, folders=[]).prepare(pack.specs())[0] == len(pack.specs())


def test_a_norm_that_starts_early_is_the_norm(normal, monkeypatch):
    device = importlib.import_module("openinfer.kernels.device.norm")
    for name in ("gdc_launch_dependents", "gdc_wait"):  # a kernel ahead has always ended
        monkeypatch.setattr(device, name, lambda: None)
    x, gain = normal(5, 96), normal(96)
    out = np.full_like(x, np.nan)
    tensors = [Tensor.from_numpy(array) for array in (out, x, gain)]
    pack = LaunchPack(INTERPRETED, InterpDriver(), None, None)
    pack.submit("norm", [norm(*tensors, 1e-6, early=True)])
    np.testing.assert_array_equal(out, normed(x, gain, 1e-6))
