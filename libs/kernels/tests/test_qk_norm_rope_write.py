"""qk_norm_rope_write: the kernel in the interpreter, and on a GPU, against the reference."""

import numpy as np
import pytest

from openinfer.kernels import H200, ContractError, CpuPack, NullPack, qk_norm_rope_write
from openinfer.tensor import Tensor, bfloat16, float32, int32

BF16 = 4e-3  # relative error of a few roundings to 8 bits
OUTPUTS = {"q": BF16, "kv": BF16}


def step(
    rng,
    normal,
    tokens,
    heads,
    kv_heads,
    dim,
    page_size,
    *,
    layers=1,
    context=200,
    slots=6,
    rotary=None,
    gated=0,
):
    """Arguments: random tokens of random slots (0 among them: padding), each at a place of its own. `rotary`: elements
    that are rotated (all); `gated`: 1 if each query head is followed by its output gate."""
    width = -(-context // page_size)
    pages = 1 + width * (slots - 1)
    tables = np.zeros((slots, width), np.int32)
    tables[1:] = 1 + rng.permutation(pages - 1).reshape(slots - 1, width)
    places = rng.permutation((slots - 1) * context)[:tokens]
    slot = (1 + places // context).astype(np.int32) * (rng.random(tokens) < 0.8)
    slot[0] = 1 + places[0] // context  # one is live
    angle = np.arange(context)[:, None] * 10000.0 ** -np.linspace(0, 1, (rotary or dim) // 2)
    cache = np.full((pages, layers, 2, kv_heads, page_size, dim), np.nan, bfloat16)
    return {
        "q": np.full((tokens, heads, dim), np.nan, bfloat16),
        "kv": cache[:, layers // 2],
        "qkv": normal(tokens, ((1 + gated) * heads + 2 * kv_heads) * dim, scale=3.0),
        "q_norm": normal(dim),
        "k_norm": normal(dim),
        "cos_sin": np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(float32),
        "positions": np.where(slot, places % context, 0).astype(np.int32),
        "token_slots": slot.astype(np.int32),
        "block_tables": tables,
        "eps": 1e-6,
    }


def check_written(check_op, args):
    """Compare with the reference, on a cache whose untouched places are NaN in both."""
    wanted = args["kv"].copy()
    arrays = {k: Tensor.from_numpy(v.copy()) if isinstance(v, np.ndarray) else v for k, v in args.items()}
    qk_norm_rope_write(CpuPack(), **{**arrays, "kv": Tensor.from_numpy(wanted)})
    untouched = np.isnan(wanted)
    assert untouched.any()
    assert not untouched.all()
    # Where nothing is written stands a number that rounding cannot make, so that the error bound sees any write.
    args["kv"][...] = 1e4
    got = check_op(qk_norm_rope_write, OUTPUTS, **args)
    assert (got["kv"][untouched] == bfloat16.type(1e4)).all()
    written = got["kv"][~untouched].astype(float32)
    error = np.linalg.norm(written - wanted[~untouched].astype(float32)) / np.linalg.norm(written)
    assert error < BF16


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size"),
    [(4, 2, 128, 16), (16, 8, 64, 64), (40, 8, 128, 16), (3, 3, 96, 32), (8, 1, 256, 1)],
)
@pytest.mark.parametrize("tokens", [1, 7])
def test_heads_of_any_number_and_size(check_op, rng, normal, tokens, heads, kv_heads, dim, page_size):
    args = step(rng, normal, tokens, heads, kv_heads, dim, page_size)
    args["token_slots"][0], args["positions"][0] = 3, 17
    check_written(check_op, args)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary"), [(4, 2, 256, 64), (3, 1, 96, 32), (2, 2, 64, 64)]
)
@pytest.mark.parametrize("gated", [0, 1])
def test_heads_that_are_rotated_in_part_beside_their_gates(
    check_op, rng, normal, heads, kv_heads, dim, rotary, gated
):
    args = step(rng, normal, 6, heads, kv_heads, dim, 16, rotary=rotary, gated=gated)
    args["token_slots"][0], args["positions"][0] = 3, 17
    check_written(check_op, args)


def test_norm_weights_of_float32_are_rounded_once(check_op, rng, normal):
    args = step(rng, normal, 40, 4, 2, 64, 16)
    check_written(
        check_op, {**args, "q_norm": 1 + normal(64).astype(float32), "k_norm": normal(64).astype(float32)}
    )


@pytest.mark.parametrize("rotary", [64, 32])
def test_heads_without_norms_are_rotated_as_they_are(check_op, rng, normal, rotary):
    args = step(rng, normal, 40, 4, 2, 64, 16, rotary=rotary)
    del args["q_norm"], args["k_norm"]
    check_written(check_op, args)


@pytest.mark.parametrize("norms", [True, False])
def test_keys_and_values_without_queries(check_op, rng, normal, norms):
    """They are those that a step with queries writes."""
    args = step(rng, normal, 40, 4, 2, 64, 16, rotary=32)
    if not norms:
        del args["q_norm"], args["k_norm"]
    args["kv"][...] = 1e4
    wanted = args["kv"].copy()
    arrays = {k: Tensor.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in args.items()}
    qk_norm_rope_write(CpuPack(), **{**arrays, "kv": Tensor.from_numpy(wanted)})
    alone = {**args, "q": None, "qkv": np.ascontiguousarray(args["qkv"][:, 4 * 64 :])}
    got = check_op(qk_norm_rope_write, {"kv": BF16}, **alone)["kv"]
    assert (wanted != 1e4).any()
    np.testing.assert_allclose(got.astype(float32), wanted.astype(float32), rtol=2 * BF16, atol=0.01)


@pytest.mark.parametrize("page_size", [16, 64])
def test_pages_of_a_cache_that_holds_all_layers(check_op, rng, normal, page_size):
    check_written(check_op, step(rng, normal, 133, 4, 2, 64, page_size, layers=3))


def test_padding_tokens_leave_the_cache_alone(check_op, rng, normal):
    args = step(rng, normal, 5, 4, 2, 64, 16)
    args["token_slots"][:] = 0
    args["positions"][:] = 0
    args["kv"][...] = 7
    got = check_op(qk_norm_rope_write, {"q": BF16}, **args)
    assert (got["kv"] == 7).all()


def test_by_hand():
    """One head of two halves: rms 1, a quarter turn, values as they are."""
    dim = 16
    first, second = np.ones(dim // 2), -np.ones(dim // 2)
    head = np.concatenate([first, second])
    kv = np.zeros((2, 2, 1, 4, dim), float32)
    args = {
        "q": np.zeros((1, 1, dim), float32),
        "kv": kv,
        "qkv": np.concatenate([2 * head, 3 * head, 4 * head])[None].astype(float32),
        "q_norm": np.full(dim, 5, float32),
        "k_norm": np.full(dim, 7, float32),
        "cos_sin": np.stack([np.zeros((8, dim // 2)), np.ones((8, dim // 2))], axis=1).astype(float32),
        "positions": np.array([6], np.int32),
        "token_slots": np.array([1], np.int32),
        "block_tables": np.array([[0, 0], [0, 1]], np.int32),
    }
    qk_norm_rope_write(CpuPack(), **{k: Tensor.from_numpy(v) for k, v in args.items()}, eps=1e-12)
    turned = np.concatenate([first, first])
    np.testing.assert_allclose(args["q"][0, 0], 5 * turned, rtol=1e-6)
    np.testing.assert_allclose(kv[1, 0, 0, 2], 7 * turned, rtol=1e-6)
    np.testing.assert_array_equal(kv[1, 1, 0, 2], 4 * head)
    assert np.count_nonzero(kv) == 2 * dim
    plain = {k: Tensor.from_numpy(v) for k, v in args.items() if not k.endswith("norm")}
    qk_norm_rope_write(CpuPack(), **plain, eps=1e-12)
    np.testing.assert_allclose(args["q"][0, 0], 2 * turned, rtol=1e-6)
    np.testing.assert_allclose(kv[1, 0, 0, 2], 3 * turned, rtol=1e-6)


def test_few_kernels_serve_all_models_and_steps(arena):
    pack = NullPack(H200)
    for heads in (16, 32, 40, 64):
        for tokens in (1, 128, 256, 8192):
            shapes = {
                "q": ((tokens, heads, 128), bfloat16),
                "qkv": ((tokens, (heads + 16) * 128), bfloat16),
                "q_norm": ((128,), bfloat16),
                "k_norm": ((128,), bfloat16),
                "cos_sin": ((40960, 2, 64), float32),
                "positions": ((tokens,), int32),
                "token_slots": ((tokens,), int32),
                "block_tables": ((9, 2560), int32),
            }
            args = {k: arena.alloc(*v) for k, v in shapes.items()}
            cache = arena.alloc((50, 36, 2, 8, 16, 128), bfloat16)
            qk_norm_rope_write(pack, kv=cache[:, 7], eps=1e-6, **args)
    assert len(pack.specs()) == 2
    assert pack.workspace_bytes(zeroed=False) == 0


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "words"),
    [
        ("q", (3, 4, 24), bfloat16, "head size is 24; it must be a multiple of 16"),
        ("qkv", (3, 255), bfloat16, "qkv has shape"),
        ("cos_sin", (9, 2, 32), bfloat16, "cos_sin is bfloat16; it must be float32"),
        ("positions", (4,), int32, r"positions has shape \(4,\); it must be \[3\]"),
    ],
)
def test_contract_names_the_wrong_argument(arena, name, shape, dtype, words):
    dim = shape[2] if name == "q" else 64
    shapes = {
        "q": ((3, 4, dim), bfloat16),
        "kv": ((5, 2, 2, 16, dim), bfloat16),
        "qkv": ((3, 8 * dim), bfloat16),
        "q_norm": ((dim,), bfloat16),
        "k_norm": ((dim,), bfloat16),
        "cos_sin": ((9, 2, dim // 2), float32),
        "positions": ((3,), int32),
        "token_slots": ((3,), int32),
        "block_tables": ((9, 4), int32),
        name: (shape, dtype),
    }
    with pytest.raises(ContractError, match=words):
        qk_norm_rope_write(CpuPack(), **{k: arena.alloc(*v) for k, v in shapes.items()}, eps=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("tokens", [1, 128, 1000])
def test_on_gpu(check_op_gpu, rng, normal, tokens, page_size):
    for heads in (16, 40):
        check_written(
            check_op_gpu, step(rng, normal, tokens, heads, 8, 128, page_size, layers=2, context=700)
        )


def test_output_gates_are_passed_over_and_part_of_a_head_is_rotated(rng, normal):
    """The same numbers, laid out with gates, give the same bits; what lies past the rotated part is only normalised."""
    plain = step(rng, normal, 9, 4, 2, 64, 16)
    plain["cos_sin"] = np.ascontiguousarray(plain["cos_sin"][:, :, :8])
    heads = plain["qkv"].reshape(9, 8, 64)
    queries = np.stack([heads[:, :4], np.full((9, 4, 64), np.nan, bfloat16)], axis=2).reshape(9, 8, 64)
    gated = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in plain.items()}
    gated["qkv"] = np.concatenate([queries, heads[:, 4:]], axis=1).reshape(9, -1)
    for args in (plain, gated):
        args["kv"][...] = 7
        qk_norm_rope_write(
            CpuPack(),
            **{k: Tensor.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in args.items()},
        )
    np.testing.assert_array_equal(gated["q"], plain["q"])
    np.testing.assert_array_equal(gated["kv"], plain["kv"])
    wide = heads[:, :4].astype(float32)
    unit = (wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)).astype(bfloat16).astype(float32)
    normed = (unit * plain["q_norm"].astype(float32)).astype(bfloat16).astype(float32)
    np.testing.assert_allclose(plain["q"][..., 16:].astype(float32), normed[..., 16:], rtol=BF16)
    cos, sin = plain["cos_sin"][plain["positions"]][:, None].transpose(2, 0, 1, 3)
    first = normed[..., :8] * cos - normed[..., 8:16] * sin
    np.testing.assert_allclose(plain["q"][..., :8].astype(float32), first, rtol=2 * BF16, atol=1e-2)
    assert np.abs(plain["q"][..., :8].astype(float32) - normed[..., :8]).max() > 0.1
