"""Gate, up and SiLU of many tokens by one kernel of CUDA C++: which calls take it, its resources and its results."""

import dataclasses

import numpy as np
import pytest

from openinfer.kernels import H200, CudaSpec, NullPack, Store, Target, gate_up_silu
from openinfer.kernels.op.target import shared_bytes
from openinfer.kernels.testing import copied, run_on_gpu, run_reference
from openinfer.tensor import bfloat16, float32

TARGET = dataclasses.replace(H200, nvrtc=True)


def commands(arena, tokens, *, target=TARGET, hidden=2560, width=9728):
    """The commands of gate_up_silu."""
    pack = NullPack(target)
    x, gain = arena.alloc((tokens, hidden), bfloat16), arena.alloc((hidden,), bfloat16)
    out, weight = arena.alloc((tokens, width), bfloat16), arena.alloc((2 * width, hidden), bfloat16)
    gate_up_silu(pack, out=out, x=x, norm_weight=gain, weight=weight, eps=1e-6)
    return [command for call in pack.calls for command in call.commands]


@pytest.mark.parametrize(
    ("tokens", "target", "takes"),
    [
        (2048, TARGET, True),
        (512, TARGET, True),
        (511, TARGET, False),
        (2048, H200, False),
        (2048, dataclasses.replace(TARGET, batch_invariant=True), False),
        (2048, dataclasses.replace(TARGET, arch=100), False),
    ],
)
def test_many_tokens_take_the_kernel_on_hopper(arena, tokens, target, takes):
    found = [getattr(command, "spec", None) for command in commands(arena, tokens, target=target)]
    assert any(isinstance(spec, CudaSpec) for spec in found) == takes


def test_it_compiles_without_spills(arena, tmp_path, resources):
    specs = [c.spec for c in commands(arena, 2048) if isinstance(getattr(c, "spec", None), CudaSpec)]
    kernels = Store(90, tmp_path, folders=[])
    kernels.prepare(specs)
    (compiled,) = map(kernels.get, specs)
    used = resources(compiled.cubin)
    assert compiled.shared <= shared_bytes(90)
    assert used["LOCAL"] == 0
    assert used["STACK"] <= 8
    assert used["REG"] * specs[0].threads <= 65536


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [512, 700, 2048])
@pytest.mark.parametrize(("hidden", "width"), [(512, 1024), (1024, 3072), (2560, 9728)])
def test_it_agrees_with_the_reference_and_repeats_its_bits(gpu, rng, normal, tokens, hidden, width):
    target, driver, _, stream = gpu
    if target.arch != 90:
        pytest.skip("the kernel is for sm_90")
    target = Target(target.arch, target.num_sms, target.cublas, target.gpu, nvrtc=True)
    args = {"out": normal(tokens, width), "x": normal(tokens, hidden)}
    args["weight"] = normal(2 * width, hidden, scale=hidden**-0.5)
    commands = gate_up_silu.plan(target, gate_up_silu.args(**copied(args)[1]))
    assert [type(command.spec) for command in commands] == [CudaSpec]
    found = [run_on_gpu(gate_up_silu, args, target, driver, stream)["out"] for _ in range(2)]
    np.testing.assert_array_equal(found[0], found[1])
    some = np.unique(np.r_[0, 63, 64, 127, 128, tokens - 1, rng.integers(0, tokens, 40)])
    few = {**args, "x": args["x"][some].copy(), "out": args["out"][some].copy()}
    want, got = run_reference(gate_up_silu, few)["out"].astype(float32), found[0][some].astype(float32)
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert error.max() < 5e-3
