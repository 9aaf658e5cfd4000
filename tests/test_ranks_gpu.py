"""Two GPUs of one host: the gate and its controls on both, and ranks that are killed or stopped."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from openinfer.cli.selftest import gate
from openinfer.kernels import RankLost
from openinfer.recipes.deepseek_v4 import RECIPE as DEEPSEEK_V4
from openinfer.recipes.engine.forced import Forced
from openinfer.recipes.engine.startup import build
from openinfer.recipes.engine.testing import Session
from openinfer.recipes.qwen3 import RECIPE
from openinfer.tensor import check, driver

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

TINY = Path(__file__).parent / "goldens" / "qwen3-tiny"
FLAGS = {
    "device": "cuda",
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 256 << 20,
    "tensor_parallel_size": 2,
}


@pytest.fixture(autouse=True)
def _two(gpu):
    if int(check(driver().cuDeviceGetCount(), "cuDeviceGetCount")) < 2:
        pytest.skip("needs two GPUs")


def follower() -> int:
    found = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", "follower_process"], capture_output=True, text=True
    )
    return int(found.stdout)


@pytest.mark.parametrize("flags", [{}, {"enforce_eager": True}, {"batch_invariant": True}], ids=str)
def test_every_path_passes_and_every_control_fails(flags, references, golden_of):
    built = build(RECIPE, TINY, **FLAGS, **flags)
    sequences = references(golden_of("qwen3-tiny"))
    found = list(gate.run(built, sequences))
    assert [str(one) for one in found if one.found.mean > 1.25 * one.limits.mean] == []
    controls = list(gate.negative_controls(built, sequences))
    assert [str(one) for one in controls if one.passed] == []
    assert len(controls) == 6
    assert built.engine.stats().compiles_after_ready == 0
    built.engine.close()


def test_two_ranks_of_deepseek_v4_err_like_one(golden_of):
    """The sum of ranks is mixed into the streams where it is made. Control: the logits of another position."""
    golden, found = golden_of("deepseek_v4-tiny"), []
    for ranks in (1, 2):
        flags = FLAGS | {"tensor_parallel_size": ranks, "activation_quantization": "off"}
        engine = build(DEEPSEEK_V4, golden.path, **flags).engine
        errors = []
        for index in (1, 2, 3):
            forced, prompt = Forced(engine), golden.prompt(index)
            logits = forced.feed(forced.join(1, prompt), len(prompt), 512)
            forced.leave()
            wanted = golden.numbers[f"p{index}.logits_fp32"]
            errors.append(float(np.sqrt(np.mean((logits[0] - wanted[-1]) ** 2))))
            assert np.sqrt(np.mean((logits[0] - wanted[0]) ** 2)) > 5 * errors[-1]
        found.append(np.median(errors))
        engine.close()
    assert found[1] < 1.5 * found[0], found


@pytest.mark.filterwarnings("ignore:a lease of:ResourceWarning")  # a lost engine drops its sequences
@pytest.mark.parametrize("busy", [True, False], ids=["in a step", "idle"])
def test_a_rank_that_is_killed_ends_the_engine(busy):
    """Kernels of the other GPU wait for it in a step: the lost word ends them."""
    engine = build(RECIPE, TINY, **FLAGS).engine
    session, pid = Session(engine), follower()
    if busy:
        session.submit([5, 6, 7], 1000, ignore_eos=True)
        session.step()
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RankLost, match="rank 1 of 2 was killed by SIGKILL"):
        until_lost(session.step if busy else engine.stats)
    assert time.monotonic() < began + 10
    engine.close()
    del session, engine
    gc.collect()


def until_lost(step):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        step()


SERVED = """
import sys, time
from openinfer.recipes.engine.startup import build
from openinfer.recipes.qwen3 import RECIPE
built = build(
    RECIPE, sys.argv[1], device="cuda", tensor_parallel_size=2, max_num_seqs=4, kv_cache_memory_bytes=64 << 20
)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_leader_that_is_killed_leaves_no_follower():
    leader = subprocess.Popen([sys.executable, "-c", SERVED, str(TINY)], stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    assert leader.stdout.readline() == "ready\n"
    found = subprocess.run(["pgrep", "-P", str(leader.pid)], capture_output=True, text=True).stdout.split()
    leader.kill()
    leader.wait()
    leader.stdout.close()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in found) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found
    assert not any(Path(f"/proc/{pid}").exists() for pid in found)
