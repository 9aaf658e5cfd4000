"""Attention over an FP8 cache: the kernels in the interpreter, and on a GPU, against the reference; and the reference
against a cache in bfloat16."""

import dataclasses
import datetime
import itertools

import numpy as np
import pytest

from openinfer.kernels import (
    H200,
    ContractError,
    CpuPack,
    NullPack,
    Store,
    Target,
    Workload,
    attention,
    norm_rope_attend,
)
from openinfer.kernels.attention import long as long_attention
from openinfer.kernels.attention.tiles import HopperTile, Tile
from openinfer.kernels.op.cases import Memory
from openinfer.kernels.op.launch import Aligned, launch
from openinfer.kernels.op.rounding import q8_codes, q8_values
from openinfer.kernels.op.target import shared_bytes
from openinfer.kernels.ops import attend as attend_module
from openinfer.kernels.testing import NEVER, coded_cache, paged_places, run_on_gpu
from openinfer.tensor import Device, Tensor, bfloat16, float32

BF16 = 6e-3  # relative error: weights and result rounded to 8 bits
FLIPPED = 2e-2
"""Relative error of what is written: a value that differs in bfloat16's last bit may get the code beside."""


@pytest.fixture
def step(norm_rope_args, normal):
    """step(lengths, before, **more): arguments for rows of `lengths` new tokens after `before` cached ones. Heads are
    of very different sizes."""

    def make(lengths, before, *, heads=4, kv_heads=2, dim=64, page_size=16, **more):
        sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "page_size": page_size}
        args = norm_rope_args(lengths, before, **sizes, **more)
        cache = coded_cache(args["block_tables"].max() + 1, kv_heads, page_size, dim)
        large = np.float32(2.0) ** np.arange(-kv_heads, kv_heads).reshape(2, kv_heads, 1)
        for page, place in paged_places(args, before, page_size):
            codes, scales = q8_codes(normal(2, kv_heads, dim).astype(np.float32) * large)
            cache["kv"][page, :, :, place], cache["kv_scales"][page, :, :, place] = codes, scales
        return args | cache

    return make


def check(run_both, args, target=None):
    """Every token within the bound by itself; what is written has the reference's values, and the rest is untouched."""
    got, want = run_both(norm_rope_attend, args, target)
    ours, right = got["out"].astype(float32), want["out"].astype(float32)
    live = np.linalg.norm(right, axis=1) > 0
    error = np.linalg.norm(ours - right, axis=1)[live] / np.linalg.norm(right, axis=1)[live]
    assert error.size
    assert error.max() < 3 * BF16
    assert (ours[~live] == 0).all()
    written = want["kv_scales"] != NEVER
    assert written.any()
    assert (got["kv_scales"][~written] == NEVER).all()
    assert (got["kv"].view(np.uint8)[~written] == NEVER).all()
    ours, right = (q8_values(x["kv"][written], x["kv_scales"][written]) for x in (got, want))
    assert np.linalg.norm(ours - right) <= FLIPPED * np.linalg.norm(right)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 128), (5, 1, 64), (8, 1, 256)])
def test_decode(run_both, step, page_size, heads, kv_heads, dim):
    sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "page_size": page_size}
    check(run_both, step([1] * 6, [0, 1, 63, 64, 65, 200], **sizes))


@pytest.mark.parametrize("sms", [1, 16])
def test_decode_of_one_row_is_split(run_both, step, sms):
    check(run_both, step([1], [300], page_size=32), Target(90, sms, interpreted=True))


def test_rows_that_fill_the_gpu_share_the_spare_parts(run_both, step, monkeypatch):
    monkeypatch.setattr(attention, "LARGE_PART", 64)
    monkeypatch.setattr(attention, "SPARE_PARTS", 4)
    args = step([1, 1, 0, 1], [0, 300, 9, 64], dead=(3,), tokens=4, max_q_len=1, window=130)
    check(run_both, args, Target(90, 1, interpreted=True))


TODAY = datetime.date.today().toordinal()


def half(ones, others):
    """Pairs of two parameters. Of two by two, a half is of the day, with each value once; the others are slow."""
    for (n, one), (m, other) in itertools.product(enumerate(ones), enumerate(others)):
        yield pytest.param(one, other, marks=() if (n + m + TODAY) % 2 else pytest.mark.slow)


@pytest.mark.parametrize(("sizes", "window"), [*half([(16, 64), (64, 128)], [0, 30])])
def test_a_mixed_step(run_both, step, sizes, window):
    page_size, dim = sizes
    lengths, before = [1, 40, 0, 1, 33, 1, 9], [100, 30, 7, 64, 0, 3, 130]
    args = step(
        lengths, before, dead=(3,), tokens=sum(lengths) + 20,
        page_size=page_size, dim=dim, window=window,
    )  # fmt: skip
    check(run_both, args)


def test_few_tokens_a_row(run_both, step):
    check(run_both, step([3, 1, 4], [70, 130, 0], kv_heads=1, tokens=20, max_q_len=4))


def test_one_kernel_for_all_rows(run_both, step):
    target = Target(90, 4, interpreted=True, batch_invariant=True)
    check(run_both, step([1, 1, 1], [70, 130, 0]), target)


def test_heads_without_norms(run_both, step):
    for lengths in ([1, 1], [3, 20]):
        args = step(lengths, [70, 0])
        del args["q_norm"], args["k_norm"]
        check(run_both, args)


def test_half_the_bytes_are_read(step):
    args = step([1, 1], [1000, 30], dim=128)
    fp8 = norm_rope_attend.cost(Workload.decode(2, 1000), norm_rope_attend.args(**as_tensors(args)))
    kv = np.zeros(args["kv"].shape, bfloat16)
    plain = as_tensors({**args, "kv": kv, "kv_scales": None})
    bf16 = norm_rope_attend.cost(Workload.decode(2, 1000), norm_rope_attend.args(**plain))
    assert fp8.flops == bf16.flops
    assert fp8.bytes / bf16.bytes == pytest.approx(129 / 256, abs=0.01)


def as_tensors(args):
    return {k: Tensor.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in args.items()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a | {"kv_scales": None}, "kv is float8_e4m3fn; it must be bfloat16"),
        (lambda a: a | {"kv": a["kv"].astype(bfloat16)}, "kv is bfloat16; it must be float8_e4m3fn"),
        (
            lambda a: a | {"kv_scales": a["kv_scales"].astype(np.float32)},
            "kv_scales is float32; it must be uint8",
        ),
        (
            lambda a: a | {"kv_scales": a["kv_scales"].copy()},
            "bytes apart; both must be the same multiple of 16",
        ),
    ],
)
def test_what_it_refuses(step, change, words):
    args = change(step([1, 1], [5, 30]))
    with pytest.raises(ContractError, match=words):
        norm_rope_attend(CpuPack(), **as_tensors(args))


def test_a_gpu_without_float8_is_refused(step):
    args = step([1, 1], [5, 30])
    with pytest.raises(ContractError, match="that takes sm_89 or newer, and this is sm_80"):
        norm_rope_attend(NullPack(Target(80, 108)), **as_tensors(args))


@pytest.fixture
def gpu_and_reference(on_gpu, reference):
    """As run_both, without the interpreter, which would take minutes."""
    return lambda op, args, target: (on_gpu(op, args), reference(op, args))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64, 256])
@pytest.mark.parametrize("page_size", [16, 64])
def test_decode_of_a_model_on_a_gpu(gpu_and_reference, step, rng, rows, page_size):
    before = rng.integers(0, 900, rows).tolist()
    sizes = {"heads": 32, "kv_heads": 8, "dim": 128, "page_size": page_size}
    check(
        gpu_and_reference,
        step([1] * rows, before, dead=(rows // 2,) if rows > 1 else (), **sizes),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_prompts_on_a_gpu(gpu_and_reference, step, dim, window):
    lengths, before = [1, 300, 0, 1, 65, 1, 9, 700], [800, 100, 7, 64, 0, 3, 130, 260]
    sizes = {"heads": 16, "kv_heads": 4, "dim": dim, "window": window}
    check(gpu_and_reference, step(lengths, before, dead=(3, 6), tokens=1200, **sizes))


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "sms"), [(89, 128), (90, 132), (100, 148), (120, 188)])
def test_kernels_compile_and_fit(cubins, step, arch, sms):
    pack, store = NullPack(Target(arch, sms)), Store(arch, cubins, folders=[])
    for heads, kv_heads, dim in [(32, 8, 128), (16, 4, 256), (8, 2, 64)]:
        sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim}
        for lengths in ([1], [1] * 40, [600], [4, 4], [1, 70]):
            args = step(lengths, [3] * len(lengths), **sizes)
            norm_rope_attend(pack, **as_tensors(args))
    store.prepare(pack.specs())
    assert max(store.get(s).shared for s in pack.specs()) <= shared_bytes(arch)
    names = {spec.function for spec in pack.specs()}
    prompts = {"widen_pages", "attend_prompt"} if arch == 90 else {"attend_long"}
    assert names == {"attend_new", "attend_short", "attend_split", "qk_norm_rope_write"} | prompts


def over_widened_pages(call, tile, page_rows, num_sms, short, own):
    """The launch for Hopper, as one of the kernel that the interpreter has."""
    args = {name: value for name, value in call.args.items() if name != "kv_scales"} | own
    args |= {"kv": own["kv"].tensor, "page_stride": Aligned(page_rows * call.dim)}
    args |= {"rows": call.rows, "tokens": call.tokens, "short": short}
    constants = {**call.constants(Tile(64, 32, 4, 2)), "kv_scales": None, "done": None, "PAIRS": False}
    tiles = call.tokens // (64 // call.group) + call.rows + 1
    return launch(attention._DEVICE, "attend_long", (call.kv_heads, tiles), args, constants)


@pytest.mark.parametrize(("page_size", "blocks"), [*half([16, 128], [100, 2])])
def test_prompts_read_pages_that_were_widened(interpreted, reference, step, monkeypatch, page_size, blocks):
    """With room for all rows, and for the first of three."""
    monkeypatch.setattr(attention, "hopper_tile", lambda *_: HopperTile(64))
    monkeypatch.setattr(long_attention, "_by_hopper", over_widened_pages)
    monkeypatch.setattr(long_attention, "MOST_BYTES", blocks * 128 * 2 * 2 * 64 * 2)
    lengths, before = [1, 40, 0, 1, 33, 1, 9], [100, 130, 7, 64, 0, 3, 130]
    sizes = {"dead": (3, 6), "tokens": sum(lengths) + 20, "page_size": page_size}
    check(
        lambda op, args, _: (interpreted(op, args), reference(op, args)),
        step(lengths, before, **sizes),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [2, 5])
def test_prompts_without_room_on_a_gpu(gpu_and_reference, step, monkeypatch, blocks):
    monkeypatch.setattr(long_attention, "MOST_BYTES", blocks * 128 * 2 * 4 * 128 * 2)
    lengths, before = [1, 300, 65, 700], [800, 100, 70, 260]
    args = step(lengths, before, heads=16, kv_heads=4, dim=128, tokens=1200)
    check(gpu_and_reference, args)


def test_where_prompts_are_widened(step):
    def kernels(lengths, target=H200, **sizes):
        pack = NullPack(target)
        norm_rope_attend(pack, **as_tensors(step(lengths, [0] * len(lengths), **sizes)))
        return [command.spec.function for command in pack.calls[0].commands][1:]

    alone = ["widen_pages", "attend_prompt"]
    assert kernels([600], dim=128) == alone
    assert kernels([600, 1], dim=128) == ["attend_split", *alone]
    assert kernels([600], Target(100, 148), dim=128) == ["attend_long"]
    assert kernels([600], dim=128, page_size=256) == ["attend_long"]
    assert kernels([60], dim=128) == ["attend_split"]
    assert kernels([600], dataclasses.replace(H200, batch_invariant=True), dim=128) == ["attend_long"]


def test_other_launches_of_a_case_have_the_same_parameters() -> None:
    target = Target(90, 132)
    for case in (
        one for one in attend_module.cases(Memory(Device("null"))) if one.name.endswith("decode 1 x 1024")
    ):
        (chosen,) = case.op.plan(target, case.op.args(**case.args[0]))
        for _, commands in attend_module.variants(target, case):
            (other,) = commands(case.calls[0])
            assert other.spec.signature == chosen.spec.signature


CUDA = dataclasses.replace(H200, nvrtc=True)


def kernels_of(args, target=CUDA):
    """The names of the kernels of norm_rope_attend."""
    pack = NullPack(target)
    norm_rope_attend(pack, **as_tensors(args))
    return [command.spec.function for command in pack.calls[0].commands]


def rows_of(step, rows, **sizes):
    """A decode step of `rows` rows of few tokens."""
    return step([1] * rows, [3] * rows, **{"kv_heads": 8, "heads": 32, "dim": 128, **sizes})


@pytest.mark.parametrize("rows", [1, 24, 200])
@pytest.mark.parametrize("dim", [128, 256])
def test_a_decode_step_takes_the_kernel_of_cuda(step, rows, dim):
    """Both kernels are early: the second one reads cached keys while the first one runs."""
    pack = NullPack(CUDA)
    norm_rope_attend(pack, **as_tensors(rows_of(step, rows, dim=dim)))
    found = [(command.spec.function, command.early) for command in pack.calls[0].commands]
    assert found == [("qk_norm_rope_write", True), ("attend_codes", True)]


@pytest.mark.parametrize(
    "sizes",
    [{"window": 30}, {"dim": 64}, {"heads": 72}, {"page_size": 8}],
)
def test_other_steps_do_not_take_it(step, sizes):
    assert kernels_of(rows_of(step, 24, **sizes)) == ["attend_new"]


@pytest.mark.parametrize("change", [{"arch": 100}, {"nvrtc": False}, {"batch_invariant": True}])
def test_other_targets_do_not_take_it(step, change):
    assert "attend_codes" not in kernels_of(rows_of(step, 24), dataclasses.replace(CUDA, **change))


@pytest.mark.parametrize("dim", [128, pytest.param(256, marks=pytest.mark.slow)])
def test_the_kernel_of_cuda_compiles_without_spills(step, cubins, resources, dim):
    pack, store = NullPack(CUDA), Store(90, cubins, folders=[])
    norm_rope_attend(pack, **as_tensors(rows_of(step, 24, dim=dim)))
    (spec,) = [spec for spec in pack.specs() if spec.function == "attend_codes"]
    store.prepare([spec])
    used = resources(store.get(spec).cubin)
    assert used["STACK"] == used["LOCAL"] == 0
    assert spec.shared <= shared_bytes(90)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("lengths", ["short", "one long", "many"])
def test_attention_of_codes_on_a_gpu(gpu, reference, step, rng, dim, lengths):
    """Rows of all lengths, one that many programs share, dead rows, and the same bits again."""
    target, driver, _, stream = gpu
    if target.arch != 90:
        pytest.skip("the kernel is for sm_90")
    before = {
        "short": rng.integers(0, 20, 16).tolist(),  # fewer blocks than programs
        "one long": [5000, *rng.integers(0, 300, 15).tolist()],
        "many": rng.integers(0, 900, 200).tolist(),
    }[lengths]
    args = step([1] * len(before), before, heads=16, kv_heads=4, dim=dim, dead=(3, len(before) - 1))
    own = dataclasses.replace(target, nvrtc=True)
    found = [run_on_gpu(norm_rope_attend, args, own, driver, stream) for _ in range(2)]
    np.testing.assert_array_equal(found[0]["out"].view(np.uint16), found[1]["out"].view(np.uint16))
    check(lambda *_: (found[0], reference(norm_rope_attend, args)), args)
