"""The null pack: runs nothing and writes every call down. Its record is the kernel plan of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from openinfer.kernels.launch import Command, KernelSpec, Launch, Matmul, Scratch, TensorMap
from openinfer.kernels.op import Cost, Op, Workload
from openinfer.kernels.target import Target


@dataclass(frozen=True, slots=True)
class Call:
    """One op call: its arguments and the commands a device of the target's kind would run for it."""

    op: Op[Any]
    args: Mapping[str, Any]
    commands: tuple[Command, ...]

    def cost(self, workload: Workload) -> Cost:
        return self.op.cost(workload, **self.args)


def scratches(command: Command) -> list[Scratch]:
    """The scratch memory that a command uses."""
    if isinstance(command, Matmul):
        parts = (command.out, command.x, command.weight, command.workspace)
        return [s for s in parts if isinstance(s, Scratch)]
    return [s for a in command.args if isinstance(s := a.tensor if isinstance(a, TensorMap) else a, Scratch)]


@dataclass(slots=True)
class NullPack:
    """Records calls. Tensors may live on the "null" device: no memory and no GPU is needed."""

    target: Target
    calls: list[Call] = field(default_factory=list)

    def run(self, op: Op[Any], args: Mapping[str, Any]) -> None:
        self.calls.append(Call(op, dict(args), tuple(op.plan(self.target, args))))

    def specs(self) -> list[KernelSpec]:
        """The distinct kernels of the recorded calls, in the order of first use."""
        return list(
            dict.fromkeys(c.spec for call in self.calls for c in call.commands if isinstance(c, Launch))
        )

    def workspace_bytes(self, *, zeroed: bool) -> int:
        """The most scratch memory (of the zeroed or the ordinary kind) that any one call needs."""
        placed = (place(call.commands) for call in self.calls)
        return max((p.zeroed_bytes if zeroed else p.plain_bytes for p in placed), default=0)


class Placement(NamedTuple):
    """Where the scratches of one call are in their workspace regions (256-byte aligned), and what the regions need."""

    offsets: dict[Scratch, int]
    plain_bytes: int
    zeroed_bytes: int


def place(commands: Sequence[Command]) -> Placement:
    """Place the scratches of one call, in the order of first use."""
    offsets: dict[Scratch, int] = {}
    ends = [0, 0]
    for command in commands:
        for scratch in scratches(command):
            if scratch not in offsets:
                offsets[scratch] = ends[scratch.zeroed]
                ends[scratch.zeroed] += -(-scratch.nbytes // 256) * 256
    return Placement(offsets, *ends)
