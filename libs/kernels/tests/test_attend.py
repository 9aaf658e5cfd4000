"""attend: the kernels in the interpreter, and on a GPU, against the reference."""

import dataclasses

import numpy as np
import pytest

from openinfer.kernels import (
    H200,
    ContractError,
    CpuPack,
    InterpDriver,
    LaunchPack,
    NullPack,
    Store,
    Target,
    attend,
    attention,
)
from openinfer.kernels.attention import long as long_attention
from openinfer.kernels.attention.tiles import Tile
from openinfer.kernels.op.target import shared_bytes
from openinfer.kernels.packs.null import scratches
from openinfer.kernels.testing import copied, paged_places, paged_rows
from openinfer.tensor import Arena, Device, Tensor, bfloat16, float32, int32

BF16 = 6e-3  # relative error: weights and result rounded to 8 bits


def step(
    rng,
    normal,
    lengths,
    before,
    *,
    heads=4,
    kv_heads=2,
    dim=64,
    page_size=16,
    window=0,
    layers=1,
    dead=(),
    **more,
):
    """Arguments for rows of `lengths` new tokens after `before` cached ones; what was never written is infinite (as bad
    as NaN, but equal to itself).

    more: `tokens` (the bucket), `max_q_len`.
    """
    rows = paged_rows(rng, lengths, before, page_size=page_size, tokens=more.get("tokens"), dead=dead)
    tokens, _ = len(rows.pop("positions")), rows.pop("token_slots")
    pages = rows["block_tables"].max() + 1
    kv = np.full((pages, layers, 2, kv_heads, page_size, dim), np.inf, bfloat16)[:, layers // 2]
    for page, place in paged_places(rows, np.add(lengths, before), page_size):
        kv[page, :, :, place] = normal(2, kv_heads, dim)
    return {
        "out": np.full((tokens, heads * dim), np.nan, bfloat16),
        "q": normal(tokens, heads, dim, scale=2.0),
        "kv": kv,
        **rows,
        "scale": dim**-0.5,
        "window": window,
        "max_q_len": more.get("max_q_len", max(lengths)),
    }


def check(check_op, args, **options):
    """Every token within the bound by itself, not only all together; the cache and the rest untouched."""
    wanted = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in args.items()}
    attend(
        CpuPack(), **{k: Tensor.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in wanted.items()}
    )
    got = check_op(attend, {"out": BF16}, **args, **options)["out"].astype(float32)
    want = wanted["out"].astype(float32)
    live = np.linalg.norm(want, axis=1) > 0
    error = np.linalg.norm(got - want, axis=1)[live] / np.linalg.norm(want, axis=1)[live]
    assert error.size
    assert error.max() < 3 * BF16
    assert (got[~live] == 0).all()


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (5, 1), (2, 2), (16, 2)])
def test_decode_with_any_group(check_op, rng, normal, page_size, heads, kv_heads):
    before = [0, 1, 63, 64, 200]
    check(check_op, step(rng, normal, [1] * 5, before, heads=heads, kv_heads=kv_heads, page_size=page_size))


@pytest.mark.parametrize("context", [0, 62, 63, 64, 300, 1000])
@pytest.mark.parametrize("sms", [4, 16])
def test_decode_of_one_row_is_split(check_op, rng, normal, context, sms):
    args = step(rng, normal, [1], [context], page_size=32)
    check(check_op, args, target=Target(90, sms, interpreted=True))


def test_parts_are_merged_a_few_at_a_time(check_op, rng, normal, monkeypatch):
    monkeypatch.setattr(attention, "MERGED_AT_ONCE", 4 * 64 * 2)
    args = step(rng, normal, [1], [600], page_size=64)
    check(check_op, args, target=Target(90, 16, interpreted=True))


def test_rows_that_fill_the_gpu_are_split_when_they_can_be_long(check_op, rng, normal):
    args = step(rng, normal, [1] * 3, [1200, 511, 512], kv_heads=2, dim=16)
    args["block_tables"] = np.pad(args["block_tables"], ((0, 0), (0, 3000)))
    check(check_op, args, target=Target(90, 1, interpreted=True))


def test_decode_with_empty_and_dead_rows(check_op, rng, normal):
    lengths, before = [1, 0, 1, 1, 0, 1, 0], [70, 5, 3, 90, 40, 17, 0]
    check(check_op, step(rng, normal, lengths, before, dead=(2, 4), tokens=7, max_q_len=1))


def test_a_step_without_tokens_gives_zeros(check_op, rng, normal):
    args = step(rng, normal, [0, 0], [3, 3], tokens=2, max_q_len=1)
    assert (check_op(attend, {"out": 0}, **args)["out"] == 0).all()


@pytest.mark.parametrize("window", [1, 17, 64, 1000])
def test_decode_with_a_window(check_op, rng, normal, window):
    check(check_op, step(rng, normal, [1, 1, 1], [0, 65, 300], window=window))


def test_few_tokens_a_row_take_the_decode_kernel(check_op, rng, normal, plan):
    lengths, before = [3, 1, 0, 4, 2], [70, 130, 9, 0, 62]
    args = step(
        rng, normal, lengths, before, heads=4, kv_heads=1, dead=(4,), tokens=20, window=50, max_q_len=4
    )
    tensors = {k: Tensor.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in args.items()}
    assert [s.function for s in plan(attend, **tensors).specs()] == ["attend_short"]
    check(check_op, args)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_first_tokens_see_nothing_of_the_last_part(check_op, rng, normal, dim):
    """Four tokens of which three, two or one are before the part that the last begins."""
    for before in (61, 62, 63):
        args = step(rng, normal, [4], [before], heads=4, kv_heads=1, dim=dim, max_q_len=4)
        check(check_op, args, target=Target(90, 16, interpreted=True))


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 128), (5, 1, 64), (2, 2, 64), (8, 1, 256)])
def test_prompts_after_prefixes(check_op, rng, normal, page_size, heads, kv_heads, dim):
    lengths, before = [37, 18], [0, 75]
    args = step(rng, normal, lengths, before, heads=heads, kv_heads=kv_heads, dim=dim, page_size=page_size)
    check(check_op, args)


@pytest.mark.parametrize("lengths", [[1], [2], [31], [63], [64], [65], [130]])
def test_a_lone_row_of_any_length(check_op, rng, normal, lengths):
    check(
        check_op,
        step(rng, normal, lengths, [63], tokens=lengths[0] + 40, max_q_len=lengths[0] + 40, kv_heads=1),
    )


def test_a_mixed_step(check_op, rng, normal):
    """Chunks, decode rows, empty rows, dead ones of each kind, and padding tokens."""
    lengths = [1, 40, 0, 1, 33, 1, 9, 0, 2]
    before = [100, 30, 7, 64, 0, 3, 130, 1, 200]
    args = step(rng, normal, lengths, before, dead=(3, 6, 7), tokens=sum(lengths) + 20, layers=3)
    check(check_op, args)


def test_decode_rows_and_prompts_are_branches_that_need_nothing_of_each_other(rng, normal):
    """In either order the same bits; and no scratch memory is of both."""
    args = step(rng, normal, [1, 40, 0, 1, 9], [100, 30, 7, 64, 0], tokens=60, dead=(3,))
    target, left = Target(arch=90, num_sms=4, interpreted=True), []
    for turned in (False, True):
        arrays, tensors = copied(args)
        pack = NullPack(target)
        attend(pack, **tensors)
        prompts, decoding = pack.calls[0].commands
        assert [(c.spec.function, c.branch) for c in (prompts, decoding)] == [
            ("attend_split", 1),
            ("attend_split", 2),
        ]
        assert not {*scratches(decoding)} & {*scratches(prompts)}
        workspace = [np.zeros(pack.workspace_bytes(zeroed=z) + 1, np.uint8) for z in (False, True)]
        launches = LaunchPack(target, InterpDriver(), *map(Tensor.from_numpy, workspace))
        launches.submit("attend", [decoding, prompts] if turned else [prompts, decoding])
        left.append(arrays["out"].tobytes())
    assert left[0] == left[1] != args["out"].tobytes()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"),
    [(4, 2, 128, 0), pytest.param(4, 1, 64, 150, marks=pytest.mark.slow), (5, 1, 16, 400)],
)
def test_long_rows_of_few_tokens_are_read_in_parts(
    check_op, rng, normal, monkeypatch, heads, kv_heads, dim, window
):
    """Rows of one part and of several, of one tile and of several, beside decode rows, empty and dead rows."""
    monkeypatch.setattr(long_attention, "LEAST_KEYS", 64)
    lengths, before = [1, 50, 0, 3, 1, 40, 12, 9, 0], [100, 200, 7, 500, 0, 20, 311, 400, 3]
    sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "window": window}
    args = step(rng, normal, lengths, before, dead=(4, 7), tokens=sum(lengths) + 30, **sizes)
    check(check_op, args, target=Target(90, 40, interpreted=True))


@pytest.mark.parametrize("lengths", [[1, 1, 1], [40], [3, 4]])
def test_a_step_of_one_kernel_has_no_branches(rng, normal, plan, lengths):
    args = step(rng, normal, lengths, [70] * len(lengths), heads=4, kv_heads=1)
    tensors = {k: Tensor.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in args.items()}
    assert [c.branch for c in plan(attend, **tensors).calls[0].commands] == [0]


@pytest.mark.parametrize("window", [1, 20, 64, 149, 150, 500])
def test_prompts_with_a_window(check_op, rng, normal, window):
    args = step(rng, normal, [70, 1, 20], [0, 90, 130], window=window, page_size=32)
    first = args["block_tables"][args["slots"], 0]
    args["kv"][first, 1, :, 0] *= bfloat16.type(50)  # who sees the first key and should not is far off
    check(check_op, args)


def test_many_rows_find_their_tiles(check_op, rng, normal):
    lengths = [int(n) for n in rng.integers(0, 4, 140) * (rng.random(140) < 0.2)]
    check(check_op, step(rng, normal, lengths, [0] * 140, heads=1, kv_heads=1, dim=16, max_q_len=20))


@pytest.mark.parametrize("tile", [Tile(128, 64, 8, 3), Tile(64, 128, 4, 2), Tile(128, 32, 8, 3)])
def test_other_tiles(check_op, rng, normal, tile, monkeypatch):
    monkeypatch.setattr(attention, "long_tile", lambda *_: tile)
    check(check_op, step(rng, normal, [90, 1, 35], [20, 40, 0], heads=10, kv_heads=2, page_size=64))


@pytest.mark.parametrize("page_size", [32, 64])
def test_pages_beyond_the_reach_of_32_bits(check_op, rng, normal, page_size):
    """The last page's offset in elements does not fit an int32. The memory between pages is never touched."""
    args = step(rng, normal, [1, 20], [40, 70], page_size=page_size)
    kv = args["kv"]
    stride = 16 + 2**31 // (len(kv) - 1) // 16 * 16
    memory = np.zeros((len(kv) - 1) * stride + kv[0].size, bfloat16)
    far = np.lib.stride_tricks.as_strided(memory, kv.shape, (2 * stride, *kv.strides[1:]))
    far[...] = kv
    check(check_op, {**args, "kv": far})


def call(
    arena, tokens, rows, heads, max_q_len, *, dim=128, page_size=16, dtype=bfloat16, width=2560, **change
):
    shapes = {
        "out": ((tokens, heads * dim), dtype),
        "q": ((tokens, heads, dim), dtype),
        "slots": ((rows,), int32),
        "q_starts": ((rows + 1,), int32),
        "seq_lens": ((513,), int32),
        "alive": ((513,), int32),
        "block_tables": ((513, width), int32),
    }
    cache = arena.alloc((50, 36, 2, 8, page_size, dim), dtype)
    args = {k: arena.alloc(*v) for k, v in shapes.items()}
    return {**args, "kv": cache[:, 7], "scale": dim**-0.5, "window": 0, "max_q_len": max_q_len, **change}


def test_few_kernels_serve_all_steps_of_a_model(arena):
    pack = NullPack(H200)
    for tokens, rows, longest in [
        (1, 1, 1),
        (8, 8, 1),
        (512, 512, 1),
        (64, 1, 64),
        (8192, 64, 8192),
        (512, 512, 64),
    ]:
        attend(pack, **call(arena, tokens, rows, 32, longest))
    tiles = [(s.function, c["BM"], c["BN"]) for s in pack.specs() for c in [dict(s.constants)]]
    assert [tile for tile in tiles if tile[1] == 16] == [
        ("attend_short", 16, 64),
        ("attend_short", 16, 128),
        ("attend_split", 16, 128),
        ("attend_split", 16, 128),
    ]  # few, more, beside rows of more tokens
    assert {s.function for s in pack.specs()} == {"attend_short", "attend_split", "attend_prompt"}


@pytest.mark.parametrize(
    ("target", "change", "function"),
    [
        (H200, {}, "attend_prompt"),
        (H200, {"dim": 64, "page_size": 8}, "attend_prompt"),
        (H200, {"dim": 256}, "attend_prompt"),
        (H200, {"page_size": 4}, "attend_long"),
        (H200, {"dim": 32}, "attend_long"),
        (Target(100, 148), {}, "attend_long"),
        (Target(90, 132, interpreted=True), {}, "attend_long"),
    ],
)
def test_prompts_have_a_kernel_for_hopper(arena, plan, target, change, function):
    assert (
        plan(attend, target=target, **call(arena, 512, 1, 32, 512, **change)).specs()[0].function == function
    )


def test_parts_of_long_rows_start_before_decode_rows(arena, plan):
    """They take longest. Steps of few tokens have smaller tiles, which leave room for decode rows."""

    def tiles(tokens, **change):
        commands = plan(attend, **call(arena, tokens, 8, 32, tokens, **change)).calls[0].commands
        return [(c.spec.function, dict(c.spec.constants)["BM"]) for c in commands]

    decode = ("attend_split", 16)
    assert tiles(64) == [("attend_split", 64), decode]
    assert tiles(96) == [("attend_split", 128), decode]
    assert tiles(512) == [decode, ("attend_prompt", 128)]


def test_short_prompts_take_the_other_kernel(arena, plan):
    assert plan(attend, **call(arena, 128, 1, 32, 128)).specs()[0].function == "attend_split"


def test_pages_that_are_no_rows_of_a_matrix_take_the_other_kernel(arena, plan):
    args = call(arena, 512, 1, 32, 512)
    kv = args["kv"]
    kv = Tensor(kv.ptr, kv.shape, kv.dtype, kv.device, (kv.strides[0] + 16, *kv.strides[1:]), kv)
    assert plan(attend, **{**args, "kv": kv}).specs()[0].function == "attend_long"


def test_one_row_fills_the_gpu_once(arena, plan):
    (decode,) = plan(attend, **call(arena, 1, 1, 32, 1)).calls[0].commands
    assert decode.grid == (1, 8, 16)
    (decode,) = plan(attend, **call(arena, 256, 256, 32, 1)).calls[0].commands
    assert decode.grid == (256, 8, 10)
    (decode,) = plan(attend, **call(arena, 256, 256, 32, 1, width=512)).calls[0].commands
    assert decode.grid == (256, 8, 2)


def test_workspace_of_the_largest_decode_step(arena, plan):
    pack = plan(attend, **call(arena, 512, 512, 32, 1))
    assert pack.workspace_bytes(zeroed=False) < 96 << 20
    assert pack.workspace_bytes(zeroed=True) == 512 * 8 * 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": float32}, "float32: the cpu pack"),
        ({"dim": 96}, "head size is 96; attention on a GPU takes powers of two"),
        ({"page_size": 24}, "page size is 24; it must be a power of two"),
        ({"scale": 0.0}, "scale is 0.0; it must be positive"),
        ({"window": -1}, "window is -1"),
        ({"max_q_len": 9}, r"max_q_len is 9; it must be in \[1, 4\]"),
        ({"rows": 3}, "a step of one token a row has 4 tokens and 3 rows"),
        ({"heads": 12}, "12 query heads cannot share 8 key heads"),
    ],
)
def test_what_it_refuses(arena, change, words):
    given = {"tokens": 4, "rows": 4, "heads": 16, "max_q_len": 1, **change}
    with pytest.raises(ContractError, match=words):
        attend(NullPack(H200), **call(arena, **given))


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "sms"), [(80, 108), (90, 132), (100, 148), (120, 188)])
def test_other_head_sizes_compile_and_fit(arena, cubins, arch, sms):
    pack, store = NullPack(Target(arch, sms)), Store(arch, cubins, folders=[])
    for heads, dim in [(8, 16), (16, 64), (16, 256), (64, 256)]:
        attend(pack, **call(arena, 4, 2, heads, 4, dim=dim))
        attend(pack, **call(arena, 64, 2, heads, 64, dim=dim))
    store.prepare(pack.specs())
    assert max(store.get(s).shared for s in pack.specs()) <= shared_bytes(arch)


@pytest.fixture(scope="module")
def gpu_kernels(gpu):
    """All kernels of the tests below, compiled side by side."""
    target, driver, _, _ = gpu
    pack, arena = NullPack(target), Arena(Device("null"), None)
    for page_size in (16, 64):
        for heads, dim in [(16, 128), (32, 128), (40, 128), (64, 128), (16, 64), (16, 256)]:
            for rows, longest in [(4, 1), (2, 4)]:
                attend(pack, **call(arena, 4, rows, heads, longest, dim=dim, page_size=page_size))
    driver.store.prepare(pack.specs())


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu_kernels")
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("heads", [16, 32, 40, 64])
def test_decode_on_gpu(check_op_gpu, rng, normal, heads, page_size):
    for rows, longest in [(1, 5000), (9, 700), (130, 90)]:
        before = [int(n) for n in rng.integers(0, longest, rows)]
        dead = tuple(range(0, rows, 7))[1:]
        args = step(
            rng, normal, [1] * rows, before, heads=heads, kv_heads=8, dim=128, page_size=page_size, dead=dead
        )
        check(check_op_gpu, args)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu_kernels")
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("heads", [16, 40])
@pytest.mark.parametrize("window", [0, 100])
def test_mixed_steps_on_gpu(check_op_gpu, rng, normal, heads, page_size, window):
    lengths, before = [1, 300, 0, 1, 65, 1, 9], [800, 100, 7, 64, 0, 3, 130]
    options = {
        "heads": heads,
        "kv_heads": 8,
        "dim": 128,
        "page_size": page_size,
        "window": window,
        "layers": 2,
    }
    check(check_op_gpu, step(rng, normal, lengths, before, dead=(3, 6), tokens=500, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize("page_size", [8, 16, 64, 256])
@pytest.mark.parametrize("window", [0, 1, 100, 300])
def test_prompts_of_any_shape_on_gpu(check_op_gpu, gpu, rng, normal, page_size, window, interpreted):
    """The kernel for this GPU, and the one that the interpreter can run too."""
    lengths, before = [127, 1, 300, 0, 33, 1040, 64], [0, 300, 129, 40, 1500, 0, 64]
    args = step(
        rng, normal, lengths, before, heads=16, kv_heads=4, dim=128, page_size=page_size, window=window,
        dead=(4,), tokens=sum(lengths) + 200, layers=2,
    )  # fmt: skip
    check(check_op_gpu, args, target=dataclasses.replace(gpu[0], interpreted=interpreted))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 40])
def test_a_small_prompt_on_gpu(check_op_gpu, gpu, rng, normal, monkeypatch, window):
    """The Gluon kernel on a prompt of two blocks of keys: a key that is seen too many or too few shows."""
    monkeypatch.setattr(long_attention, "SPLIT_TOKENS", 1)
    args = step(rng, normal, [70, 140], [0, 20], heads=4, kv_heads=1, dim=128, window=window)
    pack = NullPack(gpu[0])
    attend(pack, **{k: Tensor.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in args.items()})
    if "attend_prompt" not in {spec.function for spec in pack.specs()}:
        pytest.skip("the kernel is for sm_90")
    check(check_op_gpu, args)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_chunks_that_begin_anywhere_on_gpu(check_op_gpu, rng, normal, dim, window):
    """Tiles whose first tokens see nothing of their last block. Scales on both sides of where a fused product of a
    large score would round: with a finite score for what is hidden these were infinite for 64 and 256."""
    lengths, before = [200, 333, 3, 90, 4], [333, 16, 62, 1001, 61]
    args = step(
        rng, normal, lengths, before, heads=16, kv_heads=4, dim=dim, window=window,
        tokens=sum(lengths) + 40, layers=2,
    )  # fmt: skip
    for factor in (1.0, 1.01, 0.99, 1.1):
        check(check_op_gpu, {**args, "scale": dim**-0.5 * factor})
    few = step(rng, normal, [4], [62], heads=16, kv_heads=4, dim=dim, window=window, max_q_len=4)
    check(check_op_gpu, few)


@pytest.mark.gpu
def test_long_rows_in_parts_on_gpu(check_op_gpu, rng, normal):
    """With one long row and with several, which have fewer parts each; the same bits again."""
    for lengths, before in (([1, 16, 1, 1], [300, 9000, 0, 64]), ([64, 1, 40, 20], [5000, 9, 3000, 0])):
        args = step(rng, normal, lengths, before, heads=16, kv_heads=4, dim=128, tokens=sum(lengths) + 30)
        check(check_op_gpu, args)
        outs = [check_op_gpu(attend, {"out": BF16}, **args)["out"].tobytes() for _ in range(2)]
        assert outs[0] == outs[1]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 300])
def test_more_tiles_than_programs_on_gpu(check_op_gpu, rng, normal, rows):
    lengths = [6000] if rows == 1 else [int(n) for n in rng.integers(0, 40, rows)]
    before = [0] if rows == 1 else [int(n) for n in rng.integers(0, 200, rows)]
    check(check_op_gpu, step(rng, normal, lengths, before, heads=8, kv_heads=8, dim=128))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu_kernels")
@pytest.mark.parametrize("dim", [64, 256])
def test_other_head_sizes_on_gpu(check_op_gpu, rng, normal, dim):
    check(check_op_gpu, step(rng, normal, [1, 70, 1], [300, 40, 9], heads=16, kv_heads=8, dim=dim, tokens=80))
    check(check_op_gpu, step(rng, normal, [1, 1], [300, 1000], heads=16, kv_heads=8, dim=dim))
