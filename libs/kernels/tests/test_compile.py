"""Every kernel that representative plans ask for compiles, and fits the shared memory of its architecture.

By default kernels of a third of the steps of one of two models, one of every second function, by the day: for sm_90,
and every third day for another architecture too.
OPENINFER_TEST_ARCHS=80,100 chooses; `-m slow` does all.
"""

import datetime
import itertools
import os

import numpy as np
import pytest

from openinfer.kernels import (
    NullPack,
    Store,
    Target,
    apply_writes,
    attend,
    copy_words,
    embed,
    expand_rows,
    gate_up_silu,
    linear_add,
    norm_linear,
    norm_rope_attend,
    qk_norm_rope_write,
    select_rows,
)
from openinfer.kernels.op.target import shared_bytes
from openinfer.tensor import bfloat16, float32

TODAY = datetime.date.today().toordinal()
ARCHS = (80, 90, 100, 120)
SMS = {80: 108, 90: 132, 100: 148, 120: 188}
SLOTS, PAGES_A_ROW = 513, 64

# hidden, query heads, key heads, intermediate, vocabulary
FEW_MODELS = [(2560, 32, 8, 9728, 151936), (256, 4, 2, 384, 1024)]  # Qwen3-4B and a tiny one
MODELS = [
    *FEW_MODELS,
    (1024, 16, 8, 3072, 151936),
    (2048, 16, 8, 6144, 151936),
    (4096, 32, 8, 12288, 151936),
    (5120, 40, 8, 17408, 151936),
    (5120, 64, 8, 25600, 151936),
]
STEPS = [(1, 1), (7, 7), (32, 32), (64, 64), (128, 128), (512, 512), (1024, 16), (8192, 64)]  # tokens, rows


def archs_of_today():
    chosen = os.environ.get("OPENINFER_TEST_ARCHS")
    if chosen:
        return [int(a) for a in chosen.split(",")]
    others = [a for a in ARCHS if a != 90]
    return [90, *([others[TODAY // 3 % len(others)]] if TODAY % 3 == 0 else [])]


def trace(pack, arena, model, tokens, rows, page_size):
    """The op calls of one step of one layer."""
    hidden, heads, kv_heads, inter, vocab = model
    dim = 128

    def t(*shape, dtype=bfloat16):
        return arena.alloc(shape, dtype)

    def i(*shape):
        return arena.alloc(shape, np.dtype(np.int32))

    ids, positions, slots_of_tokens = i(tokens), i(tokens), i(tokens)
    slots, q_starts, seq_lens, alive = i(rows), i(rows + 1), i(SLOTS), i(SLOTS)
    tables = i(SLOTS, PAGES_A_ROW)
    x, qkv = t(tokens, hidden), t(tokens, (heads + 2 * kv_heads) * dim)
    q, o = t(tokens, heads, dim), t(tokens, heads * dim)
    kv = t(100, 36, 2, kv_heads, page_size, dim)[:, 3]
    apply_writes(pack, words=i(1000), writes=i(1 + 2 * 64))
    copy_words(pack, out=i(300), x=i(300))
    expand_rows(
        pack, token_ids=ids, positions=positions, token_slots=slots_of_tokens, prompt=i(tokens), slots=slots,
        q_starts=q_starts, seq_lens=seq_lens, last_tokens=i(SLOTS), alive=alive,
    )  # fmt: skip
    embed(pack, out=x, token_ids=ids, table=t(vocab, hidden))
    norm_linear(pack, out=qkv, x=x, norm_weight=t(hidden), weight=t(qkv.shape[1], hidden), eps=1e-6)
    qk_norm_rope_write(
        pack, q=q, kv=kv, qkv=qkv, q_norm=t(dim), k_norm=t(dim), cos_sin=t(40960, 2, dim // 2, dtype=float32),
        positions=positions, token_slots=slots_of_tokens, block_tables=tables, eps=1e-6,
    )  # fmt: skip
    attend(
        pack, out=o, q=q, kv=kv, slots=slots, q_starts=q_starts, seq_lens=seq_lens, alive=alive, block_tables=tables,
        scale=dim**-0.5, window=0, max_q_len=1 if tokens == rows else tokens,
    )  # fmt: skip
    linear_add(pack, x=x, h=o, weight=t(hidden, heads * dim))
    act = t(tokens, inter)
    gate_up_silu(pack, out=act, x=x, norm_weight=t(hidden), weight=t(2 * inter, hidden), eps=1e-6)
    linear_add(pack, x=x, h=act, weight=t(hidden, inter))
    last = t(rows, hidden)
    select_rows(pack, out=last, x=x, q_starts=q_starts)
    out = t(rows, vocab, dtype=float32)
    norm_linear(pack, out=out, x=last, norm_weight=t(hidden), weight=t(vocab, hidden), eps=1e-6)


def specs(arch, arena, models, steps):
    """The kernels of the models' steps, for targets with and without cuBLASLt."""
    found = {}
    for cublas in (False, True):
        pack = NullPack(Target(arch, SMS[arch], cublas, "NVIDIA H200" if arch == 90 else ""))
        for model in models:
            for tokens, rows in steps:
                trace(pack, arena, model, tokens, rows, page_size=64 if tokens % 32 else 16)
        found.update(dict.fromkeys(pack.specs()))
    assert {s.function for s in found} >= {"gemv", "gemm_small", "rms_norm", "silu_mul", "gather_rows"}
    return list(found)


def compile_all(arch, cubins, wanted):
    store = Store(arch, cubins, folders=[])
    store.prepare(wanted)
    too_large = {str(s): store.get(s).shared for s in wanted if store.get(s).shared > shared_bytes(arch)}
    assert not too_large, f"more shared memory than sm_{arch} has: {too_large}"


@pytest.mark.parametrize("arch", archs_of_today())
def test_kernels_compile(arch, arena, cubins):
    by_function = {}
    for spec in specs(arch, arena, [FEW_MODELS[TODAY % 2]], [STEPS[0], *STEPS[1 + TODAY % 3 :: 3]]):
        by_function.setdefault(spec.function, []).append(spec)
    of_the_day = [*by_function.values()][TODAY // 6 % 2 :: 2]
    compile_all(arch, cubins, [found[TODAY // 12 % len(found)] for found in of_the_day])


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_attention_without_head_norms_compiles(arena, cubins, shared):
    """By default its kernels that no call with head norms has. shared: the others too."""
    dim, int32, norm = 128, np.dtype(np.int32), arena.alloc((128,), bfloat16)
    wanted, normed = NullPack(Target(90, SMS[90])), NullPack(Target(90, SMS[90]))
    for (tokens, rows), (pack, norms) in itertools.product(
        ((4, 4), (64, 4)), ((wanted, {}), (normed, {"q_norm": norm, "k_norm": norm}))
    ):
        lengths = {"positions": tokens, "token_slots": tokens, "slots": rows, "q_starts": rows + 1}
        slots = {"seq_lens": SLOTS, "alive": SLOTS}
        norm_rope_attend(
            pack, out=arena.alloc((tokens, 4 * dim), bfloat16), qkv=arena.alloc((tokens, 8 * dim), bfloat16),
            kv=arena.alloc((9, 2, 2, 16, dim), bfloat16), cos_sin=arena.alloc((99, 2, dim // 2), float32),
            block_tables=arena.alloc((SLOTS, PAGES_A_ROW), int32), eps=1e-6, scale=1.0, window=0,
            max_q_len=1 if tokens == rows else tokens, **norms,
            **{name: arena.alloc((size,), int32) for name, size in {**lengths, **slots}.items()},
        )  # fmt: skip
    own = set(wanted.specs()) - set(normed.specs())
    assert sorted(spec.function for spec in own) == ["attend_new", "qk_norm_rope_write"]
    assert all(("q_norm", None) in spec.constants for spec in own)
    Store(90, cubins, folders=[]).prepare(wanted.specs() if shared else own)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_for_every_architecture(arch, arena, cubins):
    compile_all(arch, cubins, specs(arch, arena, MODELS, STEPS))
