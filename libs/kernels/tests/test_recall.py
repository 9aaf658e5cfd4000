"""Calls that came before: their commands serve calls at other addresses, and only those that they fit."""

import dataclasses

import numpy as np
import pytest

from openinfer.kernels import H200, Cost, Op, Target, apply_writes, launch, linear_add, norm_linear
from openinfer.kernels.op import packing
from openinfer.kernels.op.op import call_key
from openinfer.kernels.packs import cuda as recall
from openinfer.kernels.packs.cuda import LaunchPack
from openinfer.tensor import Arena, Device, Tensor, bfloat16, float32

PLAIN = Target(90, 132)
NULL = Device("null")


class Recorder:
    """Writes down every launch with all its parameters, tensor maps as the address that they are of."""

    def __init__(self):
        self.records = []

    def encode_tensor_map(self, spec, tensor_map, address, index):
        return address.to_bytes(8, "little").ljust(128, b"\1")

    def launch(self, spec, grid, parameters, early):
        codes = enumerate(packing._fields(spec))
        self.records.append((spec, grid, [parameters.read(i, packing._SIZES[code]) for i, code in codes]))

    def matmul(self, command, operands, workspace):
        self.records.append((command.out.shape, command.accumulate, *operands, workspace))


def pack(target=PLAIN):
    arena = Arena(NULL, None)
    return LaunchPack(target, Recorder(), arena.alloc((64 << 20,), "uint8"), arena.alloc((1 << 20,), "uint8"))


def args_of_norm_linear(arena, m=3):
    return {
        "out": arena.alloc((m, 96), bfloat16), "x": arena.alloc((m, 64), bfloat16),
        "norm_weight": arena.alloc((64,), bfloat16), "weight": arena.alloc((96, 64), bfloat16), "eps": 1e-6,
    }  # fmt: skip


@pytest.mark.parametrize("target", [PLAIN, H200])
@pytest.mark.parametrize("m", [1, 3, 100, 600])
def test_a_call_at_other_addresses_launches_what_planning_it_would(monkeypatch, target, m):
    arena = Arena(NULL, None)
    calls = [args_of_norm_linear(arena, m) for _ in range(3)]
    seen = pack(target)
    planned = 0
    plan = Op.plan

    def counted(self, target, args):
        nonlocal planned
        planned += 1
        return plan(self, target, args)

    monkeypatch.setattr(Op, "plan", counted)
    for args in calls:
        norm_linear(seen, **args)
    assert planned == 1
    monkeypatch.setattr(recall, "MOST", 0)  # nothing is remembered
    fresh = LaunchPack(target, Recorder(), *seen._workspace)
    for args in calls:
        norm_linear(fresh, **args)
    assert planned == 4
    assert len(seen.driver.records) >= 3
    assert seen.driver.records == fresh.driver.records


def test_values_shapes_alignment_and_sameness_are_part_of_what_a_call_is():
    arena = Arena(NULL, None)
    args = args_of_norm_linear(arena)
    key = call_key(norm_linear, args)
    assert key == call_key(norm_linear, args_of_norm_linear(arena))
    assert key != call_key(norm_linear, args_of_norm_linear(arena, 4))
    assert key != call_key(norm_linear, {**args, "eps": 1e-5})
    assert key != call_key(norm_linear, {**args, "x": arena.alloc((3, 96), bfloat16)[:, :64]})
    odd = arena.alloc((4, 64), bfloat16)
    shifted = Tensor(odd.ptr + 16, (3, 64), bfloat16, NULL)
    assert key != call_key(norm_linear, {**args, "x": shifted})
    x, h, weight = (
        arena.alloc((3, 64), bfloat16),
        arena.alloc((3, 64), bfloat16),
        arena.alloc((64, 64), bfloat16),
    )
    apart = call_key(linear_add, {"x": x, "h": h, "weight": weight})
    assert apart != call_key(linear_add, {"x": x, "h": x, "weight": weight})
    assert apart != call_key(apply_writes, {"x": x, "h": h, "weight": weight})


def test_an_int_is_not_a_float_that_is_equal():
    assert call_key(norm_linear, {"window": 1}) != call_key(norm_linear, {"window": 1.0})


def test_a_view_inside_an_argument_is_found_again():
    arena = Arena(NULL, None)

    def launches(target, a):
        yield launch("m", "f", (1,), {"head": a.x, "tail": a.x[2:]}, {})

    op = Op(
        "op",
        dataclasses.make_dataclass("Args", ["x"]),
        check=lambda _: None,
        reference=lambda _: None,
        launches=launches,
        cost=lambda w, _: Cost(0, 0),
    )
    p = pack()
    tensors = [arena.alloc((4, 8), float32) for _ in range(2)]
    for x in tensors:
        op(p, x=x)
    for x, (_, _, parameters) in zip(tensors, p.driver.records, strict=True):
        assert [int.from_bytes(value, "little") for value in parameters[:2]] == [x.ptr, x.ptr + 64]


def test_a_tensor_inside_a_value_is_found_again_and_is_part_of_what_a_call_is():
    arena = Arena(NULL, None)
    outer = dataclasses.make_dataclass("Outer", ["x", "layers"])

    def launches(target, a):
        yield launch("m", "f", (1,), {"second": a.layers[1]["w"]}, {})

    op = Op(
        "op", outer, check=lambda _: None, reference=print, launches=launches, cost=lambda w, _: Cost(0, 0)
    )
    p, x = pack(), arena.alloc((4,), float32)
    calls = [[{"w": arena.alloc((4, 8), float32)} for _ in range(2)] for _ in range(2)]
    for layers in calls:
        op(p, x=x, layers=layers)
    found = [int.from_bytes(parameters[0], "little") for _, _, parameters in p.driver.records]
    assert found == [layers[1]["w"].ptr for layers in calls]
    keys = {call_key(op, op.args(x=x, layers=layers)) for layers in calls}
    assert len(keys) == 1
    assert call_key(op, op.args(x=x, layers=calls[0][:1] * 2)) not in keys
    assert call_key(op, op.args(x=x, layers=calls[0][:1])) not in keys


def test_a_tensor_that_no_argument_or_more_than_one_holds_is_planned_anew():
    arena = Arena(NULL, None)
    own, x = arena.alloc((8,), float32), arena.alloc((8,), float32)
    at = launch("m", "f", (1,), {"x": x[4:]}, {})
    assert recall.sources([at], {"x": x}) == {id(at.args[0]): (0, 16)}
    assert recall.sources([at], {"own": own}) is None
    assert recall.sources([at], {"x": x, "y": x[2:]}) is None  # which of the two moves with it?
    assert recall.sources([at], {"x": x, "y": x}) is not None  # the same memory in every such call
    inner = x[2:]
    passed_on = launch("m", "f", (1,), {"x": inner, "y": x}, {})
    assert recall.sources([passed_on], {"x": x, "y": inner}) == {id(inner): (1, 0), id(x): (0, 0)}
    empty = Tensor(x.ptr, (0,), np.dtype("float32"), NULL)
    assert recall.sources([at], {"x": empty}) is None
