"""A wheel with compiled kernels: with it a store without compiler or cache has every kernel of a published size."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from openinfer.kernels import Store, Target
from openinfer.kernels.testing import of_the_day
from openinfer.recipes.engine import Options, Source
from openinfer.recipes.engine.startup import kernel_specs
from openinfer.recipes.qwen3 import RECIPE

ROOT = Path(__file__).parents[1]


def specs_of(config, *, nvrtc=False):
    target = Target(90, 132, cublas=True, gpu="NVIDIA H200", nvrtc=nvrtc)
    return kernel_specs(RECIPE, Source(config), Options(), target)


@pytest.mark.parametrize("size", of_the_day(list(RECIPE.published()), len(RECIPE.published()) // 4))
def test_published_sizes_have_a_plan(size):
    specs = specs_of(RECIPE.published()[size])
    assert {"gemv", "gemm_small", "attend_split", "attend_prompt", "advance"} <= {s.function for s in specs}


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "hatch_build.py").exists(), reason="the build hook is in the checkout")
def test_a_wheel_with_cubins(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    env = {**os.environ, "OPENINFER_CUBIN_ARCHS": "90"}
    env.pop("TRITON_INTERPRET", None)
    subprocess.run(command, check=True, env=env)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    folder = tmp_path / "site/openinfer/recipes/cubins"
    store = Store(90, cache=tmp_path / "empty", folders=[folder])
    for config in RECIPE.published().values():
        for nvrtc in (False, True):
            assert store.prepare(specs_of(config, nvrtc=nvrtc)).compiled == 0
