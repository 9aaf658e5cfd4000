"""experts_add: the kernels in the interpreter, and on a GPU, against the reference."""

import ml_dtypes
import numpy as np
import pytest

from openinfer.kernels import ContractError, NullPack, Store, Target, experts_add
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.moe.plain import ExpertTile
from openinfer.kernels.op.reference import normed
from openinfer.kernels.op.target import shared_bytes
from openinfer.kernels.testing import of_the_day, run_interpreted
from openinfer.tensor import bfloat16, float32, int32

BF16 = 1e-2  # relative error: two products and three roundings to 8 bits
F8 = np.dtype(ml_dtypes.float8_e4m3fn)


def mixture(rng, normal, tokens, count, chosen, hidden, inter, *, scaled=False, skewed=False):
    """Arguments with random routing, some of it to no expert. `skewed`: most tokens choose the first experts."""
    preference = rng.random((tokens, count)) + (np.arange(count) < chosen) * 0.9 * skewed
    ids = np.argsort(-preference, axis=1)[:, :chosen].astype(np.int32)
    ids[rng.random(ids.shape) < 0.1] = -1
    weights = rng.random((tokens, chosen)).astype(bfloat16)
    args = {
        "x": normal(tokens, hidden),
        "norm_weight": 1 + normal(hidden, scale=0.3).astype(float32),
        "expert_ids": ids,
        "expert_weights": weights,
        "gate_up": normal(count, 2 * inter, hidden, scale=4 * hidden**-0.5),
        "down": normal(count, hidden, inter, scale=4 * inter**-0.5),
        "eps": 1e-6,
    }
    if scaled:
        up, across = 2 * -(-inter // 128), -(-hidden // 128)
        for name, blocks in (("gate_up", (up, across)), ("down", (across, -(-inter // 128)))):
            scales = rng.uniform(0.3, 3, (count, *blocks)).astype(float32)
            args[name] = Linear(args[name].astype(F8), scales)
    return args


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("tokens", "count", "chosen", "hidden", "inter"),
    [
        (1, 8, 2, 128, 64), (3, 5, 3, 160, 80), (6, 20, 3, 64, 32), (20, 4, 2, 64, 208), (150, 3, 2, 64, 48),
        pytest.param(9, 4, 3, 256, 640, marks=pytest.mark.slow), (40, 3, 2, 256, 384),
    ],
)  # fmt: skip
def test_any_sizes(check_op, rng, normal, tokens, count, chosen, hidden, inter, scaled):
    args = mixture(rng, normal, tokens, count, chosen, hidden, inter, scaled=scaled)
    before = args["x"].astype(float32)
    after = check_op(experts_add, {"x": BF16}, **args)["x"].astype(float32)
    assert np.linalg.norm(after - before) > 0.3 * np.linalg.norm(before)  # the bound means something


@pytest.mark.parametrize(
    "tile", [ExpertTile(16, 64, 32, True), ExpertTile(32, 32, 64, True), ExpertTile(64, 64, 32, False)]
)
def test_tiles_that_some_experts_overflow_and_others_leave_empty(check_op, rng, normal, tile, monkeypatch):
    monkeypatch.setattr("openinfer.kernels.ops.experts_add.expert_tile", lambda *_, **__: tile)
    monkeypatch.setattr("openinfer.kernels.moe.SORT_BLOCK", 32)
    args = mixture(rng, normal, 70, 9, 2, 64, 64, skewed=True)
    assert np.bincount(args["expert_ids"][args["expert_ids"] >= 0]).max() > 3 * 16
    check_op(experts_add, {"x": BF16}, **args)


@pytest.mark.parametrize("tokens", [1, 5, 9])
def test_few_pairs_have_a_tile_each(check_op, rng, normal, plan, tokens, monkeypatch):
    """Also where experts get more pairs than a tile holds."""
    monkeypatch.setattr(
        "openinfer.kernels.ops.experts_add.expert_tile", lambda *_, **__: ExpertTile(2, 16, 64, True)
    )
    args = mixture(rng, normal, tokens, 40, 2, 64, 64)
    args["expert_ids"][: tokens - 2, 0] = 7
    check_op(experts_add, {"x": BF16}, **args)


@pytest.mark.parametrize(
    ("tokens", "scaled"), of_the_day([(8, True), (1, False), (6, True), (8, False), (1, True)])
)
def test_few_pairs_are_not_sorted_and_have_the_same_bits(
    rng, normal, arena, plan, tokens, scaled, monkeypatch
):
    """An expert has more pairs than a tile; some tokens have no expert."""
    monkeypatch.setattr("openinfer.kernels.moe.plain.SUMMED_TOKENS", 0)
    called = plan(experts_add, **null_call(arena, tokens, 70, 4, 128, 256, F8 if scaled else bfloat16))
    assert not any(one.function == "sort_pairs" for one in called.specs())
    args = mixture(rng, normal, tokens, 70, 4, 128, 256, scaled=scaled)
    args["expert_ids"][:, 1] = 7
    args["expert_ids"][3:4] = -1
    found = [run_interpreted(experts_add, args)["x"]]
    monkeypatch.setattr("openinfer.kernels.moe.UNSORTED", 0)
    found.append(run_interpreted(experts_add, args)["x"])
    np.testing.assert_array_equal(*found)
    assert not np.array_equal(found[0], args["x"])


@pytest.mark.parametrize("tokens", [1, 2])
def test_very_few_pairs_of_float8_are_multiplied_row_by_row(arena, check_op, rng, normal, plan, tokens):
    """Columns that are no power of two, and an expert of two tokens."""
    functions = {
        one.function for one in plan(experts_add, **null_call(arena, tokens, 40, 2, 384, 192, F8)).specs()
    }
    assert functions == {"rms_norm", "experts_rows", "experts_sums" if tokens == 1 else "add_chosen"}
    args = mixture(rng, normal, tokens, 40, 2, 384, 192, scaled=True)
    args["expert_ids"][:, 0] = 7
    check_op(experts_add, {"x": BF16}, **args)


@pytest.mark.parametrize("tokens", [8, 700])
def test_many_pairs_of_float8_have_their_columns_arranged(arena, plan, tokens):
    functions = {
        one.function for one in plan(experts_add, **null_call(arena, tokens, 40, 8, 384, 256, F8)).specs()
    }
    assert ("arrange_rows" in functions) == (tokens == 700)
    assert "experts_product_float8" in functions


@pytest.mark.parametrize("scaled", [False, True])
def test_a_token_alone_has_the_bits_that_it_has_among_others(check_alone, rng, normal, scaled):
    """An expert has more pairs than a tile."""
    args = mixture(rng, normal, 83, 5, 2, 128, 128 if scaled else 48, scaled=scaled, skewed=True)
    check_alone(experts_add, args, "x")


@pytest.mark.parametrize("scaled", of_the_day([False, True]))
@pytest.mark.parametrize(
    ("tokens", "inter"),
    [
        (1, 48),
        pytest.param(1, 640, marks=pytest.mark.slow),
        (4, 64),
        pytest.param(4, 256, marks=pytest.mark.slow),
    ],
)
def test_the_second_product_of_few_tokens_adds_up(
    check_op, rng, normal, arena, plan, tokens, inter, scaled, monkeypatch
):
    """Columns that are no power of two; tokens of one expert, and a token of none."""
    made = plan(experts_add, **null_call(arena, tokens, 40, 3, 144, inter, F8 if scaled else bfloat16))
    assert [one.function for one in made.specs()][-1] == "experts_sums"
    args = mixture(rng, normal, tokens, 40, 3, 144, inter, scaled=scaled)
    args["expert_ids"][:, 0] = 7
    args["expert_ids"][2:3] = -1
    got = check_op(experts_add, {"x": BF16}, **args)["x"].astype(float32)
    monkeypatch.setattr("openinfer.kernels.moe.plain.SUMMED_TOKENS", 0)
    apart = check_op(experts_add, {"x": BF16}, **args)["x"].astype(float32)
    assert np.linalg.norm(got - apart) < 2e-3 * np.linalg.norm(apart)


def test_no_expert_at_all_leaves_the_tokens_alone(check_op, rng, normal):
    args = mixture(rng, normal, 4, 4, 2, 64, 48)
    args["expert_ids"][:] = -1
    got = check_op(experts_add, {"x": 0}, **args)
    np.testing.assert_array_equal(got["x"], args["x"])


def test_the_sum_alone_goes_elsewhere(check_op, rng, normal):
    args = mixture(rng, normal, 6, 3, 2, 64, 48)
    added = check_op(experts_add, {"x": BF16}, **args)["x"].astype(float32)
    got = check_op(experts_add, {"out": BF16}, **args, out=np.full_like(args["x"], np.nan))
    np.testing.assert_array_equal(got["x"], args["x"])
    np.testing.assert_allclose(
        args["x"].astype(float32) + got["out"].astype(float32), added, atol=0.02, rtol=0.01
    )


def test_the_sum_is_added_to_a_stream_whose_norm_is_known(check_op, rng, normal):
    args = mixture(rng, normal, 6, 3, 2, 64, 48)
    want = check_op(experts_add, {"x": BF16}, **args)["x"]
    gain, eps, stream = args.pop("norm_weight"), args.pop("eps"), args["x"]
    args["x"] = np.asarray(normed(stream, gain, eps), stream.dtype)
    got = check_op(experts_add, {"out": BF16}, **args, out=stream.copy(), adds=True)
    np.testing.assert_allclose(got["out"].astype(float32), want.astype(float32), atol=0.02, rtol=0.01)
    np.testing.assert_array_equal(got["x"], args["x"])


def test_a_wrong_expert_shows(check_op, rng, normal):
    """Negative control: one expert's down projection 5 % larger is out of bounds."""
    args = mixture(rng, normal, 6, 3, 2, 64, 48)
    got = check_op(experts_add, {"x": BF16}, **args)["x"]
    args["down"][1] *= bfloat16.type(1.05)
    want = check_op(experts_add, {"x": BF16}, **args)["x"]
    error = np.linalg.norm((got - want).astype(float32)) / np.linalg.norm(want.astype(float32))
    assert error > BF16


def null_call(arena, tokens, count, chosen, hidden, inter, dtype=bfloat16):
    scaled = dtype == F8
    up, across, deep = 2 * -(-inter // 128), -(-hidden // 128), -(-inter // 128)
    return {
        "x": arena.alloc((tokens, hidden), bfloat16),
        "norm_weight": arena.alloc((hidden,), float32),
        "expert_ids": arena.alloc((tokens, chosen), int32),
        "expert_weights": arena.alloc((tokens, chosen), bfloat16),
        "gate_up": Linear(
            arena.alloc((count, 2 * inter, hidden), dtype),
            arena.alloc((count, up, across), float32) if scaled else None,
        ),
        "down": Linear(
            arena.alloc((count, hidden, inter), dtype),
            arena.alloc((count, across, deep), float32) if scaled else None,
        ),
        "eps": 1e-6,
    }


def test_float32_is_for_the_cpu_pack(arena):
    args = null_call(arena, 3, 4, 2, 64, 48)
    args |= {k: arena.alloc(args[k].shape, float32) for k in ("x", "expert_weights", "gate_up", "down")}
    with pytest.raises(ContractError, match="float32: the cpu pack"):
        experts_add(NullPack(Target(90, 132)), **args)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "sms"), [(80, 108), (90, 132), (120, 188)])
@pytest.mark.parametrize("dtype", [bfloat16, F8])
def test_kernels_of_published_sizes_compile(arena, cubins, arch, sms, dtype):
    pack, store = NullPack(Target(arch, sms)), Store(arch, cubins, folders=[])
    for tokens in (1, 64, 8192):
        args = null_call(arena, tokens, 256, 8, 2048, 512, dtype)
        if arch == 80 and dtype == F8:
            with pytest.raises(ContractError, match="float8 is for sm_89 and up"):
                experts_add(pack, **args)
            return
        experts_add(pack, **args)
    store.prepare(pack.specs())
    assert max(store.get(s).shared for s in pack.specs()) <= shared_bytes(arch)


@pytest.mark.gpu
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("tokens", [1, 40, 700])
def test_on_gpu(check_op_gpu, rng, normal, tokens, scaled):
    args = mixture(rng, normal, tokens, 32, 4, 512, 256, scaled=scaled, skewed=True)
    check_op_gpu(experts_add, {"x": BF16}, **args)
