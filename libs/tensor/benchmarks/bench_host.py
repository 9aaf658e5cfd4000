"""The host's cost: microseconds a call, best of five rounds. No GPU is used.

python benchmarks/bench_host.py
"""

from __future__ import annotations

import timeit
from collections.abc import Callable

import numpy as np

from openinfer.tensor import Arena, Device, Stream, Tensor, bfloat16


def main() -> None:
    cpu = Device("cpu")
    arena, stream = Arena(Device("null"), None), Stream(cpu)
    tensor = Tensor.empty((64, 4096), bfloat16, cpu)
    array, small = np.zeros((64, 4096), bfloat16), Tensor.empty((64,), "int32", cpu)
    cases: dict[str, Callable[[], object]] = {
        "Tensor(...)": lambda: Tensor(256, (64, 4096), bfloat16, cpu, (4096, 1)),
        "tensor[8:16]": lambda: tensor[8:16],
        "tensor[3, 8:16]": lambda: tensor[3, 8:16],
        "tensor.reshape(-1)": lambda: tensor.reshape(-1),
        "tensor.view_as('int16')": lambda: tensor.view_as("int16"),
        "tensor.numpy() on cpu": tensor.numpy,
        "Tensor.from_numpy": lambda: Tensor.from_numpy(array),
        "Arena.alloc on null": lambda: arena.alloc((64, 4096), bfloat16),
        "np.from_dlpack(tensor)": lambda: np.from_dlpack(small),
        "Tensor.from_dlpack(array)": lambda: Tensor.from_dlpack(small),
        "stream.copy_async, cpu, 64 B": lambda: stream.copy_async(small.ptr, tensor.ptr, 64, "d2d"),
    }
    for name, call in cases.items():
        best = min(timeit.repeat(call, number=2000, repeat=5)) / 2000
        print(f"{name:32}{best * 1e6:8.2f} us")


if __name__ == "__main__":
    main()
