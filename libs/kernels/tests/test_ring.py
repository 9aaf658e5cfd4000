"""Products of few tokens by rings of CUDA C++: which calls take them, what NVRTC makes of them, and their results."""

import ctypes
import dataclasses
import datetime
import types
from dataclasses import replace

import numpy as np
import pytest

from openinfer.kernels import (
    H200,
    CompileError,
    CudaDriver,
    CudaSpec,
    KernelMissing,
    LaunchError,
    LaunchPack,
    NullPack,
    Store,
    Target,
    gate_up_silu,
    launch_cuda,
    linear_add,
    norm_linear,
)
from openinfer.kernels.formats.fp4 import fp4_pairs, fp4_row, fp4_scales
from openinfer.kernels.formats.int4 import group_words, pack
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.linear.choices import choose, ring_choice
from openinfer.kernels.op.op import mapped
from openinfer.kernels.op.packing import Parameters
from openinfer.kernels.op.rounding import FP4_VALUES
from openinfer.kernels.op.target import shared_bytes
from openinfer.kernels.packs import cuda_driver
from openinfer.kernels.packs.interp import InterpDriver
from openinfer.kernels.store import cubins as store
from openinfer.kernels.testing import copied, of_the_day, run_on_gpu, run_reference
from openinfer.tensor import Device, Tensor, bfloat16, float8_e4m3fn, float32, int32, uint8

RINGS = dataclasses.replace(H200, nvrtc=True)

# hidden, rows of qkv, columns of heads, intermediate: Qwen3-0.6B, 4B, 8B, 32B, Qwen3.5-4B
MODELS = [
    (1024, 4096, 2048, 3072),
    (2560, 6144, 4096, 9728),
    (4096, 6144, 4096, 12288),
    (5120, 10240, 8192, 25600),
    (2560, 12352, 4096, 9216),
]


def layer(pack, arena, hidden, qkv, heads, inter, tokens=1):
    """The products of a layer."""
    x, gain = arena.alloc((tokens, hidden), bfloat16), arena.alloc((hidden,), bfloat16)
    weights = [
        arena.alloc(s, bfloat16)
        for s in ((qkv, hidden), (hidden, heads), (2 * inter, hidden), (hidden, inter))
    ]
    out, attended, mlp = (arena.alloc((tokens, n), bfloat16) for n in (qkv, heads, inter))
    norm_linear(pack, out=out, x=x, norm_weight=gain, weight=weights[0], eps=1e-6)
    linear_add(pack, x=x, h=attended, weight=weights[1])
    gate_up_silu(pack, out=mlp, x=x, norm_weight=gain, weight=weights[2], eps=1e-6)
    linear_add(pack, x=x, h=mlp, weight=weights[3])


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_layer_of_qwen3_4b_takes_four_rings(arena, tokens):
    pack = NullPack(RINGS)
    layer(pack, arena, *MODELS[1], tokens)
    launches = [command for call in pack.calls for command in call.commands]
    assert [launch.grid for launch in launches] == [(132, 1, 1)] * 4
    assert all(launch.early and isinstance(launch.spec, CudaSpec) for launch in launches)
    flags = [
        {name for name, value in launch.spec.constants if name in ("NORM", "ADD", "GATED") and value}
        for launch in launches
    ]
    assert flags == [{"NORM"}, {"ADD"}, {"NORM", "GATED"}, {"ADD"}]
    assert all(launch.spec.shared <= shared_bytes(90) for launch in launches)


@pytest.mark.parametrize("model", MODELS)
def test_a_ring_of_one_token_has_few_bytes_under_way_and_one_of_several_all(arena, model):
    for tokens in (1, 2, 4):
        pack = NullPack(RINGS)
        layer(pack, arena, *model, tokens)
        for spec in pack.specs():
            sizes = dict(spec.constants) if isinstance(spec, CudaSpec) else {}
            if spec.function == "gemv_ring":
                stage = sizes["ROWS"] * sizes["WARPS"] * sizes["CHUNKS"] * 512
                assert sizes["UNDER_WAY"] == min(sizes["STAGES"], max(2, (80 << 10) // stage))
            elif spec.function == "gemv_ring_tokens":
                assert sizes["UNDER_WAY"] == sizes["STAGES"]


@pytest.mark.parametrize(
    "target",
    [
        H200,
        dataclasses.replace(RINGS, arch=100),
        dataclasses.replace(RINGS, arch=80),
        dataclasses.replace(RINGS, batch_invariant=True),
    ],
)
def test_other_targets_choose_as_without_it(target):
    for op, n, k in (("norm_linear", 6144, 2560), ("gate_up_silu", 19456, 2560), ("linear_add", 2560, 9728)):
        assert choose(target, op, 1, n, k) == choose(dataclasses.replace(target, nvrtc=False), op, 1, n, k)


@pytest.mark.parametrize(
    ("op", "m", "n", "k"),
    [
        ("norm_linear", 5, 6144, 2560),
        ("linear_add", 4, 4096, 12288),  # a warp has no room for its parts of four tokens
        ("logits", 1, 151936, 2560),
        ("linear_add", 1, 2560, 2560 + 16),
        ("linear_add", 1, 64, 23 * 256),
    ],
)
def test_other_products_take_no_ring(op, m, n, k):
    assert ring_choice(RINGS, op, m, n, k) is None


TODAY = datetime.date.today().toordinal()
LAYERS = [*((model, 1) for model in MODELS), (MODELS[1], 2), (MODELS[0], 3), (MODELS[0], 4)]
LAYERS_OF_TODAY = (TODAY % len(MODELS), len(MODELS) + TODAY % 3)


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param([LAYERS[n] for n in LAYERS_OF_TODAY], id="of the day"),
        pytest.param(LAYERS, id="all", marks=pytest.mark.slow),
    ],
)
def test_rings_of_published_sizes_compile(layers, arena, cubins, resources):
    """By default of one token for a model and of several for Qwen3-4B, by the day."""
    pack = NullPack(RINGS)
    for model, tokens in layers:
        layer(pack, arena, *model, tokens)
    specs = [spec for spec in pack.specs() if isinstance(spec, CudaSpec)]
    assert len(specs) > 4
    kernels = Store(90, cubins, folders=[])
    kernels.prepare(specs)
    again = Store(90, cubins, folders=[])
    assert again.prepare(specs) == (len(specs), 0)
    for spec in specs:
        compiled = kernels.get(spec)
        assert again.get(spec) == compiled
        assert (compiled.name, compiled.num_warps) == (spec.function, spec.threads // 32)
        assert compiled.shared <= shared_bytes(90)
        used = resources(compiled.cubin)
        assert used["STACK"] == used["LOCAL"] == 0
        assert used["REG"] * spec.threads <= 65536


def small(**changes):
    given = {"threads": 64, "shared": 4096, "early": True, **changes}
    constants = dict.fromkeys(("UNDER_WAY", "WARPS", "CHUNKS", "ROWS", "STAGES", "TURNS"), 1)
    constants |= dict.fromkeys(("NORM", "ADD", "GATED", "FLOAT", "WIDE"), False)
    return launch_cuda(
        "openinfer.kernels.device", "ring.cu", "gemv_ring", (1,), {"N": 16}, constants, **given
    )


def test_without_nvrtc_a_cached_kernel_is_found_and_a_missing_one_names_the_extra(tmp_path, monkeypatch):
    spec = small().spec
    made = Store(90, tmp_path / "made", folders=[])
    assert made.prepare([spec]) == (1, 1)
    assert [path.parent.name for path in (tmp_path / "made/cuda").rglob("*.cubin")] == ["sm_90"]
    monkeypatch.setattr(store, "nvrtc_version", lambda: None)
    monkeypatch.setattr(store, "triton_version", lambda: None)
    shipped = Store(90, tmp_path / "empty", folders=[tmp_path / "made"])
    assert shipped.can_prepare_cuda([spec])
    assert shipped.prepare([spec]) == (1, 0)
    empty = Store(90, tmp_path / "empty", folders=[])
    assert not empty.can_prepare_cuda([spec])
    assert empty.can_prepare_cuda([])
    with pytest.raises(KernelMissing, match=r"pip install 'openinfer-kernels\[nvrtc\]'"):
        empty.prepare([spec])


def test_the_compilers_words_and_a_missing_file_are_told(tmp_path):
    spec = small().spec
    wrong = dataclasses.replace(spec, constants=spec.constants[:-1])
    with pytest.raises(CompileError, match=r"ring\.cu\(\d+\): error: identifier \"WIDE\" is undefined"):
        Store(90, tmp_path, folders=[]).prepare([wrong])
    with pytest.raises(KernelMissing, match=r"no gone\.cu in the package"):
        Store(90, tmp_path, folders=[]).prepare([dataclasses.replace(spec, file="gone.cu")])


def test_the_key_follows_the_source_and_the_constants(monkeypatch):
    spec = small().spec
    other = dataclasses.replace(spec, constants=(("ADD", 1), *spec.constants[1:]))
    keys = {store.spec_key(spec, 90), store.spec_key(spec, 100), store.spec_key(other, 90)}
    monkeypatch.setattr(store, "cuda_source", lambda module, file: "// changed")
    assert len(keys | {store.spec_key(spec, 90)}) == 4


def test_parameters_end_with_the_last_argument():
    tensor = Tensor(0x1000, (4,), bfloat16, Device("null"))
    record = launch_cuda("m", "f.cu", "f", (1,), {"x": tensor, "n": 3, "eps": 0.5}, {}, threads=32, shared=0)
    parameters = Parameters(record.spec)
    parameters.pack(record.args, lambda t: t.ptr, lambda *a: b"")
    at = list((ctypes.c_uint64 * 3).from_address(parameters.params))
    assert [a - at[0] for a in at] == [0, 8, 12]
    with pytest.raises(IndexError):
        parameters.read(3, 8)


def test_a_tensor_that_bulk_copies_cannot_read_is_refused():
    odd = Tensor(0x1008, (4,), bfloat16, Device("null"))
    with pytest.raises(LaunchError, match="multiples of 16 bytes"):
        launch_cuda("m", "f.cu", "f", (1,), {"x": odd}, {}, threads=32, shared=0)


def test_an_early_launch_says_so_to_the_driver(arena, monkeypatch):
    cu = pytest.importorskip("cuda.bindings.driver")
    calls = []

    def launch(config, function, parameters, extra):
        calls.append((config, function))
        return (0,)

    fake = types.SimpleNamespace(
        cuModuleLoadData=lambda image: (0, 7),
        cuModuleGetFunction=lambda module, name: (0, name),
        cuFuncSetAttribute=lambda function, attribute, value: calls.append((int(attribute), value)) or (0,),
        cuLaunchKernelEx=launch,
        **{
            name: getattr(cu, name)
            for name in ("CUlaunchAttribute", "CUlaunchAttributeID", "CUlaunchConfig", "CUfunction_attribute")
        },
    )
    monkeypatch.setattr(cuda_driver, "driver", lambda: fake)
    kernel = store.Compiled(b"ELF", "gemv_ring", 100_000, 11, 1, ())
    driver = CudaDriver(
        types.SimpleNamespace(shared_memory_per_block=227 << 10),
        types.SimpleNamespace(handle=5),
        types.SimpleNamespace(get=lambda spec: kernel),
    )
    x, gain = arena.alloc((1, 2560), bfloat16), arena.alloc((2560,), bfloat16)
    weight, out = arena.alloc((6144, 2560), bfloat16), arena.alloc((1, 6144), bfloat16)
    norm_linear(
        LaunchPack(RINGS, driver, None, None), out=out, x=x, norm_weight=gain, weight=weight, eps=1e-6
    )
    attributes, ((config, function),) = calls[:2], calls[2:]
    names = cu.CUfunction_attribute
    assert attributes == [
        (names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 100_000),
        (names.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
    ]
    assert function == b"gemv_ring"
    assert (config.gridDimX, config.blockDimX, config.sharedMemBytes, int(config.hStream)) == (
        132,
        352,
        100_000,
        5,
    )
    (early,) = config.attrs
    assert early.id == cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert early.value.programmaticStreamSerializationAllowed == 1


def test_the_interpreter_refuses_it():
    record = small()
    with pytest.raises(LaunchError, match=r"the interpreter has no ring\.cu"):
        InterpDriver().launch(record.spec, record.grid, Parameters(record.spec), True)


KINDS = ("block", "token", "tensor", "int4", "fp4")


def coded_args(kind, weight, parts=1):
    """A weight of codes [N, K] and how x is quantised, as an op takes them: numbers of float32 `weight`, rounded."""
    n, k = weight.shape
    if kind == "int4":
        scales = (np.abs(weight).reshape(n, k // 128, 128).max(2) / 7 + 1e-6).astype(bfloat16)
        wide = np.repeat(scales.astype(float32), 128, axis=1)
        zeros = np.arange(n * (k // 128)).reshape(n, -1) % 3 + 7
        codes = np.clip(np.rint(weight / wide) + np.repeat(zeros, 128, axis=1), 0, 15)
        return {"weight": Linear(pack(codes.astype(np.uint8)), group_words(scales, zeros))}
    if kind == "fp4":
        most = np.abs(weight).reshape(n, k // 16, 16).max(2) / 6
        factors = most.max(1, keepdims=True) / 448
        scales = (most / factors).astype(float8_e4m3fn)
        sizes = weight / np.repeat(scales.astype(float32) * factors, 16, axis=1)
        codes = np.searchsorted((FP4_VALUES[1:8] + FP4_VALUES[:7]) / 2, np.abs(sizes)) + 8 * (sizes < 0)
        return {"weight": Linear(fp4_pairs(pack(codes.astype(np.uint8))), fp4_scales(scales, factors))}
    x_scale = np.array([0.02], float32) if kind == "tensor" else None
    if kind != "block":
        scales = (np.abs(weight).max(1, keepdims=True) / 448).astype(float32)
        return {"weight": Linear((weight / scales).astype(float8_e4m3fn), scales, kind, x_scale)}
    scales = np.empty((parts * -(-n // parts // 128), k // 128), float32)
    codes, of_part = np.empty(weight.shape, float8_e4m3fn), n // parts
    for row in range(n):
        block = row // of_part * (len(scales) // parts) + row % of_part // 128
        scales[block] = 0.001 * (1 + block % 3) + 0.0002 * np.arange(k // 128)
        codes[row] = (weight[row] / np.repeat(scales[block], 128)).clip(-448, 448).astype(float8_e4m3fn)
    return {"weight": Linear(codes, scales, kind, x_scale)}


def layer_of_codes(kind, normal, hidden=1024, qkv=1040, heads=2048, inter=3072):
    """The products of a layer with weights of codes: (op, what it writes, arguments)."""
    x, gain = normal(1, hidden), (1 + normal(hidden, scale=0.1).astype(float32)).astype(bfloat16)
    normed = {"x": x, "norm_weight": gain, "eps": 1e-6}
    weights = [
        coded_args(kind, normal(n, k, scale=0.03).astype(float32), parts)
        for n, k, parts in ((qkv, hidden, 1), (hidden, heads, 1), (2 * inter, hidden, 2), (hidden, inter, 1))
    ]
    return [
        (norm_linear, "out", {"out": normal(1, qkv), **normed, **weights[0]}),
        (linear_add, "x", {"x": x, "h": normal(1, heads), **weights[1]}),
        (gate_up_silu, "out", {"out": normal(1, inter), **normed, **weights[2]}),
        (linear_add, "x", {"x": x, "h": normal(1, inter), **weights[3]}),
    ]


def on_null(args):
    """The arguments on the null device."""
    null = Device("null")
    return mapped(args, np.ndarray, lambda v: Tensor(4096, v.shape, v.dtype, null))


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_of_codes_is_one_ring_that_normalises_and_quantises(kind, normal):
    for op, _, args in layer_of_codes(kind, normal):
        (command,) = op.plan(RINGS, op.args(**on_null(args)))
        constants = dict(command.spec.constants)
        assert (command.spec.function, command.early) == ("gemv_ring_groups", True)
        assert constants["NORM"] == ("norm_weight" in args)
        assert constants["CODING"] == {"int4": 0, "block": 1, "token": 2, "tensor": 3, "fp4": 4}[kind]
        assert command.spec.shared <= shared_bytes(90)


@pytest.mark.parametrize("change", [{"arch": 89}, {"batch_invariant": True}, {"nvrtc": False}])
def test_other_targets_have_no_ring_of_codes(change, normal):
    target = dataclasses.replace(RINGS, **change)
    for op, _, args in layer_of_codes("block", normal, 256, 256, 256, 256):
        assert all("ring" not in str(c.spec) for c in op.plan(target, op.args(**on_null(args))))


def test_codes_that_no_ring_takes_are_multiplied_as_before(normal):
    _, _, args = layer_of_codes("block", normal, 256, 256, 256, 256)[0]
    plain = {**args, "weight": replace(args["weight"], coding=None)}
    two = {**args, "x": normal(2, 256), "out": normal(2, 256)}
    wide = {**args, "x": normal(1, 256 + 64), "norm_weight": normal(256 + 64)}
    layer = coded_args("block", normal(256, 384).astype(float32))["weight"]
    wide |= {"weight": replace(layer, weight=np.zeros((256, 320), float8_e4m3fn))}
    for other in (plain, two, wide):
        assert all(
            "ring" not in str(c.spec) for c in norm_linear.plan(RINGS, norm_linear.args(**on_null(other)))
        )


@pytest.mark.parametrize("kind", of_the_day(["block", "token", "int4", "fp4"]))
def test_rings_of_codes_of_published_sizes_compile(kind, arena, cubins, resources):
    pack = NullPack(RINGS)
    for hidden, qkv, heads, inter in MODELS[1:2]:
        shapes = ((qkv, hidden), (hidden, heads), (2 * inter, hidden), (hidden, inter))
        for (n, k), op in zip(shapes, (norm_linear, linear_add, gate_up_silu, linear_add), strict=True):
            gated = op is gate_up_silu
            args = of_codes(arena, kind, n, k, 2 if gated else 1)
            if op is linear_add:
                op(pack, x=arena.alloc((1, n), bfloat16), h=arena.alloc((1, k), bfloat16), **args)
                continue
            gain, out = arena.alloc((k,), bfloat16), arena.alloc((1, n // 2 if gated else n), bfloat16)
            op(pack, out=out, x=arena.alloc((1, k), bfloat16), norm_weight=gain, eps=1e-6, **args)
    specs = pack.specs()
    kernels = Store(90, cubins, folders=[])
    kernels.prepare(specs)
    for spec in specs:
        used = resources(kernels.get(spec).cubin)
        assert used["STACK"] == used["LOCAL"] == 0
        assert used["REG"] * spec.threads <= 65536


def of_codes(arena, kind, n, k, parts):
    """A weight of codes without values, as an op takes it."""
    if kind in ("int4", "fp4"):
        words = arena.alloc(*((n, k // 128), int32) if kind == "int4" else ((n, fp4_row(k)), uint8))
        return {"weight": Linear(arena.alloc((n, k // 2), uint8), words)}
    blocks = (n // 128, k // 128) if kind == "block" else (n, 1)
    return {"weight": Linear(arena.alloc((n, k), float8_e4m3fn), arena.alloc(blocks, float32), kind)}


@pytest.mark.parametrize("kind", ["int4", "fp4"])
@pytest.mark.parametrize(("hidden", "inter"), [(2560, 9728), (4096, 12288), (5120, 17408)])
def test_an_sm_has_no_room_for_two_programs_of_gate_and_up_in_four_bits(arena, kind, hidden, inter):
    x, out, gain = (arena.alloc(shape, bfloat16) for shape in ((1, hidden), (1, inter), (hidden,)))
    weight, pack = of_codes(arena, kind, 2 * inter, hidden, 2), NullPack(RINGS)
    gate_up_silu(pack, out=out, x=x, norm_weight=gain, eps=1e-6, **weight)
    ((command,),) = (call.commands for call in pack.calls)
    assert shared_bytes(90) // 2 < command.spec.shared <= shared_bytes(90)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", [1024, 2560])
def test_rings_of_codes_agree_with_the_reference_and_repeat_their_bits(kind, hidden, gpu, normal):
    target, driver, _, stream = gpu
    if target.arch != 90:
        pytest.skip("rings are for sm_90")
    target = Target(target.arch, target.num_sms, gpu=target.gpu, nvrtc=True)
    for op, written, args in layer_of_codes(kind, normal, hidden):
        assert [c.spec.function for c in op.plan(target, op.args(**copied(args)[1]))] == ["gemv_ring_groups"]
        found = [run_on_gpu(op, args, target, driver, stream)[written] for _ in range(2)]
        np.testing.assert_array_equal(found[0], found[1])
        want = run_reference(op, args)[written].astype(float32)
        assert np.linalg.norm(found[0].astype(float32) - want) < 5e-3 * np.linalg.norm(want), op


@pytest.mark.gpu
@pytest.mark.parametrize("gain_dtype", [bfloat16, float32])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_rings_agree_with_the_reference_and_repeat_their_bits(gpu, normal, gain_dtype, tokens):
    target, driver, _, stream = gpu
    if target.arch != 90:
        pytest.skip("rings are for sm_90")
    target = Target(target.arch, target.num_sms, gpu=target.gpu, nvrtc=True)
    hidden, qkv, heads, inter = 1024, 1040, 2048, 3072
    x, gain = normal(tokens, hidden), (1 + normal(hidden, scale=0.1).astype(float32)).astype(gain_dtype)
    normed = {"x": x, "norm_weight": gain, "eps": 1e-6}
    cases = [
        (norm_linear, "out", {"out": normal(tokens, qkv), **normed, "weight": normal(qkv, hidden, scale=0.03)}),
        (linear_add, "x", {"x": x, "h": normal(tokens, heads), "weight": normal(hidden, heads, scale=0.02)}),
        (gate_up_silu, "out",
         {"out": normal(tokens, inter), **normed, "weight": normal(2 * inter, hidden, scale=0.03)}),
        (linear_add, "x", {"x": x, "h": normal(tokens, inter), "weight": normal(hidden, inter, scale=0.02)}),
    ]  # fmt: skip
    for op, written, args in cases:
        assert [type(command.spec) for command in op.plan(target, op.args(**copied(args)[1]))] == [CudaSpec]
        found = [run_on_gpu(op, args, target, driver, stream)[written] for _ in range(2)]
        np.testing.assert_array_equal(found[0], found[1])
        want = run_reference(op, args)[written].astype(float32)
        # The reference rounds normalised values; a ring rounds none.
        error = np.linalg.norm(found[0].astype(float32) - want, axis=1) / np.linalg.norm(want, axis=1)
        assert error.max() < 1e-2, op  # of each token by itself
