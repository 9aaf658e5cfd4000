"""Whatever needs an extra that is not installed says how to install it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from openinfer.kernels.testing import of_the_day

ROOT = Path(__file__).parents[1]
PROJECTS = {
    project["name"]: project.get("optional-dependencies", {})
    for path in (
        ROOT / "pyproject.toml",
        ROOT / "recipes/pyproject.toml",
        *ROOT.glob("libs/*/pyproject.toml"),
    )
    for project in [tomllib.loads(path.read_text())["project"]]
}
MODEL = ROOT / "tests" / "goldens" / "qwen3-tiny"

COMMAND = "import openinfer.cli; openinfer.cli.main({})"
SERVE = COMMAND.format(["serve", str(MODEL), "--port", "0"])
CUPTI = """
import ctypes, openinfer.tensor
def missing(name): raise OSError(name)
ctypes.CDLL = missing
openinfer.tensor.ActivityRecorder()
"""
STORE = """
import pathlib, tempfile
from openinfer.kernels import Store
from openinfer.kernels.op.launch import launch
spec = launch("openinfer.kernels.device.rows", "gather_rows", (1,), {"n": 1}, {}).spec
Store(90, pathlib.Path(tempfile.mkdtemp()), folders=[]).prepare([spec])
"""
CUDA = """
import pathlib, tempfile
from openinfer.kernels import Store, launch_cuda
spec = launch_cuda(
    "openinfer.kernels.device", "ring.cu", "gemv_ring", (1,), {"n": 1}, {}, threads=32, shared=0, early=True
).spec
Store(90, pathlib.Path(tempfile.mkdtemp()), folders=[]).prepare([spec])
"""
GRAMMAR = "from openinfer.sampler.grammar import Compiler; Compiler([b'a'], [], [])"
SIMULATOR = "from openinfer.scheduler.sim.__main__ import main; main(['--plot', 'x.png'])"
FAST = """
import asyncio
from openinfer.frontend.http import connections, server
print(server.parts(asyncio.new_event_loop(), connections.http_protocol()))
"""
NEEDS: dict[tuple[str, str], tuple[tuple[str, ...], str]] = {
    ("openinfer-cli", "hub"): (("huggingface_hub",), COMMAND.format(["serve", "Some/Model"])),
    ("openinfer-cli", "plot"): (("matplotlib",), COMMAND.format(["explain", str(MODEL), "--plot", "x.png"])),
    ("openinfer-tensor", "cupti"): (("nvidia",), CUPTI),
    ("openinfer-tensor", "nccl"): (
        ("nccl",),
        "from openinfer.tensor import NcclRanks; NcclRanks.unique_id()",
    ),
    ("openinfer-kernels", "jit"): (("triton",), STORE),
    ("openinfer-kernels", "nvrtc"): (("nvidia-cuda-nvrtc",), CUDA),
    ("openinfer-kernels", "cublas"): (
        ("nvidia", "cuda.pathfinder"),
        "from openinfer.kernels.packs.cublas import load_library; load_library()",
    ),
    ("openinfer-graph", "runner"): (("openinfer.scheduler",), "import openinfer.graph.runner"),
    ("openinfer-kvpool", "events"): (("zmq",), "import openinfer.kvpool.publisher"),
    ("openinfer-kvpool", "tiers"): (("openinfer.tensor",), "import openinfer.kvpool.tiers"),
    ("openinfer-sampler", "gpu"): (("openinfer.kernels",), "import openinfer.sampler.gpu"),
    ("openinfer-sampler", "grammar"): (("llguidance",), GRAMMAR),
    ("openinfer-scheduler", "plot"): (("matplotlib",), SIMULATOR),
    ("openinfer-frontend", "http"): (("starlette",), SERVE),
    ("openinfer-frontend", "process"): (("zmq",), SERVE),
    ("openinfer-frontend", "otel"): (("opentelemetry",), "import openinfer.frontend.http.admin.tracing"),
    ("openinfer-frontend", "fast"): (("uvloop", "httptools"), FAST),
}
"""What is blocked, and what then needs it."""
BLOCK = """
import importlib.metadata, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
for name in {names}:
    if "." not in name:
        sys.modules[name] = None  # importlib.util.find_spec then finds nothing
version = importlib.metadata.version

def version_of_others(name):
    if name in {names}:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)

importlib.metadata.version = version_of_others
"""


def only_names_others(wanted: list[str]) -> bool:
    """Whether an extra is made of other distributions' extras."""
    return all(one.startswith("openinfer-") and "[" in one for one in wanted)


def test_every_extra_is_tried() -> None:
    extras = {
        (name, extra)
        for name, table in PROJECTS.items()
        for extra, wanted in table.items()
        if extra != "test" and not only_names_others(wanted)
    }
    assert set(NEEDS) == extras


@pytest.mark.parametrize(
    ("name", "extra"), of_the_day(list(NEEDS), 5), ids=[f"{name}[{extra}]" for name, extra in NEEDS]
)
def test_what_needs_a_missing_extra_names_the_command(name: str, extra: str, tmp_path: Path) -> None:
    blocked, code = NEEDS[name, extra]
    program = BLOCK.format(names=blocked) + code
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert f"pip install '{name}[{extra}]'" in (done.stdout + done.stderr).splitlines()[-1]
