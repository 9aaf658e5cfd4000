"""What the op tests share. Fixtures, because test modules cannot import each other."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton; compile workers drop it

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import (
    H200,
    CublasLt,
    CudaDriver,
    NullPack,
    Op,
    Store,
    Target,
    cublas_available,
)
from openinfer.kernels.op.coded import Coded
from openinfer.kernels.op.launch import Spec
from openinfer.kernels.store import cubins as store_module
from openinfer.kernels.testing import (
    INTERPRETED,
    compare,
    paged_rows,
    run_interpreted,
    run_on_gpu,
    run_reference,
)
from openinfer.tensor import Arena, Device, Stream, TensorError, bfloat16, float32

Array = np.ndarray[Any, Any]
CheckOp = Callable[..., dict[str, Array]]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that differ between tests and not between runs."""
    return np.random.default_rng(list(request.node.name.encode()))


@pytest.fixture
def normal(rng: np.random.Generator) -> Callable[..., Array]:
    """normal(*shape, scale=1.0): bf16 values."""
    return lambda *shape, scale=1.0: (rng.standard_normal(shape) * scale).astype(bfloat16)


@pytest.fixture
def norm_rope_args(rng: np.random.Generator, normal: Callable[..., Array]) -> Callable[..., dict[str, Any]]:
    """norm_rope_args(lengths, before): arguments of norm_rope_attend but those of the cache, for rows of `lengths` new
    tokens after `before` cached ones. more: of testing.paged_rows, and `max_q_len`."""

    def make(
        lengths: Sequence[int], before: Sequence[int], *, heads: int, kv_heads: int, dim: int, window: int = 0,
        max_q_len: int | None = None, **more: Any,
    ) -> dict[str, Any]:  # fmt: skip
        rows = paged_rows(rng, lengths, before, **more)
        positions = rows["positions"]
        angle = np.arange(positions.max() + 1)[:, None] * 10000.0 ** -np.linspace(0, 1, dim // 2)
        return {
            "out": np.full((len(positions), heads * dim), np.nan, bfloat16),
            "qkv": normal(len(positions), (heads + 2 * kv_heads) * dim, scale=3.0),
            "q_norm": normal(dim),
            "k_norm": normal(dim),
            "cos_sin": np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(float32),
            **rows,
            "eps": 1e-6,
            "scale": dim**-0.5,
            "window": window,
            "max_q_len": max(lengths) if max_q_len is None else max_q_len,
        }

    return make


@pytest.fixture
def arena() -> Arena:
    """An unbounded arena of null memory: tensors for plans."""
    return Arena(Device("null"), None)


def _check(run: Callable[[Op[Any], dict[str, Any], Target], dict[str, Array]], default: Target) -> CheckOp:
    def check(
        op: Op[Any], outputs: dict[str, float], *, target: Target = default, **args: Any
    ) -> dict[str, Array]:
        """Run `op` on the reference and on kernels, and compare. Returns the arrays as the kernels left them.

        `outputs`: names of arrays that are written, with the relative Frobenius error allowed (0 = bit-equal); give
        pure outputs filled with NaN. All other arrays must come back untouched.
        """
        got = run(op, args, target)
        compare(op, got, run_reference(op, args), outputs)
        return got

    return check


@pytest.fixture(params=["interp", pytest.param("gpu", marks=pytest.mark.gpu)])
def run_both(request: pytest.FixtureRequest) -> Callable[..., tuple[dict[str, Array], dict[str, Array]]]:
    """run_both(op, args, target): the arrays of a call as the kernels leave them, and as the reference does."""
    device = request.getfixturevalue("gpu") if request.param == "gpu" else None

    def both(
        op: Op[Any], args: dict[str, Any], target: Target | None = None
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        want = run_reference(op, args)
        if device is None:
            return run_interpreted(op, args, target or INTERPRETED), want
        if target is not None:
            pytest.skip("a target of its own is for the interpreter")
        own, driver, _, stream = device
        return run_on_gpu(op, args, own, driver, stream), want

    return both


@pytest.fixture
def check_alone() -> Callable[..., None]:
    """check_alone(op, args, name): by batch-invariant kernels, tokens alone have the bits that they have together."""
    target = dataclasses.replace(INTERPRETED, batch_invariant=True)

    def check(op: Op[Any], args: dict[str, Any], name: str) -> None:
        together, tokens = run_interpreted(op, args, target)[name], args["x"].shape[0]
        of_token = {
            key
            for key, value in args.items()
            if isinstance(value, np.ndarray | Coded) and value.shape[0] == tokens
        }
        for n in (0, tokens // 2, tokens - 1):
            one = args | {key: args[key][n : n + 1] for key in of_token}
            assert run_interpreted(op, one, target)[name].tobytes() == together[n].tobytes(), n

    return check


@pytest.fixture
def reference() -> Callable[[Op[Any], dict[str, Any]], dict[str, Array]]:
    """reference(op, args): the arrays of a call as the reference leaves them."""
    return run_reference


@pytest.fixture
def interpreted() -> Callable[[Op[Any], dict[str, Any]], dict[str, Array]]:
    """interpreted(op, args): the arrays of a call as the interpreter leaves them."""
    return run_interpreted


@pytest.fixture
def on_gpu(gpu: tuple[Target, CudaDriver, Device, Stream]) -> Callable[..., dict[str, Array]]:
    """on_gpu(op, args): the arrays of a call as a GPU leaves them."""
    target, driver, _, stream = gpu
    return lambda op, args: run_on_gpu(op, args, target, driver, stream)


@pytest.fixture
def check_op() -> CheckOp:
    """Compare kernels in the interpreter with the reference; see `_check`. Target: sm_90 without cuBLASLt."""
    return _check(run_interpreted, INTERPRETED)


@pytest.fixture
def plan() -> Callable[..., NullPack]:
    """plan(op, target=H200, **args): the null pack after one call."""

    def record(op: Op[Any], *, target: Target = H200, **args: Any) -> NullPack:
        pack = NullPack(target)
        op(pack, **args)
        return pack

    return record


@pytest.fixture
def cuobjdump(tmp_path: Path) -> Callable[[bytes, str], str]:
    """cuobjdump(cubin, flag): what Triton's copy of the tool prints."""
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

    def printed(cubin: bytes, flag: str) -> str:
        file = tmp_path / "one.cubin"
        file.write_bytes(cubin)
        return subprocess.run([tool, flag, file], capture_output=True, text=True, check=True).stdout

    return printed


@pytest.fixture
def fences(cuobjdump: Callable[[bytes, str], str]) -> Callable[[bytes], int]:
    """fences(cubin): instructions that wait until all memory of the GPU is ordered."""
    return lambda cubin: cuobjdump(cubin, "-sass").count("MEMBAR.ALL.GPU")


@pytest.fixture
def resources(cuobjdump: Callable[[bytes, str], str]) -> Callable[[bytes], dict[str, int]]:
    """resources(cubin): REG, STACK and LOCAL of a thread."""

    def used(cubin: bytes) -> dict[str, int]:
        text = cuobjdump(cubin, "-res-usage")
        return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}

    return used


@pytest.fixture(scope="session")
def gpu() -> Iterator[tuple[Target, CudaDriver, Device, Stream]]:
    """A CUDA device with a store of its own and cuBLASLt if it is installed; skips without a device."""
    device = Device("cuda", 0)
    try:
        device.activate()
    except TensorError as e:
        pytest.skip(f"no usable CUDA device: {e}")
    cublas = CublasLt() if cublas_available() else None
    stream = Stream(device)
    yield (
        Target.of(device, cublas=cublas is not None),
        CudaDriver(device, stream, Store(device.arch), cublas),
        device,
        stream,
    )
    stream.synchronize()


@pytest.fixture
def check_op_gpu(gpu: tuple[Target, CudaDriver, Device, Stream]) -> CheckOp:
    """Compare kernels on the GPU with the reference; see `_check`."""
    own, driver, _, stream = gpu
    return _check(lambda op, args, target: run_on_gpu(op, args, target, driver, stream), own)


@pytest.fixture(scope="session")
def one_compiler() -> Iterator[Callable[[Mapping[str, Spec], int], Iterator[dict[str, Any]]]]:
    """What stores compile with, in one process for all tests: to start another takes as long as most kernels take."""
    started: list[subprocess.Popen[str]] = []

    def run(keys: Mapping[str, Spec], arch: int) -> Iterator[dict[str, Any]]:
        if not started:
            environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "openinfer.kernels.store.compile_worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**environment, "TRITON_DISABLE_LINE_INFO": "1"},
                )
            )
        (worker,) = started
        assert worker.stdin is not None
        assert worker.stdout is not None
        for key, spec in keys.items():
            worker.stdin.write(json.dumps({"key": key, "spec": spec.as_json(), "arch": arch}) + "\n")
            worker.stdin.flush()
            yield json.loads(worker.stdout.readline())

    yield run
    for worker in started:
        worker.communicate()


@pytest.fixture(autouse=True)
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, one_compiler: Any) -> None:
    """Have stores compile in one process, but for slow tests, which compile much. Tests of how a store starts its own
    override this."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(store_module, "_run_workers", one_compiler)


@pytest.fixture(scope="session")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cubin cache for this run."""
    return tmp_path_factory.mktemp("cubins")
