"""attention_sublayer: which calls one launch takes, what the parts make of the others, and results on a GPU."""

import dataclasses

import numpy as np
import pytest

from openinfer.kernels import (
    H200,
    ContractError,
    Cost,
    CpuPack,
    NullPack,
    Workload,
    attention_sublayer,
    select_rows,
)
from openinfer.kernels.authoring import FP8_CACHE, CacheForm, KvLayout, Linear, joined, shared_bytes
from openinfer.kernels.formats.fp4 import fp4_pairs, fp4_row, fp4_scales
from openinfer.kernels.formats.int4 import group_words, pack
from openinfer.kernels.lora.low_rank import Lora
from openinfer.kernels.op.rounding import q8_codes, q8_values
from openinfer.kernels.ops.linear_add import AddArgs
from openinfer.kernels.ops.norm_linear import LinearArgs
from openinfer.kernels.ops.norm_rope_attend import RopeAttentionArgs
from openinfer.kernels.testing import (
    NEVER,
    coded_cache,
    copied,
    of_the_day,
    paged_places,
    run_on_gpu,
    run_reference,
)
from openinfer.tensor import bfloat16, float8_e4m3fn, float32, int32, uint8

TARGET = dataclasses.replace(H200, nvrtc=True)
BF16 = 6e-3
PARTS = attention_sublayer.parts
NAMES = [op.name for op in PARTS.values()]


@pytest.fixture
def step(arena):
    """step(tokens): the arguments of a decode step, without memory."""

    def make(
        tokens=1, *, hidden=2560, kv_heads=8, group=4, dim=128, page_size=16, cache=None, max_q_len=1, form="bf16"
    ):  # fmt: skip
        def t(*shape, dtype=bfloat16):
            return arena.alloc(shape, dtype)

        rows, width = tokens // max_q_len, kv_heads * group * dim
        x, out, qkv = t(tokens, hidden), t(tokens, width), t(tokens, width + 2 * kv_heads * dim)
        pages = KvLayout(2, kv_heads, page_size, dim, cache or CacheForm(bfloat16)).allocate(arena, None, 64)
        lengths = {"positions": tokens, "token_slots": tokens, "slots": rows, "q_starts": rows + 1}
        ints = {name: t(n, dtype=int32) for name, n in {**lengths, "seq_lens": 16, "alive": 16}.items()}
        attend = RopeAttentionArgs(
            out=out, qkv=qkv, **pages.layer(1), q_norm=t(dim), k_norm=t(dim), **ints,
            block_tables=t(16, 64, dtype=int32), cos_sin=t(4096, 2, dim // 2, dtype=float32),
            eps=1e-6, scale=dim**-0.5, window=0, max_q_len=max_q_len,
        )  # fmt: skip
        weight, output = t(qkv.shape[1], hidden), t(hidden, width)
        project = LinearArgs(out=qkv, x=x, weight=weight, norm_weight=t(hidden), eps=1e-6)
        args = {"project": project, "attend": attend, "add": AddArgs(x=x, h=out, weight=output)}
        return changed(args, **{name: {"weight": FORMS[form](t, args[name])} for name in ("project", "add")})

    return make


@pytest.fixture
def sublayer(norm_rope_args, normal, rng):
    """sublayer(before): the arguments of a step of rows that have one token after `before` cached ones. What was never
    written of the cache is NaN."""

    def weight(form, n, k):
        if form == "bf16":
            return normal(n, k, scale=k**-0.5)
        if form == "fp8":
            scales = np.exp(normal(n // 128, k // 128).astype(float32)) * k**-0.5
            return Linear(normal(n, k).astype(float8_e4m3fn), scales, "block")
        codes = pack(rng.integers(0, 16, (n, k)))
        if form == "fp4":
            scales = 2.0 ** rng.integers(-6, 3, (n, k // 16))
            return Linear(fp4_pairs(codes), fp4_scales(scales, rng.uniform(0.5, 2, (n, 1)) * k**-0.5))
        scales = np.exp(normal(n, k // 128).astype(float32)) * k**-0.5 / 4
        return Linear(codes, group_words(scales.astype(bfloat16), rng.integers(0, 16, scales.shape)))

    def make(
        before, *, hidden=2560, heads=32, kv_heads=8, dim=128, page_size=16, lengths=None, form="bf16",
        coded_kv=False, **more,
    ):  # fmt: skip
        lengths = lengths or [1] * len(before)
        sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "page_size": page_size}
        attend = norm_rope_args(lengths, before, **sizes, **more)
        shape = attend["block_tables"].max() + 1, 3, 2, kv_heads, page_size, dim
        kv = np.full(shape, np.nan, bfloat16)[:, 1]
        cache = coded_cache(shape[0], kv_heads, page_size, dim) if coded_kv else {"kv": kv}
        for page, place in paged_places(attend, before, page_size):
            new = normal(2, kv_heads, dim)
            if coded_kv:
                large = np.float32(2.0) ** np.arange(-kv_heads, kv_heads).reshape(2, kv_heads, 1) / 4
                codes, scales = q8_codes(new.astype(float32) * large)
                cache["kv"][page, :, :, place], cache["kv_scales"][page, :, :, place] = codes, scales
            else:
                kv[page, :, :, place] = new
        x, gain = normal(len(attend["out"]), hidden), normal(hidden)
        project, output = (
            weight(form, (heads + 2 * kv_heads) * dim, hidden),
            weight(form, hidden, heads * dim),
        )
        attend["out"][:], attend["qkv"][:] = 0, 0
        return {
            "project": LinearArgs(out=attend["qkv"], x=x, weight=project, norm_weight=gain, eps=1e-6),
            "attend": RopeAttentionArgs(**cache, **attend),
            "add": AddArgs(x=x, h=attend["out"], weight=output),
        }

    return make


def planned(args, target=TARGET, order=NAMES):
    """The calls that a model's calls become, in the order of the parts or another."""
    pack, ops = NullPack(target), {op.name: (op, args[name]) for name, op in PARTS.items()}
    with joined(pack, attention_sublayer) as one:
        for name in order:
            one.run(*ops[name])
    return pack.calls


def of_commands(calls):
    """What commands are but for their memory."""
    fields = ("spec", "grid", "early", "kind", "epilogue")
    return [tuple(getattr(c, f, None) for f in fields) for call in calls for c in call.commands]


@pytest.mark.parametrize("cache", [CacheForm(bfloat16), FP8_CACHE], ids=["bf16", "FP8"])
@pytest.mark.parametrize(
    ("form", "group", "hidden"),
    [
        *((form, 2, n) for form in ("bf16", "fp8") for n in range(512, 2561, 512)),
        *((form, 4, n) for form in ("bf16", "fp8", "int4", "fp4") for n in (*range(512, 3073, 512), 4096)),
    ],
)
def test_a_decode_step_of_few_rows_is_one_launch_that_fits(step, group, hidden, form, cache):
    for tokens in range(1, 5 if (form, hidden) == ("bf16", 4096) else 9):
        args = step(tokens, group=group, hidden=hidden, page_size=16 << tokens % 3, form=form, cache=cache)
        (call,) = planned(args)
        (command,) = call.commands
        assert (call.op, call.tokens) == (attention_sublayer, tokens)
        assert (command.spec.function, command.early) == ("attention_sublayer", True)
        assert dict(command.spec.constants)["STAGES"] >= {"bf16": 10, "fp8": 7, "int4": 5, "fp4": 4}[form]
        assert command.spec.shared <= shared_bytes(90)


def test_heads_without_norms_are_one_launch(step):
    args = changed(step(), attend={"q_norm": None, "k_norm": None})
    assert [call.op for call in planned(args)] == [attention_sublayer]


def changed(args, **more):
    return {name: dataclasses.replace(part, **more.get(name, {})) for name, part in args.items()}


OTHER_SIZES = {
    "nine tokens": {"tokens": 9},
    "drafts": {"tokens": 4, "max_q_len": 2},
    "four key heads": {"kv_heads": 4},
    "groups of eight": {"group": 8},
    "columns without room for their gains": {"group": 2, "hidden": 3072},
    "large weights": {"hidden": 5120},
    "large weights for five tokens": {"tokens": 5, "hidden": 4096},
    "codes of 5,120 columns for five tokens": {"tokens": 5, "hidden": 5120, "form": "fp8"},
    "INT4 for two heads": {"group": 2, "hidden": 2048, "form": "int4"},
    "words of FP4 without room": {"tokens": 8, "hidden": 5120, "form": "fp4"},
    "heads of 64": {"dim": 64},
    "pages of eight tokens": {"page_size": 8},
    "rows of 256": {"hidden": 2560 + 256},
}

OTHER_ARGUMENTS = {
    "a window": lambda a, t: changed(a, attend={"window": 512}),
    "no norm": lambda a, t: changed(a, project={"norm_weight": None, "eps": None}),
    "a gain in float32": lambda a, t: changed(a, project={"norm_weight": t(2560, dtype=float32)}),
    "two values of eps": lambda a, t: changed(a, attend={"eps": 1e-5}),
    "FP8 in qkv": lambda a, t: changed(a, project={"weight": fp8(t, a["project"], "block")}),
    "FP8 in o": lambda a, t: changed(a, add={"weight": fp8(t, a["add"], "block")}),
    "FP8 for x in bf16": lambda a, t: changed(a, **{n: {"weight": fp8(t, a[n])} for n in ("project", "add")}),
    "INT4 in qkv": lambda a, t: changed(a, project={"weight": int4(t, a["project"])}),
    "INT4 in o": lambda a, t: changed(a, add={"weight": int4(t, a["add"])}),
    "adapters of qkv": lambda a, t: changed(a, project={"lora": lora(t, 2560, 6144)}),
    "adapters of o": lambda a, t: changed(a, add={"lora": lora(t, 4096, 2560)}),
    "two ranks": lambda a, t: changed(a, add={"ranks": 2}),
    "a norm behind it": lambda a, t: changed(a, add={"normed": t(1, 2560), "norm_weight": t(2560), "eps": 1e-6}),
    "another qkv": lambda a, t: changed(a, attend={"qkv": t(1, 6144)}),
    "other heads": lambda a, t: changed(a, add={"h": t(1, 4096)}),
    "another x": lambda a, t: changed(a, add={"x": t(1, 2560)}),
}  # fmt: skip

OTHER_TARGETS = {
    "no NVRTC": {"nvrtc": False},
    "sm_89": {"arch": 89, "gpu": ""},
    "sm_100": {"arch": 100, "gpu": ""},
    "few SMs": {"num_sms": 120},
    "batch invariance": {"batch_invariant": True},
}


def fp8(t, part, coding=None):
    n, k = part.weight.shape
    return Linear(t(n, k, dtype=float8_e4m3fn), t(n // 128, k // 128, dtype=float32), coding)


def int4(t, part):
    n, k = part.weight.shape
    return Linear(t(n, k // 2, dtype=uint8), t(n, k // 128, dtype=int32))


def fp4(t, part):
    n, k = part.weight.shape
    return Linear(t(n, k // 2, dtype=uint8), t(n, fp4_row(k), dtype=uint8))


FORMS = {
    "bf16": lambda _, part: part.weight,
    "fp8": lambda t, p: fp8(t, p, "block"),
    "int4": int4,
    "fp4": fp4,
}


def lora(t, k, n):
    return Lora(t(2, 16, k), t(2, n, 16), (n,), t(16, dtype=int32), t(1, dtype=int32))


def these_are_the_parts(args, target=TARGET):
    """The parts' calls are made, and the op by itself plans what they do."""
    calls, direct = planned(args, target), NullPack(target)
    assert [call.op.name for call in calls] == NAMES
    attention_sublayer(direct, **args)
    assert of_commands(direct.calls) == of_commands(calls)


@pytest.mark.parametrize("sizes", OTHER_SIZES.values(), ids=OTHER_SIZES)
def test_steps_of_other_sizes_are_the_parts(step, sizes):
    these_are_the_parts(step(**sizes))


@pytest.mark.parametrize("change", OTHER_ARGUMENTS.values(), ids=OTHER_ARGUMENTS)
def test_calls_with_other_arguments_are_the_parts(arena, step, change):
    these_are_the_parts(change(step(), lambda *shape, dtype=bfloat16: arena.alloc(shape, dtype)))


@pytest.mark.parametrize("target", OTHER_TARGETS.values(), ids=OTHER_TARGETS)
def test_on_other_targets_it_is_the_parts(step, target):
    these_are_the_parts(step(), dataclasses.replace(TARGET, **target))


@pytest.mark.parametrize("order", [NAMES[:2], NAMES[1:], NAMES[::-1], [*NAMES, NAMES[0]], []])
def test_other_calls_run_in_their_order(step, order):
    assert [call.op.name for call in planned(step(), order=order)] == order


def test_a_call_in_between_keeps_the_parts(arena, step):
    args, pack, other = step(), NullPack(TARGET), arena.alloc((1, 6144), bfloat16)
    with joined(pack, attention_sublayer) as one:
        one.run(PARTS["project"], args["project"])
        select_rows(one, out=args["attend"].qkv, x=other, q_starts=args["attend"].q_starts)
        one.run(PARTS["attend"], args["attend"])
        one.run(PARTS["add"], args["add"])
        assert pack.calls == []
    assert [call.op.name for call in pack.calls] == [NAMES[0], "select_rows", *NAMES[1:]]


def test_nothing_runs_after_an_error_in_the_block(step):
    args, pack = step(), NullPack(TARGET)
    joining = joined(pack, attention_sublayer)
    one = joining.__enter__()
    for name, op in PARTS.items():
        one.run(op, args[name])
    assert not joining.__exit__(KeyError, KeyError("a layer"), None)
    assert pack.calls == []


def test_a_wrong_call_is_refused_where_it_is_made(step):
    args, pack = changed(step(), attend={"scale": -1.0}), NullPack(TARGET)
    with joined(pack, attention_sublayer) as one:
        one.run(PARTS["project"], args["project"])
        with pytest.raises(ContractError, match="scale is -1"):
            one.run(PARTS["attend"], args["attend"])
    assert [call.op.name for call in pack.calls] == NAMES[:1]
    with pytest.raises(ContractError, match="scale is -1"):
        attention_sublayer(pack, **args)


def test_a_pack_without_a_target_runs_the_parts_at_once_as_the_reference_does(sublayer):
    args = sublayer([3, 20], hidden=64, heads=4, kv_heads=2, dim=16)
    (arrays, tensors), want = copied(args), run_reference(attention_sublayer, args)
    with joined(CpuPack(batch_invariant=True), attention_sublayer) as one:
        for (name, op), written in zip(PARTS.items(), ("project.out", "attend.out", "add.x"), strict=True):
            before = arrays[written].tobytes()
            one.run(op, tensors[name])
            assert arrays[written].tobytes() != before
    assert {name for name in want if arrays[name].tobytes() != want[name].tobytes()} == set()


def test_its_cost_is_the_sum_of_those_of_the_parts(step):
    args, workload = step(4), Workload.decode(4, 1000)
    costs = [op.cost(workload, args[name]) for name, op in PARTS.items()]
    found = attention_sublayer.cost(workload, attention_sublayer.args(**args))
    assert found == Cost(sum(cost.bytes for cost in costs), sum(cost.flops for cost in costs))
    assert min(cost.flops for cost in costs) > 0


CASES = {
    "one row": [1000],
    "its first token": [0],
    "a full page": [16],
    "short rows": [0, 1, 15, 16],
    "long and short": [3000, 5, 700, 64, 0],
    "eight rows": [1024, 1000, 17, 300, 2048, 64, 65, 999],
    "few keys": [3, 4],
}


@pytest.mark.gpu
@pytest.mark.parametrize("before", CASES.values(), ids=CASES)
@pytest.mark.parametrize("page_size", of_the_day([16, 64]))
@pytest.mark.parametrize("hidden", of_the_day([2560, 4096]))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("coded_kv", [False, True])
def test_results_on_a_gpu(gpu, sublayer, before, page_size, hidden, form, coded_kv):
    on(gpu, sublayer(before, hidden=hidden, page_size=page_size, form=form, coded_kv=coded_kv))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["bf16", "fp8"])
@pytest.mark.parametrize("hidden", of_the_day([1024, 2048]))
def test_two_query_heads_a_key_head_on_a_gpu(gpu, sublayer, hidden, form):
    for case in ("one row", "few keys", "short rows"):
        on(gpu, sublayer(CASES[case], hidden=hidden, heads=16, form=form, coded_kv=case == "short rows"))


@pytest.mark.gpu
def test_rows_that_have_no_token_or_are_dead(gpu, sublayer):
    args = sublayer([70, 5, 3, 90, 40], lengths=[1, 0, 1, 1, 0], dead=(2,), tokens=5, max_q_len=1)
    x = on(gpu, args)
    for token in (1, 3, 4):
        assert (x[token] == args["add"].x[token].astype(float32)).all()


@pytest.mark.gpu
def test_the_same_bits_each_time(gpu, sublayer):
    args = sublayer(CASES["eight rows"])
    assert all((on(gpu, args) == on(gpu, args)).all() for _ in range(3))


@pytest.mark.gpu
def test_heads_without_norms_on_a_gpu(gpu, sublayer):
    args = sublayer([100, 2])
    args["attend"] = dataclasses.replace(args["attend"], q_norm=None, k_norm=None)
    on(gpu, args)


def on(gpu, args):
    target, driver, _, stream = gpu
    return check(run_on_gpu, args, dataclasses.replace(target, nvrtc=True), driver, stream)


def check(run, args, *how):
    got, want = run(attention_sublayer, args, *how), run_reference(attention_sublayer, args)
    x, wanted = (arrays["add.x"].astype(float32) for arrays in (got, want))
    old = args["add"].x.astype(float32)
    live = np.linalg.norm(wanted - old, axis=1) > 0  # x is rounded, and so is what is added
    error = np.linalg.norm(x - wanted, axis=1)[live] / np.linalg.norm(wanted, axis=1)[live]
    forms = {"FP8": 4 * BF16, "INT4": 2 * BF16, "FP4": 2 * BF16}  # a code of x may round to its neighbour
    bound = forms[args["add"].weight.packed] if isinstance(args["add"].weight, Linear) else BF16
    coded = args["attend"].kv_scales is not None
    assert error.size == 0 or error.max() < (2 * bound if coded else bound), error
    if coded:
        written = want["attend.kv_scales"] != NEVER
        assert (got["attend.kv_scales"][~written] == NEVER).all()
        assert (got["attend.kv"].view(uint8)[~written] == NEVER).all()
        kv, kept = (q8_values(a["attend.kv"][written], a["attend.kv_scales"][written]) for a in (got, want))
        assert np.linalg.norm(kv - kept) <= 2e-2 * np.linalg.norm(kept)
        return x
    kv, kept = (arrays["attend.kv"].astype(float32) for arrays in (got, want))
    written = ~np.isnan(kept)
    assert (np.isnan(kv) == ~written).all()
    assert np.linalg.norm(kv[written] - kept[written]) <= 4e-3 * np.linalg.norm(kept[written])
    return x
