"""The kernel that ranks push sums with, in Triton's interpreter: ranks are processes that map each other's segments."""

import json
import os
import subprocess
import sys

import pytest

from openinfer.kernels.testing import of_the_day

WORKER = """
import hashlib, json, os, sys, time
os.environ["TRITON_INTERPRET"] = "1"
import numpy as np
from openinfer.kernels import LaunchPack, Target, gather_columns
from openinfer.kernels.ranks import exchange
from openinfer.kernels.ranks.exchange import Normed, sum_of_ranks
from openinfer.kernels.op.reference import rms_norm
from openinfer.kernels.testing import HostPeers
from openinfer.kernels.store.tables import Exchange
from openinfer.tensor import Tensor, bfloat16, float32

file, ranks, calls = map(int, sys.argv[1:4])
clears = sys.argv[4] == "clears"
rank = next((rank for rank in range(1, ranks) if os.fork() == 0), 0)  # the imports take longest
WIDTH, EPS, of = 40, 1e-6, Tensor.from_numpy
driver = HostPeers(file, rank, ranks, 2 * WIDTH, timeout_s=20 if clears else 2, clears=clears)
exchange.PROGRAMS, exchange.COLUMNS_BYTES = 4, 128  # rows take turns
target = Target(90, 132, rank=rank)
pack = LaunchPack(target, driver, None, None)
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
    gain, normed = gain.astype(np.float32) if call % 2 else gain, np.zeros_like(x)
    if late.random() < 0.2:
        time.sleep(0.003)
    way, own = Exchange("two_shot" if two else "push"), Normed(of(normed), of(gain), EPS) if norm else None
    commands = sum_of_ranks(target, of(x), of(parts[rank].copy()), ranks, add=add, normed=own, way=way)
    pack.submit("sum", list(commands))
    assert (x == want).all(), (call, rows, two, add)
    good = rms_norm(want, gain, EPS) if norm else np.zeros_like(normed, np.float32)
    np.testing.assert_allclose(normed.astype(np.float32), good, rtol=0.01, atol=1e-4)
    wide = draw.standard_normal((ranks, rows, 24 * (1 + call % 3))).astype(bfloat16 if call % 2 else float32)
    wide[:, 0, :5], columns = 0, np.full((rows, ranks * wide.shape[2]), 7, wide.dtype)
    gather_columns(pack, out=of(columns), x=of(wide[rank].copy()), ranks=ranks)
    assert (columns == np.concatenate(wide, axis=1)).all(), (call, rows)
    digests.append(hashlib.sha256(x.tobytes() + normed.tobytes()).hexdigest())
with open(f"{sys.argv[5]}/{rank}.json", "w") as file:
    json.dump(digests, file)
"""


def run_ranks(folder, size, calls, clears=True):
    """The digests of every rank's results, call by call; None for a rank that failed."""
    file, how = os.memfd_create("segments"), "clears" if clears else "no clears"
    command = [sys.executable, "-c", WORKER, str(file), str(size), str(calls), how, str(folder)]
    pipe = subprocess.PIPE  # ends with the last rank
    subprocess.run(command, stdout=pipe, stderr=None if clears else pipe, pass_fds=[file], timeout=120)
    os.close(file)
    found = [folder / f"{rank}.json" for rank in range(size)]
    return [json.loads(path.read_text()) if path.exists() else None for path in found]


@pytest.mark.parametrize(("size", "calls"), of_the_day([(2, 8), (3, 10), (2, 24), (3, 16)]))
def test_every_rank_has_the_sum_and_its_norm(tmp_path, size, calls):
    """In one shot and two, of more rows than programs, with ranks that are late, words of zeros among the rows. Columns
    are gathered between sums."""
    first, *others = run_ranks(tmp_path, size, calls)
    assert first is not None
    assert len(first) == calls
    assert others == [first] * (size - 1)


def test_slots_that_are_not_cleared_give_wrong_sums(tmp_path):
    """The control of the test above."""
    assert None in run_ranks(tmp_path, 2, 12, clears=False)
