"""The cuda driver against a fake of the CUDA driver: loading, launching, tensor maps. Real launches: the gpu tests."""

import ctypes
import types

import numpy as np
import pytest

from openinfer.kernels import (
    H200,
    CudaDriver,
    LaunchError,
    LaunchPack,
    NullPack,
    Scratch,
    Target,
    TensorMap,
    embed,
    launch,
    linear_add,
)
from openinfer.kernels.packs import cuda_driver
from openinfer.kernels.store.cubins import Compiled
from openinfer.tensor import Device, Tensor, bfloat16, check, driver, float32


class FakeStore:
    """Gives every spec the same kernel."""

    def __init__(self, **fields):
        meta = {"swizzle": 3, "block_size": [64, 64]}
        kernel = {
            "cubin": b"ELF",
            "name": "k",
            "shared": 1024,
            "num_warps": 4,
            "num_ctas": 1,
            "tensor_maps": (meta,),
        }
        self.kernel = Compiled(**{**kernel, **fields})

    def get(self, spec):
        return self.kernel


class FakeCuda:
    """The driver functions that are used; writes down what it is asked."""

    CUfunction_attribute = types.SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)

    def __init__(self):
        self.calls = []

    def cuModuleLoadData(self, image):  # noqa: N802
        self.calls.append(("load", image))
        return 0, 77

    def cuModuleGetFunction(self, module, name):  # noqa: N802
        return 0, (module, name)

    def cuFuncSetAttribute(self, function, attribute, value):  # noqa: N802
        self.calls.append(("attribute", attribute, value))
        return (0,)

    def cuLaunchKernel(self, function, *rest):  # noqa: N802
        *shape, stream, params, extra = rest
        pointers = (ctypes.c_uint64 * 3).from_address(params)
        first = [ctypes.c_uint64.from_address(p).value for p in pointers]
        self.calls.append(("launch", function, shape, stream, first, extra))
        return (0,)


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(cuda_driver, "driver", lambda: fake)
    return fake


def make(store, shared_limit=227 << 10):
    device = types.SimpleNamespace(shared_memory_per_block=shared_limit)
    return CudaDriver(device, types.SimpleNamespace(handle=5), store)


def args_of_embed(arena):
    return {
        "out": arena.alloc((4, 2048), bfloat16),
        "token_ids": arena.alloc((4,), "int32"),
        "table": arena.alloc((9, 2048), bfloat16),
    }


def test_a_kernel_is_loaded_once_and_launched_with_what_the_compiler_said(arena, cuda):
    args, pack = args_of_embed(arena), LaunchPack(H200, make(FakeStore(num_warps=12)), None, None)
    embed(pack, **args)
    embed(pack, **args)
    addresses = [args[n].ptr for n in ("out", "token_ids", "table")]
    shot = ("launch", (77, b"k"), [4, 2, 1, 384, 1, 1, 1024], 5, addresses, 0)
    assert cuda.calls == [("load", b"ELF"), shot, shot]


def test_shared_memory_beyond_48_kb_is_asked_for(arena, cuda):
    embed(LaunchPack(H200, make(FakeStore(shared=100_000)), None, None), **args_of_embed(arena))
    assert ("attribute", 8, 100_000) in cuda.calls


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"shared": 300_000}, "needs 300000 bytes of shared memory a block"),
        ({"num_ctas": 2}, "clusters of 2"),
    ],
)
def test_a_kernel_that_does_not_fit_is_refused(arena, cuda, fields, words):
    with pytest.raises(LaunchError, match=words):
        embed(LaunchPack(H200, make(FakeStore(**fields)), None, None), **args_of_embed(arena))
    assert cuda.calls == []


@pytest.mark.parametrize(
    ("tensor", "box", "size", "pitch"),
    [
        (Tensor(0x4000, (10, 128), bfloat16, Device("null"), (512, 1)), [64, 64], [128, 10], [1024]),
        (Scratch((10, 128), bfloat16), [64, 64], [128, 10], [256]),
        (
            Tensor(0x4000, (2, 3, 10, 64), bfloat16, Device("null"), (4096, 64, 256, 1)),
            [2, 3, 8, 64],
            [64, 10, 3, 2],
            [512, 128, 8192],
        ),
    ],
)
def test_tensor_maps_are_encoded_column_first_with_the_compilers_box(
    cuda, monkeypatch, tensor, box, size, pitch
):
    seen = {}

    def encode(base, kind, rank, address, size, pitch, box, step, interleave, swizzle, promotion, fill):
        seen.update(kind=kind, rank=rank, address=address, interleave=interleave, swizzle=swizzle, fill=fill)
        seen["size"] = list((ctypes.c_uint64 * rank).from_address(size))
        seen["pitch"] = list((ctypes.c_uint64 * (rank - 1)).from_address(pitch))
        seen["box"] = list((ctypes.c_uint32 * rank).from_address(box))
        assert base % 64 == 0
        ctypes.memmove(base, b"\7" * 128, 128)
        return 0

    monkeypatch.setattr(cuda_driver, "encoder", lambda: encode)
    tensor_map = TensorMap(tensor, tuple(box))
    spec = launch("m", "f", (1,), {"a": tensor_map}, {}).spec
    made = make(FakeStore(tensor_maps=({"swizzle": 3, "block_size": box},))).encode_tensor_map(
        spec, tensor_map, 0x4000, 0
    )
    assert made == b"\7" * 128
    assert seen == {
        "kind": 9, "rank": len(box), "address": 0x4000, "size": size, "pitch": pitch, "box": box[::-1],
        "interleave": 0, "swizzle": 3, "fill": 0,
    }  # fmt: skip
    monkeypatch.setattr(cuda_driver, "encoder", lambda: lambda *a: 1)
    with pytest.raises(LaunchError, match="cuTensorMapEncodeTiled gave 1"):
        make(FakeStore()).encode_tensor_map(spec, tensor_map, 0x4000, 0)


def test_a_product_without_cublas_names_the_way_out(arena, cuda):
    scratch = arena.alloc((40 << 20,), "uint8")
    x, h, weight = (arena.alloc(s, bfloat16) for s in ((100, 64), (100, 64), (64, 64)))
    with pytest.raises(LaunchError, match="plan with cublas=False"):
        linear_add(LaunchPack(H200, make(FakeStore()), scratch, None), x=x, h=h, weight=weight)


@pytest.mark.gpu
@pytest.mark.parametrize("cublas", [True, False])
@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_a_captured_call_replays_on_new_data(gpu, normal, tokens, cublas):
    target, cuda_driver_, device, stream = gpu
    target = Target(target.arch, target.num_sms, cublas and target.cublas, target.gpu)
    n, k = 1024, 2048
    weight, x, h = (Tensor.empty(shape, bfloat16, device) for shape in ((n, k), (tokens, n), (tokens, k)))
    plan = NullPack(target)
    linear_add(plan, x=x, h=h, weight=weight)
    scratch, zeroed = (
        Tensor.empty((plan.workspace_bytes(zeroed=z) + 1,), "uint8", device) for z in (False, True)
    )
    zeroed.zero_(stream)
    pack, values = LaunchPack(target, cuda_driver_, scratch, zeroed), normal(n, k, scale=k**-0.5)
    weight.copy_from(values)
    linear_add(pack, x=x, h=h, weight=weight)  # loads the kernels
    stream.synchronize()
    cu = driver()
    check(cu.cuStreamBeginCapture(stream.handle, cu.CUstreamCaptureMode(1)), "cuStreamBeginCapture")
    linear_add(pack, x=x, h=h, weight=weight)
    graph = check(cu.cuStreamEndCapture(stream.handle), "cuStreamEndCapture")
    executable = check(cu.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")
    results = []
    given = normal(tokens, n), normal(tokens, k)
    for _ in range(2):
        x.copy_from(given[0])
        h.copy_from(given[1])
        check(cu.cuGraphLaunch(executable, stream.handle), "cuGraphLaunch")
        stream.synchronize()
        results.append(x.numpy().astype(float32))
    check(cu.cuGraphExecDestroy(executable), "cuGraphExecDestroy")
    check(cu.cuGraphDestroy(graph), "cuGraphDestroy")
    want = given[0].astype(float32) + given[1].astype(float32) @ values.astype(float32).T
    assert np.linalg.norm(results[0] - want) < 4e-3 * np.linalg.norm(want)
    np.testing.assert_array_equal(results[0], results[1])  # equal calls, equal bits
