"""The packs: what each does with the same call."""

from dataclasses import dataclass, make_dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from openinfer.kernels import (
    H200,
    ContractError,
    Cost,
    CpuPack,
    InterpDriver,
    LaunchError,
    LaunchPack,
    NullPack,
    Op,
    Scratch,
    Target,
    Workload,
    embed,
    gate_up_silu,
    launch,
    linear_add,
    norm_linear,
)
from openinfer.kernels.packs.null import place
from openinfer.tensor import Arena, Device, Tensor, bfloat16, float32, uint8

PLAIN = Target(90, 132)


def args_of_norm_linear(arena, tokens=3, hidden=64, out=96):
    return {
        "out": arena.alloc((tokens, out), bfloat16),
        "x": arena.alloc((tokens, hidden), bfloat16),
        "norm_weight": arena.alloc((hidden,), bfloat16),
        "weight": arena.alloc((out, hidden), bfloat16),
        "eps": 1e-6,
    }


class Recorder:
    """A driver that writes down what it is given."""

    def __init__(self):
        self.launched = []
        self.products = []

    def encode_tensor_map(self, spec, tensor_map, address, index):
        return bytes(128)

    def launch(self, spec, grid, parameters, early):
        self.launched.append(
            (spec.function, grid, [int.from_bytes(parameters.read(i, 8), "little") for i in range(2)])
        )

    def matmul(self, command, operands, workspace):
        self.products.append((command, *operands, workspace))


def test_null_records_calls_kernels_and_workspace(arena):
    pack = NullPack(PLAIN)
    for tokens in (1, 3, 3):
        norm_linear(pack, **args_of_norm_linear(arena, tokens))
    assert [c.op.name for c in pack.calls] == ["norm_linear"] * 3
    assert [s.function for s in pack.specs()] == ["gemv", "rms_norm", "gemm_small"]
    assert pack.workspace_bytes(zeroed=False) == 512 + 256  # 3 x 64 normed bf16, and the unused parts
    assert pack.workspace_bytes(zeroed=True) == 256


def test_null_counts_no_workspace_before_the_first_call():
    assert NullPack(H200).workspace_bytes(zeroed=False) == 0


def test_cost_is_the_floor_of_a_call(arena):
    pack = NullPack(H200)
    linear_add(
        pack,
        x=arena.alloc((8, 64), bfloat16),
        h=arena.alloc((8, 32), bfloat16),
        weight=arena.alloc((64, 32), bfloat16),
    )
    cost = pack.calls[0].cost(Workload.decode(rows=5, context=100))  # 5 live rows in the bucket of 8
    assert cost == Cost(64 * 32 * 2 + 5 * (32 + 2 * 64) * 2, 2 * 5 * 64 * 32)
    assert cost.floor_s(1e9, 1e12) == cost.bytes / 1e9
    assert (cost + cost).flops == 2 * cost.flops


def test_workloads():
    assert Workload.decode(4, 10) == Workload(tokens=4, rows=4, kv_tokens=40, qk_pairs=40)
    assert Workload.prefill(3) == Workload(tokens=3, rows=1, kv_tokens=3, qk_pairs=6)


def test_scratches_of_a_call_do_not_overlap_and_regions_are_apart():
    a, b, z = Scratch((3,), float32), Scratch((65, 4), bfloat16), Scratch((2,), float32, zeroed=True)
    one = launch("m", "f", (1,), {"a": a, "z": z}, {})
    two = launch("m", "g", (1,), {"b": b, "a": a}, {})
    assert place([one, two]) == ({a: 0, z: 0, b: 256}, 256 + 768, 256)


def test_launching_passes_addresses_of_tensors_and_of_scratch(arena):
    args, recorder = args_of_norm_linear(arena), Recorder()
    scratch, zeroed = arena.alloc((4096,), "uint8"), arena.alloc((4096,), "uint8")
    norm_linear(LaunchPack(PLAIN, recorder, scratch, zeroed), **args)
    assert recorder.launched == [
        ("rms_norm", (3, 1, 1), [scratch.ptr, args["x"].ptr]),
        ("gemm_small", (2, 1, 1), [args["out"].ptr, scratch.ptr]),
    ]


def test_a_product_goes_to_the_driver_with_its_workspace(arena):
    recorder = Recorder()
    scratch, zeroed = arena.alloc((40 << 20,), "uint8"), arena.alloc((4096,), "uint8")
    args = args_of_norm_linear(arena, tokens=100)
    norm_linear(LaunchPack(H200, recorder, scratch, zeroed), **args)
    ((command, out, x, weight, workspace),) = recorder.products
    assert (out, x, weight) == (args["out"].ptr, scratch.ptr, args["weight"].ptr)
    assert workspace == scratch.ptr + 100 * 64 * 2
    assert not command.accumulate


def test_a_workspace_too_small_is_refused_before_anything_runs(arena):
    recorder = Recorder()
    with pytest.raises(LaunchError, match="norm_linear needs 768 bytes of scratch and 256 of zeroed"):
        norm_linear(LaunchPack(PLAIN, recorder, None, None), **args_of_norm_linear(arena))
    assert recorder.launched == []


@pytest.mark.parametrize("pack", [CpuPack(), NullPack(H200), LaunchPack(PLAIN, Recorder(), None, None)])
def test_every_pack_checks_the_contract(arena, pack):
    args = args_of_norm_linear(arena)
    args["norm_weight"] = arena.alloc((65,), bfloat16)
    with pytest.raises(ContractError, match=r"norm_weight has shape \(65,\); it must be \[64\]"):
        norm_linear(pack, **args)


def test_arguments_that_an_op_does_not_know_are_refused_with_those_it_has(arena):
    known = "embed takes out, token_ids, table by keyword, given "
    assert embed.__doc__.startswith("embed(pack, out, token_ids, table)")
    table = np.zeros((3, 16), np.float32)
    good = {"out": Tensor.from_numpy(table), "token_ids": Tensor.from_numpy(np.zeros(3, np.int32))}
    for pack in (CpuPack(), NullPack(PLAIN)):
        with pytest.raises(ContractError, match=f"{known}out, token_ids, weight"):
            embed(pack, **good, weight=Tensor.from_numpy(table))
        with pytest.raises(ContractError, match=f"{known}none"):
            embed(pack, *good.values())
        with pytest.raises(
            ContractError, match=r"embed: table must be a Tensor; Tensor\.from_numpy\(array\) shares"
        ):
            embed(pack, **good, table=table)
    embed(CpuPack(), **good, table=Tensor.from_numpy(table))


def test_arguments_that_may_be_left_out_are_not_missing(arena):
    args = args_of_norm_linear(arena)
    assert "eps?, lora?)" in norm_linear.__doc__
    with pytest.raises(ContractError, match="norm_linear: x must be a Tensor"):
        norm_linear(CpuPack(), **args | {"x": np.zeros((3, 64), np.float32)})
    with pytest.raises(ContractError, match=r"norm_linear takes out, x, .*lora\? by keyword, given out$"):
        norm_linear(CpuPack(), out=args["out"])


def test_a_mistake_inside_a_contract_is_no_contract_error():
    def check(a):
        len(a.out.no_such_thing)

    op = Op(
        "odd",
        make_dataclass("Args", ["out"]),
        check=check,
        reference=print,
        launches=lambda *_: [],
        cost=lambda *_: Cost(0, 0),
    )
    with pytest.raises(AttributeError, match="no_such_thing"):
        op(CpuPack(), out=Tensor.from_numpy(np.zeros(1, np.float32)))


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Nested:
    """out = the sum of all tensors."""

    out: Any
    pair: Pair
    layers: Any
    of: Any = None
    scale: float = 1.0


def test_tensors_inside_values_are_arrays_to_a_reference():
    def reference(a):
        assert (type(a.pair), type(a.layers), a.scale) == (Pair, tuple, 2.0)
        assert a.of["weight"].out is None
        a.out[:] = a.pair.first + a.pair.second + sum(a.layers) + a.of["weight"].pair.first

    op = Op(
        "sum",
        Nested,
        check=lambda a: None,
        reference=reference,
        launches=lambda *_: [],
        cost=lambda *_: Cost(0, 0),
    )
    out, *rest = (Tensor.from_numpy(np.full(2, n, np.float32)) for n in range(6))
    inner = Nested(out=None, pair=Pair(rest[4], None), layers=())
    op(CpuPack(), out=out, pair=Pair(*rest[:2]), layers=tuple(rest[2:4]), of={"weight": inner}, scale=2.0)
    assert out.numpy().tolist() == [15.0, 15.0]
    pack = NullPack(PLAIN)
    op(pack, out=rest[0], pair=Pair(*rest[:2]), layers=[np.zeros(2)])
    assert pack.calls[0].tokens == 2
    with pytest.raises(
        ContractError, match=r"sum takes out, pair, layers, of\?, scale\? by keyword, given out$"
    ):
        op(pack, out=out)


def test_an_array_inside_a_value_is_named():
    op = Op(
        "nested",
        Nested,
        check=lambda a: a.pair.second.is_contiguous,
        reference=print,
        launches=lambda *_: [],
        cost=lambda *_: Cost(0, 0),
    )
    with pytest.raises(ContractError, match=r"nested: pair\.second must be a Tensor"):
        op(CpuPack(), out=None, pair=Pair(None, np.zeros(2)), layers=())


def test_a_float32_model_runs_on_the_cpu(rng):
    x, gain = rng.standard_normal((2, 32)).astype(float32), np.ones(32, float32)
    weight = rng.standard_normal((64, 32)).astype(float32)
    out = np.empty((2, 32), float32)
    t = Tensor.from_numpy
    gate_up_silu(CpuPack(), out=t(out), x=t(x), norm_weight=t(gain), weight=t(weight), eps=1e-6)
    h = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
    g, u = np.split(h @ weight.T.astype(np.float64), 2, axis=1)
    np.testing.assert_allclose(out, g / (1 + np.exp(-g)) * u, rtol=1e-4, atol=1e-5)


def test_the_interpreter_counts_launches_and_has_no_cublas(normal):
    driver = InterpDriver()
    table, ids, out = normal(9, 16), np.array([3], np.int32), normal(1, 16)
    t = Tensor.from_numpy
    embed(LaunchPack(PLAIN, driver, None, None), out=t(out), token_ids=t(ids), table=t(table))
    assert driver.launched == {"rows.gather_rows[BLOCK=1024]w4s3": 1}
    null = Arena(Device("null"), None)
    x, h, weight = (null.alloc(s, bfloat16) for s in ((100, 64), (100, 64), (64, 64)))
    with pytest.raises(LaunchError, match="cublas=False"):
        linear_add(LaunchPack(H200, driver, null.alloc((40 << 20,), "uint8"), None), x=x, h=h, weight=weight)


def test_the_interpreter_must_be_asked_for_first(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(LaunchError, match="set TRITON_INTERPRET=1 before triton is imported"):
        InterpDriver()


def test_a_call_like_an_earlier_one_is_not_planned_again():
    planned = []

    def launches(target, args):
        planned.append(args.x.ptr)
        yield launch("m", "f", (1,), {"x": args.x, "n": Scratch((args.x.shape[0],), uint8)}, {})

    op, pack = Op("op", make_dataclass("One", ["x"]), lambda args: None, None, launches, None), NullPack(H200)
    x = Arena(Device("null"), None).alloc((512, 4), bfloat16)
    for view in (x[:256], x[:256], x[256:], x[:512], x[:256]):
        op(pack, x=view)
    assert planned == [x.ptr, x[256:].ptr, x.ptr]
    assert [call.commands[0].args[0].ptr for call in pack.calls] == [call.args.x.ptr for call in pack.calls]
    assert pack.workspace_bytes(zeroed=False) == 512
