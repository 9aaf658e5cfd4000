"""An FP8 cache: what is written to it, and what a long context finds again in it."""

import numpy as np
import pytest

from openinfer.kernels import CpuPack, attend, qk_norm_rope_write
from openinfer.kernels.attention.kv_cache import CacheForm, KvLayout
from openinfer.kernels.op.rounding import q8_codes, q8_values
from openinfer.kernels.testing import NEVER, coded_cache
from openinfer.tensor import Arena, Device, Stream, Tensor, bfloat16, float8_e4m3fn, float32

FLIPPED = 2e-2
"""Relative error of what is written: a value that differs in bfloat16's last bit may get the code beside."""
CPU = Device("cpu")


def write_args(rng, normal, tokens, *, heads=4, kv_heads=2, dim=64, rotary=None, gated=False):
    """Arguments of qk_norm_rope_write for one row, whose last token is padding."""
    angle = np.arange(tokens)[:, None] * 10000.0 ** -np.linspace(0, 1, (rotary or dim) // 2)
    return {
        "q": np.full((tokens, heads, dim), np.nan, bfloat16),
        **coded_cache(1 + -(-tokens // 16), kv_heads, 16, dim),
        "qkv": normal(tokens, ((1 + gated) * heads + 2 * kv_heads) * dim, scale=5.0),
        "q_norm": normal(dim),
        "k_norm": normal(dim),
        "cos_sin": np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(float32),
        "positions": np.arange(tokens, dtype=np.int32),
        "token_slots": np.array([1] * (tokens - 1) + [0], np.int32),
        "block_tables": np.stack([np.zeros(-(-tokens // 16)), 1 + np.arange(-(-tokens // 16))]).astype(
            np.int32
        ),
        "eps": 1e-6,
    }


@pytest.mark.parametrize(("dim", "rotary", "gated"), [(64, None, False), (128, 32, True), (48, None, False)])
def test_writing_a_cache(run_both, rng, normal, dim, rotary, gated):
    args = write_args(rng, normal, 20, dim=dim, rotary=rotary, gated=gated)
    got, want = run_both(qk_norm_rope_write, args)
    written = want["kv_scales"] != NEVER
    assert written.sum() == 19 * 2 * 2, "padding tokens write nothing"
    ours, right = (q8_values(x["kv"][written], x["kv_scales"][written]) for x in (got, want))
    assert np.linalg.norm(ours - right) <= FLIPPED * np.linalg.norm(right)
    assert (got["kv_scales"][~written] == NEVER).all()
    assert (got["kv"].view(np.uint8)[~written] == NEVER).all()
    value = args["qkv"][0].reshape(-1, dim)[-2:].astype(float32)  # values are not rotated: the same bits
    codes, scales = q8_codes(value)
    np.testing.assert_array_equal(got["kv"][1, 1, :, 0].view(np.uint8), codes.view(np.uint8))
    np.testing.assert_array_equal(got["kv_scales"][1, 1, :, 0], scales)


def test_a_cache_has_the_same_bits_however_its_tokens_came(rng, normal):
    """In one step, in chunks that end within a page, and over what was there before, as after rejected drafts."""
    args, left = write_args(rng, normal, 40), []
    for chunks in ([40], [7, 20, 1, 12], [20, -5, 25]):
        arrays = {k: v.copy() if k not in ("kv", "kv_scales") else v for k, v in args.items() if k != "eps"}
        arrays |= coded_cache(4, 2, 16, 64)
        at = 0
        for chunk in chunks:
            if chunk < 0:  # other tokens have been there
                at += chunk
                continue
            part = {k: arrays[k][at : at + chunk] for k in ("q", "qkv", "positions", "token_slots")}
            if at + chunk < 40 and -5 in chunks:
                part["qkv"] = np.concatenate([part["qkv"][:-5], part["qkv"][-5:] * bfloat16.type(37)])
            tensors = {
                k: Tensor.from_numpy(v.copy() if k == "qkv" else v) for k, v in {**arrays, **part}.items()
            }
            qk_norm_rope_write(CpuPack(), **tensors, eps=1e-6)
            at += chunk
        left.append((arrays["kv"][1:].tobytes(), arrays["kv_scales"][1:].tobytes()))
    assert left[0] == left[1] == left[2]


def test_codes_and_scales_keep_what_e4m3_can(rng):
    """Heads of any size lose the same; a head of zeros stays one."""
    heads = rng.standard_normal((60, 128)).astype(np.float32) * np.float32(10.0) ** rng.uniform(
        -3, 30, (60, 1)
    )
    heads[7] = 0
    codes, scales = q8_codes(heads.astype(np.float32))
    values = q8_values(codes, scales)
    assert (values[7] == 0).all()
    error = np.linalg.norm(values - heads, axis=1)[heads.any(1)] / np.linalg.norm(heads, axis=1)[heads.any(1)]
    assert error.min() > 0.02
    assert error.max() < 0.035
    assert (values.astype(bfloat16).astype(np.float32) == values).all(), "codes are exact in bfloat16"


def test_layers_of_a_page_do_not_overlap():
    for dtype, per_vector in ((float8_e4m3fn, 33), (bfloat16, 64)):
        layout = KvLayout(3, 2, 16, 32, CacheForm(np.dtype(dtype), dtype == float8_e4m3fn))
        assert layout.page_bytes == 3 * 2 * 2 * 16 * per_vector
        cache = layout.allocate(Arena(CPU, 5 * layout.page_bytes + 512), Stream(CPU), 5)
        assert cache.pages.nbytes == 5 * layout.page_bytes
        cache.pages.numpy().view(np.uint8)[:] = NEVER
        for layer in range(3):
            for tensor in cache.layer(layer).values():
                if tensor is not None:
                    array = tensor.numpy()
                    assert (array.view(np.uint8) == NEVER).all(), "no other layer has this memory"
                    array.view(np.uint8)[...] = layer
        assert not (cache.pages.numpy().view(np.uint8) == NEVER).any(), "and nothing is left over"


def needles(rng, normal, context, heads=2, dim=128):
    """Arguments of attend for one query whose key stands far back in a long context of random keys; and the needle's
    value. The needle has about 0.6 of the weight."""
    pages = 1 + context // 64
    kv = rng.standard_normal((2, context, heads, dim)).astype(np.float32)
    query = rng.standard_normal((1, heads, dim)).astype(np.float32)
    at = int(rng.integers(0, context))
    others = np.log(context) + 0.5  # of the sum of exp of random scores of deviation 1
    kv[0, at] = query[0] * (others + 0.4) / (query[0] ** 2).sum(-1, keepdims=True) * dim**0.5
    order = kv.reshape(2, -1, 64, heads, dim).transpose(1, 0, 3, 2, 4)
    wide = np.concatenate([np.zeros_like(order[:1]), order])
    args = {
        "out": np.full((1, heads * dim), np.nan, bfloat16), "q": query.astype(bfloat16),
        "slots": np.array([1], np.int32), "q_starts": np.array([0, 1], np.int32),
        "seq_lens": np.array([0, context - 1], np.int32), "alive": np.array([0, 1], np.int32),
        "block_tables": np.stack([np.zeros(pages - 1), 1 + np.arange(pages - 1)]).astype(np.int32),
        "scale": dim**-0.5, "window": 0, "max_q_len": 1,
    }  # fmt: skip
    codes, scales = q8_codes(wide.astype(bfloat16).astype(np.float32))
    fp8 = coded_cache(pages, heads, 64, dim)
    fp8["kv"][:], fp8["kv_scales"][:] = codes, scales
    return args | {"kv": np.ascontiguousarray(wide, bfloat16)}, args | fp8, kv[1, at].reshape(-1)


def share(out, value):
    """How much of the needle's value is in the result."""
    return float(out.astype(np.float32).reshape(-1) @ value / (value @ value))


@pytest.mark.parametrize(
    "context", [4096, *(pytest.param(n, marks=pytest.mark.slow) for n in (16384, 65536))]
)
def test_a_needle_is_found_as_in_bfloat16(rng, normal, reference, context):
    for _ in range(4):
        bf16, fp8, value = needles(rng, normal, context)
        found, wanted = (share(reference(attend, args)["out"], value) for args in (fp8, bf16))
        assert 0.4 < wanted < 0.8
        assert found == pytest.approx(wanted, rel=0.06)


def test_a_needle_is_lost_with_another_heads_scales(rng, normal, reference):
    """The negative control. The heads are of different sizes, as a model's are."""
    bf16, fp8, value = needles(rng, normal, 16384)
    fp8["kv_scales"][:, 0, 0] += 3  # keys eight times as large, with queries as much smaller
    args = {k: v.copy() if k == "q" else v for k, v in fp8.items()}
    args["q"][:, 0] = args["q"][:, 0] * bfloat16.type(0.125)
    halves = [slice(0, 128), slice(128, 256)]

    def shares(args):
        out = reference(attend, args)["out"]
        return np.array([share(out[:, half], value[half]) for half in halves])

    wanted = shares(bf16)
    assert shares(args) == pytest.approx(wanted, rel=0.06)
    args["kv_scales"][:] = args["kv_scales"][:, :, ::-1].copy()
    assert (np.abs(shares(args) - wanted) > 0.3).all()


@pytest.mark.slow
@pytest.mark.parametrize("context", [16384])
def test_a_needle_in_the_kernels(interpreted, rng, normal, context):
    bf16, fp8, value = needles(rng, normal, context)
    ours, wanted = interpreted(attend, fp8)["out"], interpreted(attend, bf16)["out"]
    assert share(ours, value) == pytest.approx(share(wanted, value), rel=0.06)


@pytest.mark.gpu
@pytest.mark.parametrize("context", [16384, 65536])
def test_a_needle_on_a_gpu(on_gpu, rng, normal, context):
    for _ in range(4):
        bf16, fp8, value = needles(rng, normal, context)
        found, wanted = (share(on_gpu(attend, args)["out"], value) for args in (fp8, bf16))
        assert 0.4 < wanted < 0.8
        assert found == pytest.approx(wanted, rel=0.06)
