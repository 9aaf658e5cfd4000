"""Host time of the batch's changes: `python libs/graph/benchmarks/bench_rows.py`. No GPU needed."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from openinfer.graph import Field, Rows
from openinfer.tensor import Arena, Device, Stream

ROWS, BLOCKS = 256, 2560


def microseconds(work: Callable[[], None], repeats: int = 2000) -> float:
    """The median time of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e6 * sorted(times)[repeats // 2]


def main() -> None:
    device = Device("cpu")
    stream = Stream(device)
    fields = [
        Field("slots", (ROWS,)),
        Field("alive", (ROWS + 1,), device_written=True),
        Field("block_tables", (ROWS + 1, BLOCKS)),
    ]
    rows = Rows(Arena(device, 64 << 20), fields, stream)
    turn = 0

    def steady() -> None:
        for _ in rows.uploads(stream):
            pass

    def sixteen_new_blocks() -> None:
        nonlocal turn
        turn += 1
        for slot in range(1, 17):
            rows.write("block_tables", slot, [turn], offset=turn % BLOCKS)
        steady()

    def new_batch() -> None:
        nonlocal turn
        turn += 1
        rows.write("slots", 0, np.roll(np.arange(1, ROWS + 1, dtype=np.int32), turn))
        rows.set("alive", 1 + turn % ROWS, 1)
        steady()

    print(f"nothing changed             {microseconds(steady):6.1f} us")
    print(f"16 of 256 rows get a block  {microseconds(sixteen_new_blocks):6.1f} us")
    print(f"all 256 slots change        {microseconds(new_batch):6.1f} us")


if __name__ == "__main__":
    main()
