"""The streams after a sum of ranks, by the kernel that pushes, in the interpreter: ranks are processes."""

from __future__ import annotations

import os
import subprocess
import sys

from openinfer.kernels import Launch, NullPack, Target
from openinfer.recipes.deepseek_v4.ops.hyper_connections import hc_post
from openinfer.tensor import Arena, Device, bfloat16, float32

WORKER = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import numpy as np
from openinfer.kernels import CpuPack, LaunchPack, Target
from openinfer.kernels.testing import HostPeers
from openinfer.tensor import Tensor, bfloat16

file, rank, ranks = map(int, sys.argv[1:4])
driver = HostPeers(file, rank, ranks, 2 * 256)
from openinfer.recipes.deepseek_v4.ops.hyper_connections import hc_post

of, rng = Tensor.from_numpy, np.random.default_rng(0)
pack = LaunchPack(Target(90, 132, rank=rank), driver, None, None)
for tokens in (1, 3, 2):
    parts = rng.standard_normal((ranks, tokens, 768)).astype(bfloat16)
    streams = rng.standard_normal((tokens, 4, 768)).astype(bfloat16)
    mix = rng.standard_normal((tokens, 20)).astype(np.float32)
    total = sum(parts.astype(np.float32)).astype(bfloat16)
    want = streams.copy()
    own = {"mix": of(mix), "hc_eps": 1e-6, "iters": 20}
    hc_post(CpuPack(), streams=of(want), y=of(total), **own)
    hc_post(pack, streams=of(streams), y=of(parts[rank].copy()), ranks=ranks, **own)
    np.testing.assert_allclose(streams.astype(np.float32), want.astype(np.float32), rtol=0.01, atol=1e-3)
assert [name.split("[")[0] for name in driver.launched] == ["hyper_connections.hc_post_ranks"], driver.launched
"""


def test_the_sum_of_ranks_is_mixed_into_the_streams() -> None:
    file = os.memfd_create("segments")
    command = [sys.executable, "-c", WORKER, str(file)]
    started = [subprocess.Popen([*command, str(rank), "3"], pass_fds=[file]) for rank in range(3)]
    assert [process.wait(60) for process in started] == [0] * 3
    os.close(file)


def test_the_sum_is_part_of_the_kernel_where_one_shot_is_the_way() -> None:
    """Two shots, and more rows than one kernel pushes, are kernels of their own."""
    arena = Arena(Device("null"), None)
    found = {}
    for ranks, tokens in ((1, 8), (2, 128), (2, 136), (8, 64)):
        pack = NullPack(Target(90, 132))
        streams, y = arena.alloc((tokens, 4, 4096), bfloat16), arena.alloc((tokens, 4096), bfloat16)
        mix = arena.alloc((tokens, 20), float32)
        hc_post(pack, streams=streams, y=y, mix=mix, hc_eps=1e-6, iters=20, ranks=ranks)
        commands = pack.calls[0].commands
        found[ranks, tokens] = [c.spec.function if isinstance(c, Launch) else "nccl" for c in commands]
        assert pack.peer_widths() <= {2048}
    assert found == {
        (1, 8): ["hc_post"],
        (2, 128): ["hc_post_ranks"],
        (2, 136): ["nccl", "hc_post"],
        (8, 64): ["push_sum", "hc_post"],
    }
