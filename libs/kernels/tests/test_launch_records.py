"""What mixtures, packed products and routing launch for the published shapes, held by digests.

launch_records.json was written before these ops moved into this library. Kernels, grids, constants and scratch are
those that were measured on an H200. Whoever changes a launch on purpose writes the file again, with a measurement, by
`python libs/kernels/tests/test_launch_records.py`.
"""

import hashlib
import json
from pathlib import Path

import numpy as np

from openinfer.kernels import ContractError, Launch, NullPack, Scratch, Target, TensorMap
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.op.coded import Coded
from openinfer.kernels.op.launch import Aligned
from openinfer.kernels.ops.experts import experts
from openinfer.kernels.ops.experts_add import experts_add
from openinfer.kernels.ops.project import gate_up_clamped, norm_rows, project
from openinfer.kernels.ops.route import route, route_topk
from openinfer.tensor import Arena, Device, Tensor, bfloat16, float8_e4m3fn, float32, int32, uint8

RECORDS = Path(__file__).with_name("launch_records.json")
TOKENS = (1, 2, 3, 8, 16, 17, 33, 64, 65, 128, 129, 200, 256, 512, 513, 1024, 4096, 8192)
TARGETS = {
    "h200": Target(90, 132, cublas=True, gpu="NVIDIA H200"),
    "h200 without cublas": Target(90, 132, gpu="NVIDIA H200"),
    "h200 invariant": Target(90, 132, cublas=True, gpu="NVIDIA H200", batch_invariant=True),
    "interpreted": Target(90, 132, interpreted=True),
    "sm_80": Target(80, 108, cublas=True),
    "sm_100": Target(100, 148),
    "sm_120": Target(120, 188),
}
V4 = {"flash": (4096, 2048, 256, 6), "pro": (7168, 3072, 384, 6)}  # hidden, intermediate, experts, chosen
QWEN = {"35B": (2048, 512, 256, 8), "122B": (3072, 1024, 256, 8), "397B": (4096, 1024, 512, 10)}
LINEARS = {  # rows, columns, groups
    "flash into": (1536, 4096, 1), "flash q": (32768, 1024, 1), "flash out_a": (8192, 4096, 8),
    "flash out_b": (4096, 8192, 1), "pro q": (65536, 1536, 1), "pro out_b": (7168, 16384, 1),
}  # fmt: skip


class Shapes:
    """Tensors without memory."""

    def __init__(self):
        self.arena = Arena(Device("null"), None)

    def __call__(self, *shape, dtype=bfloat16):
        return self.arena.alloc(shape, dtype)

    def values(self, tokens, width, coded):
        """Activations, or their codes."""
        return Coded.allocate(self.arena, (tokens, width), bfloat16) if coded else self(tokens, width)

    def packed(self, kind, *shape, parts=1):
        """A weight and its scales."""
        *count, n, k = shape
        if kind == "bf16":
            return self(*shape), None
        if kind == "fp4":
            return self(*count, n, k // 2, dtype=uint8), self(*count, n, k // 32, dtype=uint8)
        blocks = (parts * -(-n // parts // 128), -(-k // 128))
        scales = float32 if kind == "fp8 float32" else uint8
        return self(*shape, dtype=float8_e4m3fn), self(*count, *blocks, dtype=scales)


def calls():
    """(name, function of tokens -> (op, arguments)) of every case."""
    t = Shapes()
    for size, (hidden, inter, count, chosen) in V4.items():
        for kind in ("bf16", "fp8", "fp4"):
            gate_up, gate_scales = t.packed(kind, count, 2 * inter, hidden, parts=2)
            down, down_scales = t.packed(kind, count, hidden, inter)
            for quantized in (False, True):
                yield f"experts {size} {kind} {quantized}", lambda n, h=hidden, c=chosen, q=quantized, w=(
                    gate_up, gate_scales, down, down_scales
                ): (experts, {
                    "out": t(n, h), "x": t.values(n, h, q), "shared": t(n, h), "expert_ids": t(n, c, dtype=int32),
                    "expert_weights": t(n, c, dtype=float32), "gate_up": Linear(*w[:2]), "down": Linear(*w[2:]),
                    "limit": 10.0,
                })  # fmt: skip
        for learned in (False, True):
            bias = t(count, dtype=float32) if learned else None
            table = None if learned else t(1000, chosen, dtype=int32)
            yield f"route {size} {learned}", lambda n, e=count, c=chosen, b=bias, table=table: (route, {
                "expert_ids": t(n, c, dtype=int32), "expert_weights": t(n, c, dtype=float32),
                "logits": t(n, e, dtype=float32),
                "bias": b, "table": table, "token_ids": t(n, dtype=int32), "token_slots": t(n, dtype=int32),
                "scaling": 1.5, "first_expert": 0, "num_experts": e,
            })  # fmt: skip
        for quantized in (False, True):
            yield f"norm_rows {size} {quantized}", lambda n, h=hidden, q=quantized: (norm_rows, {
                "out": t.values(n, h, q), "x": t(n, h), "norm_weight": t(h, dtype=float32), "eps": 1e-6
            })  # fmt: skip
            for kind in ("bf16", "fp8"):
                both, scales = t.packed(kind, 2 * inter, hidden, parts=2)
                yield f"gate_up_clamped {size} {kind} {quantized}", lambda n, h=hidden, i=inter, w=(
                    both, scales
                ), q=quantized: (gate_up_clamped, {
                    "out": t.values(n, i, q), "x": t.values(n, h, q), "weight": Linear(*w), "limit": 10.0
                })  # fmt: skip
    for name, (rows, columns, groups) in LINEARS.items():
        for kind in ("bf16", "fp8"):
            weight, scales = t.packed(kind, rows, columns)
            for quantized in (False, True):
                yield f"project {name} {kind} {quantized}", lambda n, w=(
                    weight, scales
                ), size=(rows, columns, groups), q=quantized: (project, {
                    "out": t.values(n, size[0], q and size[2] > 1), "weight": Linear(*w), "groups": size[2],
                    "x": t.values(n, size[1] * size[2], q and size[2] == 1),
                })  # fmt: skip
    for size, (hidden, inter, count, chosen) in QWEN.items():
        for kind in ("bf16", "fp8 float32"):
            gate_up, gate_scales = t.packed(kind, count, 2 * inter, hidden, parts=2)
            down, down_scales = t.packed(kind, count, hidden, inter)
            yield f"experts_add {size} {kind}", lambda n, h=hidden, c=chosen, w=(
                gate_up, gate_scales, down, down_scales
            ): (experts_add, {
                "x": t(n, h), "norm_weight": t(h, dtype=float32), "expert_ids": t(n, c, dtype=int32),
                "expert_weights": t(n, c), "gate_up": Linear(*w[:2]), "down": Linear(*w[2:]),
                "eps": 1e-6,
            })  # fmt: skip
        yield f"route_topk {size}", lambda n, e=count, c=chosen: (route_topk, {
            "expert_ids": t(n, c, dtype=int32), "expert_weights": t(n, c), "logits": t(n, e + 16)[:, :e],
            "token_slots": t(n, dtype=int32), "first_expert": 0, "num_experts": e,
        })  # fmt: skip


def plain(value):
    """An argument of a launch without its address."""
    match value:
        case Tensor():
            return [value.dtype.name, *value.shape, *value.strides]
        case Scratch():
            return ["scratch", value.dtype.name, *value.shape, value.zeroed]
        case TensorMap():
            return ["map", plain(value.tensor), *value.block]
        case Aligned():
            return [value.value, "aligned"]
    return value


def record(command):
    """A command as JSON, without the name of the kernel's module."""
    if not isinstance(command, Launch):
        parts = (command.out, command.x, command.weight, command.workspace)
        own = [command.groups] if command.groups > 1 else [*map(plain, command.scales or ())]
        return ["matmul", *map(plain, parts), command.accumulate, command.branch, *own]
    spec = command.spec.as_json() | {"module": ""}
    return [spec, command.grid, list(map(plain, command.args)), command.branch]


def digests():
    """By case and target, of all numbers of tokens."""
    found = {}
    for name, call in calls():
        for target_name, target in TARGETS.items():
            digest = hashlib.sha256()
            for tokens in TOKENS:
                op, args = call(tokens)
                pack = NullPack(target)
                try:
                    op(pack, **args)
                    records = [record(command) for command in pack.calls[0].commands]
                except ContractError:
                    records = ["refused"]
                digest.update(json.dumps(records, sort_keys=True, default=str).encode())
            found.setdefault(name, {})[target_name] = digest.hexdigest()[:12]
    return found


def test_launches_are_those_that_were_measured():
    want, got = json.loads(RECORDS.read_text()), digests()
    assert got.keys() == want.keys()
    changed = {
        name: [t for t in TARGETS if got[name][t] != want[name][t]] for name in got if got[name] != want[name]
    }
    assert not changed


def test_a_changed_constant_changes_the_record():
    from openinfer.kernels import launch

    args = {"x": np.int32(1).item()}
    first, second = (launch("m", "f", (1,), args, {"BM": size}) for size in (16, 32))
    assert record(first) != record(second)
    assert record(first) == record(launch("another", "f", (1,), args, {"BM": 16}))


if __name__ == "__main__":
    RECORDS.write_text(json.dumps(digests(), indent=1) + "\n")
