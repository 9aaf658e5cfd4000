"""norm_rope_attend: the kernels in the interpreter, and on a GPU, against the reference."""

import numpy as np
import pytest

from openinfer.kernels import ContractError, CpuPack, NullPack, Target, attention, norm_rope_attend
from openinfer.kernels.testing import paged_places
from openinfer.tensor import Tensor, bfloat16, float32, int32

BF16 = 6e-3  # relative error: weights and result rounded to 8 bits
WRITTEN = 4e-3
FAR = 2.0**100


@pytest.fixture
def step(norm_rope_args, normal):
    """step(lengths, before, **more): arguments for rows of `lengths` new tokens after `before` cached ones; what was
    never written is FAR (nearly as bad as NaN, but it can be compared)."""

    def make(lengths, before, *, heads=4, kv_heads=2, dim=64, page_size=16, **more):
        sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "page_size": page_size}
        args = norm_rope_args(lengths, before, **sizes, **more)
        pages = args["block_tables"].max() + 1
        kv = np.full((pages, 3, 2, kv_heads, page_size, dim), FAR, bfloat16)[:, 1]
        for page, place in paged_places(args, before, page_size):
            kv[page, :, :, place] = normal(2, kv_heads, dim)
        return args | {"kv": kv}

    return make


def check(check_op, args, **options):
    """Every token within the bound by itself; every place of the cache as the reference leaves it, the untouched ones
    untouched."""
    wanted = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in args.items()}
    tensors = {k: Tensor.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in wanted.items()}
    norm_rope_attend(CpuPack(), **tensors)
    untouched = wanted["kv"].astype(float32) == FAR
    assert untouched.any()
    result = check_op(norm_rope_attend, {"out": BF16, "kv": 1.0}, **args, **options)
    got, want = result["out"].astype(float32), wanted["out"].astype(float32)
    live = np.linalg.norm(want, axis=1) > 0
    error = np.linalg.norm(got - want, axis=1)[live] / np.linalg.norm(want, axis=1)[live]
    if error.size:
        assert error.max() < 3 * BF16
    assert (got[~live] == 0).all()
    kv, kv_wanted = result["kv"].astype(float32), wanted["kv"].astype(float32)
    assert (kv[untouched] == FAR).all()
    kv, kv_wanted = kv[~untouched], kv_wanted[~untouched]
    assert np.linalg.norm(kv - kv_wanted) <= WRITTEN * np.linalg.norm(kv_wanted)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 128), (5, 1, 64), (2, 2, 64), (8, 1, 256)])
def test_decode_with_any_group(check_op, step, page_size, heads, kv_heads, dim):
    before = [0, 1, 63, 64, 65, 200]
    sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim}
    check(check_op, step([1] * 6, before, page_size=page_size, **sizes))


@pytest.mark.parametrize("context", [0, 62, 63, 64, 127, 128, 300, 1000])
@pytest.mark.parametrize("sms", [1, 4, 16])
def test_decode_of_one_row_is_split(check_op, step, context, sms):
    check(check_op, step([1], [context], page_size=32), target=Target(90, sms, interpreted=True))


@pytest.mark.parametrize("window", [0, 130])
@pytest.mark.parametrize("spare", [1, 4, 32])
def test_long_rows_among_others_share_the_spare_parts(check_op, step, monkeypatch, spare, window):
    monkeypatch.setattr(attention, "LARGE_PART", 64)
    monkeypatch.setattr(attention, "SPARE_PARTS", spare)
    lengths, before = [1, 1, 1, 0, 1, 1, 1], [0, 700, 63, 9, 64, 300, 130]
    args = step(lengths, before, dead=(5,), tokens=7, max_q_len=1, window=window)
    check(check_op, args, target=Target(90, 1, interpreted=True))


@pytest.mark.parametrize(("rows", "items"), [(20, 49), (32, 49), (40, 49), (48, 80), (64, 96), (256, 288)])
def test_spare_parts_fit_a_wave_where_that_leaves_enough(arena, plan, rows, items):
    def of(*shape, dtype=bfloat16):
        return arena.alloc(shape, dtype)

    by_row = {name: of(rows, dtype=int32) for name in ("positions", "token_slots", "slots")}
    by_slot = {name: of(300, dtype=int32) for name in ("seq_lens", "alive")}
    made = plan(
        norm_rope_attend, out=of(rows, 4096), kv=of(9, 36, 2, 8, 16, 128)[:, 7], qkv=of(rows, 6144), q_norm=of(128),
        k_norm=of(128), cos_sin=of(64, 2, 64, dtype=float32), q_starts=of(rows + 1, dtype=int32),
        block_tables=of(300, 2560, dtype=int32), eps=1e-6, scale=0.1, window=0, max_q_len=1, **by_row, **by_slot,
    )  # fmt: skip
    (command,) = made.calls[0].commands
    assert command.grid == (8, items, 1)


def test_decode_with_empty_and_dead_rows(check_op, step):
    lengths, before = [1, 0, 1, 1, 0, 1, 0], [70, 5, 3, 90, 40, 17, 0]
    check(check_op, step(lengths, before, dead=(2, 4), tokens=7, max_q_len=1))


def test_a_step_without_tokens_gives_zeros(check_op, step):
    args = step([0, 0], [3, 3], tokens=2, max_q_len=1)
    assert (check_op(norm_rope_attend, {"out": 0, "kv": 0}, **args)["out"] == 0).all()


@pytest.mark.parametrize("window", [1, 17, 64, 65, 1000])
@pytest.mark.parametrize("sms", [1, 16])
def test_decode_with_a_window(check_op, step, window, sms):
    args = step([1, 1, 1], [0, 65, 300], window=window)
    check(check_op, args, target=Target(90, sms, interpreted=True))


def test_few_rows_merge_in_one_turn_and_let_the_next_product_start(step):
    """Eight query heads a key head: sixteen parts at once where rows leave SMs idle, eight where they do not."""
    for rows, nvrtc, merged, release in (
        (1, True, 16, True),
        (1, False, 16, False),
        (2, True, 16, True),
        (5, True, 16, True),
        (5, False, 16, False),
        (65, True, 16, False),
        (300, True, 8, False),
    ):
        args = step([1] * rows, [20] * rows, heads=8, kv_heads=1, dim=128)
        tensors = {k: Tensor.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in args.items()}
        pack = NullPack(Target(90, 132, nvrtc=nvrtc))
        norm_rope_attend(pack, **tensors)
        constants = dict(pack.specs()[-1].constants)
        assert (constants["MERGE"], constants["RELEASE"]) == (merged, release), rows


def test_other_steps_take_the_two_ops_kernels(check_op, step):
    args = step([3, 1, 20], [70, 130, 0], tokens=30)
    check(check_op, args)


@pytest.mark.parametrize("lengths", [[1, 1, 1], [3, 1, 20]])
def test_heads_without_norms(check_op, step, lengths):
    args = step(lengths, [70, 0, 130])
    del args["q_norm"], args["k_norm"]
    check(check_op, args)


def test_one_norm_alone_is_refused(step):
    args = step([1], [5])
    del args["k_norm"]
    tensors = {k: Tensor.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in args.items()}
    with pytest.raises(ContractError, match="q_norm and k_norm must both be given, or neither"):
        norm_rope_attend(CpuPack(), **tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 40, 64, 128, 256])
def test_decode_on_a_gpu(check_op_gpu, step, rng, rows):
    before = rng.integers(0, 1500, rows).tolist()
    args = step([1] * rows, before, heads=32, kv_heads=8, dim=128, dead=(rows // 2,) if rows > 1 else ())
    check(check_op_gpu, args)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [8, 16, 64, 128])
@pytest.mark.parametrize("window", [0, 100])
def test_many_rows_of_any_kind_on_a_gpu(check_op_gpu, step, rng, page_size, window):
    before = [0, 1, 63, 64, 65, 2100, 1023, 1024, *rng.integers(0, 400, 62).tolist()]
    lengths = [0 if row % 9 == 4 else 1 for row in range(70)]
    sizes = {"heads": 10, "kv_heads": 2, "dim": 128, "page_size": page_size, "window": window}
    args = step(lengths, before, dead=(2, 50, 69), tokens=70, max_q_len=1, **sizes)
    check(check_op_gpu, args)
