"""CPU time of an op call up to the driver: contract, plan and packed parameters. Needs no GPU.

python bench_launch.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from openinfer.kernels import H200, LaunchPack, NullPack, Target, embed, gate_up_silu, linear_add, norm_linear
from openinfer.tensor import Arena, Device, bfloat16, int32

HIDDEN, HEADS, KV_HEADS, INTER, VOCABULARY = 2560, 32, 8, 9728, 151936  # Qwen3-4B
CALLS, REPEATS = 100, 30


class NoDriver:
    """Takes launches and does nothing."""

    def encode_tensor_map(self, *_: Any) -> bytes:
        return bytes(128)

    def launch(self, *_: Any) -> None: ...

    def matmul(self, *_: Any) -> None: ...


def calls(tokens: int) -> list[tuple[str, Callable[[Any], None]]]:
    """Ops of a step of `tokens` tokens."""
    arena = Arena(Device("null"), None)

    def t(*shape: int) -> Any:
        return arena.alloc(shape, bfloat16)

    x, norm, ids, table = t(tokens, HIDDEN), t(HIDDEN), arena.alloc((tokens,), int32), t(VOCABULARY, HIDDEN)
    width = (HEADS + 2 * KV_HEADS) * 128
    qkv, w_qkv, w_up, act = t(tokens, width), t(width, HIDDEN), t(2 * INTER, HIDDEN), t(tokens, INTER)
    w_down = t(HIDDEN, INTER)
    return [
        ("embed", lambda p: embed(p, out=x, token_ids=ids, table=table)),
        ("norm_linear", lambda p: norm_linear(p, out=qkv, x=x, norm_weight=norm, weight=w_qkv, eps=1e-6)),
        ("gate_up_silu", lambda p: gate_up_silu(p, out=act, x=x, norm_weight=norm, weight=w_up, eps=1e-6)),
        ("linear_add", lambda p: linear_add(p, x=x, h=act, weight=w_down)),
    ]


def main() -> None:
    print("| op | target | tokens | commands | us a call |\n| --- | --- | --- | --- | --- |")
    for name, target in (("H200 with cuBLASLt", H200), ("H200", Target(90, 132))):
        for tokens in (1, 32, 4096):
            for op, call in calls(tokens):
                plan = NullPack(target)
                call(plan)
                arena = Arena(Device("null"), None)
                scratch, zeroed = (
                    arena.alloc((max(plan.workspace_bytes(zeroed=z), 1),), "uint8") for z in (False, True)
                )
                pack = LaunchPack(target, NoDriver(), scratch, zeroed)
                times = []
                for _ in range(REPEATS):
                    start = time.thread_time()
                    for _ in range(CALLS):
                        call(pack)
                    times.append((time.thread_time() - start) / CALLS)
                commands = len(plan.calls[0].commands)
                print(f"| {op} | {name} | {tokens} | {commands} | {min(times) * 1e6:.0f} |")


if __name__ == "__main__":
    main()
