"""What the op tests share. Fixtures, because test modules cannot import each other."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton; compile workers drop it

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import (
    H200,
    CpuPack,
    CublasLt,
    CudaDriver,
    InterpDriver,
    LaunchPack,
    NullPack,
    Op,
    Store,
    Target,
    cublas_available,
)
from openinfer.tensor import Arena, Device, Stream, Tensor, TensorError, bfloat16

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
def arena() -> Arena:
    """An unbounded arena of null memory: tensors for plans."""
    return Arena(Device("null"), None)


def _like(array: Array) -> Array:
    """A copy with the strides kept (numpy's copy makes them dense). The gaps between elements stay gaps."""
    span = 1 + sum((n - 1) * s // array.itemsize for n, s in zip(array.shape, array.strides, strict=True))
    copy = np.lib.stride_tricks.as_strided(np.zeros(span, array.dtype), array.shape, array.strides)
    copy[...] = array
    return copy


def _error(got: Array, want: Array) -> float:
    """Relative Frobenius error; NaN if anything is NaN."""
    g, w = got.astype(np.float64), want.astype(np.float64)
    return float(np.linalg.norm(g - w) / max(np.linalg.norm(w), 1e-30))


Runner = Callable[[Op[Any], dict[str, Any], Target], dict[str, Array]]


def _check(run: Runner, default: Target) -> CheckOp:
    def check(
        op: Op[Any], outputs: dict[str, float], *, target: Target = default, **args: Any
    ) -> dict[str, Array]:
        """Run `op` on the reference and on kernels, and compare.

        `outputs`: names of arrays that are written, with the relative Frobenius error allowed (0 = bit-equal); give
        pure outputs filled with NaN. All other arrays must come back untouched. Returns the arrays as the kernels left
        them.
        """
        want = {k: _like(v) if isinstance(v, np.ndarray) else v for k, v in args.items()}
        CpuPack().run(
            op, {k: Tensor.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in want.items()}
        )
        got = run(op, args, target)
        for name, value in args.items():
            if not isinstance(value, np.ndarray):
                continue
            limit = outputs.get(name, 0.0)
            if limit == 0.0:
                np.testing.assert_array_equal(got[name], want[name], err_msg=f"{op.name}: {name}")
            else:
                error = _error(got[name], want[name])
                assert error <= limit, f"{op.name}: {name} is off by {error:.2e}, allowed {limit:.2e}"
        return got

    return check


def workspace(op: Op[Any], args: dict[str, Any], target: Target) -> tuple[int, int]:
    """Bytes of ordinary and of zeroed scratch that the call needs."""
    plan = NullPack(target)
    plan.run(op, args)
    return plan.workspace_bytes(zeroed=False), plan.workspace_bytes(zeroed=True)


def _run_interp(op: Op[Any], args: dict[str, Any], target: Target) -> dict[str, Array]:
    arrays = {k: _like(v) for k, v in args.items() if isinstance(v, np.ndarray)}
    tensors = {k: Tensor.from_numpy(arrays[k]) if k in arrays else v for k, v in args.items()}
    plain, zeroed = workspace(op, tensors, target)
    scratch, zeros = np.full(plain + 256, 0xFF, np.uint8), np.zeros(zeroed + 256, np.uint8)
    pack = LaunchPack(target, InterpDriver(), Tensor.from_numpy(scratch), Tensor.from_numpy(zeros))
    pack.run(op, tensors)
    assert not zeros.any(), f"{op.name} left its zeroed scratch dirty"
    assert (scratch[plain:] == 0xFF).all(), f"{op.name} wrote past its scratch"
    return arrays


@pytest.fixture
def check_op() -> CheckOp:
    """Compare kernels in the interpreter with the reference; see `_check`. Target: sm_90 without cuBLASLt."""
    return _check(_run_interp, Target(arch=90, num_sms=4, interpreted=True))


@pytest.fixture
def plan() -> Callable[..., NullPack]:
    """plan(op, target=H200, **args): the null pack after one call."""

    def record(op: Op[Any], *, target: Target = H200, **args: Any) -> NullPack:
        pack = NullPack(target)
        op(pack, **args)
        return pack

    return record


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
    target, driver, device, stream = gpu

    def upload(array: Array) -> tuple[Tensor, Tensor]:
        span = 1 + sum((n - 1) * s // array.itemsize for n, s in zip(array.shape, array.strides, strict=True))
        flat = np.lib.stride_tricks.as_strided(array, (span,), (array.itemsize,)).copy()
        memory = Tensor.empty((span,), array.dtype, device)
        memory.copy_from(flat, stream)
        stream.synchronize()
        strides = tuple(s // array.itemsize for s in array.strides)
        return memory, Tensor(memory.ptr, array.shape, memory.dtype, device, strides, memory)

    def run(op: Op[Any], args: dict[str, Any], target: Target) -> dict[str, Array]:
        sent = {k: upload(_like(v)) for k, v in args.items() if isinstance(v, np.ndarray)}
        tensors = {k: sent[k][1] if k in sent else v for k, v in args.items()}
        plain, zeroed = workspace(op, tensors, target)
        scratch = Tensor.empty((plain + 256,), np.dtype(np.uint8), device)
        zeros = Tensor.empty((zeroed + 256,), np.dtype(np.uint8), device)
        scratch.copy_from(np.full(plain + 256, 0xFF, np.uint8), stream)
        zeros.zero_(stream)
        LaunchPack(target, driver, scratch, zeros).run(op, tensors)
        stream.synchronize()
        assert not zeros.numpy().any(), f"{op.name} left its zeroed scratch dirty"
        return {
            k: np.lib.stride_tricks.as_strided(memory.numpy(), args[k].shape, args[k].strides)
            for k, (memory, _) in sent.items()
        }

    return _check(run, target)


@pytest.fixture(scope="session")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cubin cache for this run."""
    return tmp_path_factory.mktemp("cubins")
