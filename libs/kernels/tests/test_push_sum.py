"""The kernel that ranks push sums with, in Triton's interpreter: ranks are processes that map each other's segments.

The interpreter has no inline assembly, so the accesses of 16 bytes are numpy's here. All else is the kernel's own code.
"""

import json
import os
import subprocess
import sys

import pytest

WORKER = """
import ctypes, hashlib, json, mmap, os, sys, time
os.environ["TRITON_INTERPRET"] = "1"
import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle
from openinfer.kernels.device import push_sum as device
from openinfer.kernels.interpreter import Pointer
from openinfer.kernels.reference import rms_norm
from openinfer.tensor import bfloat16

file, rank, ranks, calls = map(int, sys.argv[1:5])
fault = sys.argv[5]
WIDTH, LANES, PROGRAMS, EPS = 40, 8, 4, 1e-6
SLOT = PROGRAMS * 2 * WIDTH
segment = 2 * ranks * SLOT
os.ftruncate(file, ranks * segment)
shared = np.frombuffer(mmap.mmap(file, 0), np.uint8)
lost = np.zeros(4, np.int32)


def words_at(addresses, inside):
    found = np.zeros((4, LANES), np.int32)
    for lane in np.flatnonzero(inside):
        found[:, lane] = np.frombuffer(ctypes.string_at(int(addresses[lane]), 16), np.int32)
    return found


def tensors(words):
    block = tl.block_type(tl.int32, [LANES])
    return tuple(tl.tensor(TensorHandle(row.copy(), tl.int32), block) for row in words)


def load16(address, inside):
    return tensors(words_at(address.handle.data, inside.handle.data))


def store16(address, inside, *words):
    rows = np.stack([word.handle.data for word in words]).astype(np.int32)
    if fault == "nothing is cleared" and not rows.any():
        return
    for lane in np.flatnonzero(inside.handle.data):
        ctypes.memmove(int(address.handle.data[lane]), rows[:, lane].tobytes(), 16)


def arrived(address, lost, inside):
    deadline = time.monotonic() + (20 if fault == "none" else 2)
    while True:
        found = words_at(address.handle.data, inside.handle.data)
        if found[:, inside.handle.data != 0].all():
            return tensors(found)
        if time.monotonic() > deadline:
            sys.exit("a word did not come")
        os.sched_yield()


device.load16, device.store16, device.arrived, device.fence = load16, store16, arrived, lambda inside: None
table = np.zeros(ranks + 2 + PROGRAMS // 2, np.int64)
table[:ranks] = shared.ctypes.data + np.arange(ranks) * segment
table[ranks] = lost.ctypes.data
draw, late = np.random.default_rng(0), np.random.default_rng(rank)
digests = []
for call in range(calls):
    rows, two, add, norm = int(draw.integers(1, 8)), *map(bool, draw.integers(0, 2, 3))
    parts = draw.standard_normal((ranks, rows, WIDTH)).astype(bfloat16)
    parts[:, :, :4] = 0
    x, gain = draw.standard_normal((rows, WIDTH)).astype(bfloat16), draw.standard_normal(WIDTH).astype(bfloat16)
    total = np.zeros((rows, WIDTH), np.float32)
    for part in parts:
        total += part.astype(np.float32)
    want = (total + x.astype(np.float32) if add else total).astype(bfloat16)
    normed, wide = np.zeros_like(x), call % 2
    gain, mine = gain.astype(np.float32) if wide else gain, parts[rank].copy()
    if late.random() < 0.2:
        time.sleep(0.003)
    device.push_sum[(min(rows, PROGRAMS),)](
        Pointer(x.ctypes.data, "bf16"), Pointer(mine.ctypes.data, "bf16"), Pointer(normed.ctypes.data, "bf16"),
        Pointer(gain.ctypes.data, "fp32" if wide else "bf16"), Pointer(table.ctypes.data, "i64"), rank, rows, EPS,
        WIDTH=WIDTH, RANKS=ranks, SLOT=SLOT, LANES=LANES, ADD=add, NORM=norm, TWO_SHOT=two,
    )
    assert (x == want).all(), (call, rows, two, add)
    good = rms_norm(want, gain, EPS) if norm else np.zeros_like(normed, np.float32)
    np.testing.assert_allclose(normed.astype(np.float32), good, rtol=0.01, atol=1e-4)
    digests.append(hashlib.sha256(x.tobytes() + normed.tobytes()).hexdigest())
print(json.dumps(digests))
"""


def run_ranks(size, calls, fault="none"):
    """The digests of every rank's results, call by call; None for a rank that failed."""
    file = os.memfd_create("segments")
    command = [sys.executable, "-c", WORKER, str(file)]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(calls), fault],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if fault != "none" else None,
            text=True,
            pass_fds=[file],
        )
        for rank in range(size)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    os.close(file)
    return [json.loads(out) if p.returncode == 0 else None for p, out in zip(started, outputs, strict=True)]


@pytest.mark.parametrize(("size", "calls"), [(2, 30), (3, 20)])
def test_every_rank_has_the_sum_and_its_norm(size, calls):
    """In one shot and two, of more rows than programs, with ranks that are late, words of zeros among the rows."""
    first, *others = run_ranks(size, calls)
    assert first is not None
    assert len(first) == calls
    assert others == [first] * (size - 1)


def test_slots_that_are_not_cleared_give_wrong_sums():
    """The control of the test above."""
    assert None in run_ranks(2, 12, "nothing is cleared")
