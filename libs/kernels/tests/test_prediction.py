"""A prediction is the sum of what its calls cost, for every workload."""

import dataclasses
import types

import pytest

from openinfer.kernels import (
    GPUS,
    H200,
    Call,
    Cost,
    NullPack,
    Op,
    Parts,
    Prediction,
    Repeated,
    Speed,
    Target,
    Workload,
    attend,
    embed,
    experts_add,
    linear_add,
    norm_linear,
    predictions,
)
from openinfer.kernels.authoring import Linear
from openinfer.kernels.measure.speeds import dump_lines, load_lines
from openinfer.tensor import Arena, Device, bfloat16, float8_e4m3fn, float32, int32

SPEED = Speed(4e12, 500e12, 5e-6)
FIGURES = GPUS[H200.gpu]._replace(fitted=SPEED, ops={})


def calls(arena, tokens=256, rows=4):
    pack = NullPack(H200)
    x = arena.alloc((tokens, 2560), bfloat16)
    embed(pack, out=x, token_ids=arena.alloc((tokens,), int32), table=arena.alloc((1000, 2560), bfloat16))
    norm_linear(
        pack, out=arena.alloc((tokens, 6144), bfloat16), x=x, norm_weight=arena.alloc((2560,), bfloat16),
        weight=arena.alloc((6144, 2560), bfloat16), eps=1e-6,
    )  # fmt: skip
    for window in (0, 64):
        attend(
            pack, out=arena.alloc((tokens, 4096), bfloat16), q=arena.alloc((tokens, 32, 128), bfloat16),
            kv=arena.alloc((64, 2, 8, 16, 128), bfloat16), slots=arena.alloc((rows,), int32),
            q_starts=arena.alloc((rows + 1,), int32), seq_lens=arena.alloc((9,), int32), alive=arena.alloc((9,), int32),
            block_tables=arena.alloc((9, 64), int32), scale=0.1, window=window, max_q_len=tokens,
        )  # fmt: skip
    return pack.calls


@pytest.mark.parametrize(
    ("kv_tokens", "qk_pairs"), [(0, 0), (400, 32896), (100_000, 32896), (1024, 40_000_000)]
)
def test_it_is_the_sum_of_the_calls(kv_tokens, qk_pairs):
    traced = calls(Arena(Device("null"), None))
    counted = [dataclasses.replace(call, times=n) for call, n in zip(traced, (1, 36, 24, 12), strict=True)]
    workload = Workload(256, 4, kv_tokens, qk_pairs)
    expected = sum(
        call.times
        * (call.cost(workload).floor_s(SPEED.bytes_per_s, SPEED.flops_per_s) + len(call.commands) * 5e-6)
        for call in counted
    )
    prediction = Prediction.of(counted, 256, 4, FIGURES)
    assert prediction.seconds(kv_tokens, qk_pairs) == pytest.approx(expected, rel=1e-6)
    assert len(prediction.varying) == 2  # attention alone looks at the cache
    parts = Parts.of(counted, workload, FIGURES)
    assert sum(parts) == pytest.approx(expected, rel=1e-6)
    assert parts.kernels_s == pytest.approx(5e-6 * sum(call.times * len(call.commands) for call in counted))
    assert parts.names["links"] == 0
    slower = Prediction.of(counted, 256, 4, FIGURES.at(Speed(2e12, 250e12, 10e-6)))
    assert slower.seconds(kv_tokens, qk_pairs) == pytest.approx(2 * expected, rel=1e-6)


def test_an_op_with_lines_takes_its_own_by_its_tokens():
    lines = ((8, Speed(1e12, 100e12, 20e-6)), (512, Speed(2e12, 400e12, 40e-6)))
    figures = FIGURES._replace(ops={"embed": lines})
    assert figures.speed("norm_linear", 8, 3) == pytest.approx(SPEED._replace(kernel_s=15e-6))
    assert figures.speed("embed", 1, 3) == figures.speed("embed", 8, 3) == lines[0][1]
    assert figures.speed("embed", 512, 3) == figures.speed("embed", 4096, 3) == lines[1][1]
    figures = figures._replace(ops={"product, FP4": lines, "embed": lines[:1]})
    assert (
        figures.speed("linear_add, FP4", 512, 3) == figures.speed("norm_linear, FP4", 512, 3) == lines[1][1]
    )
    assert figures.speed("embed, FP8", 512, 3) == figures.speed("embed, decode", 512, 3) == lines[0][1]
    assert figures.speed("linear_add, FP8", 8, 3).kernel_s == pytest.approx(15e-6)
    figures = figures._replace(ops={"embed": lines})
    middle = (2**0.5 * 1e12, 200e12, 2**0.5 * 20e-6)
    assert figures.speed("embed", 64, 3) == pytest.approx(middle)
    decode = figures._replace(ops={"embed": lines, "embed, decode": lines[1:]})
    assert figures.speed("embed, decode", 8, 3) == lines[0][1]
    assert decode.speed("embed, decode", 8, 3) == lines[1][1]
    twice = figures.at(Speed(2e12, 250e12, 10e-6))
    assert twice.ops["embed"][0][1] == pytest.approx((0.5e12, 50e12, 40e-6))
    traced = calls(Arena(Device("null"), None), tokens=512)
    workload = Workload(512, 4, 2000, 10**6)
    usual, own = (sum(Parts.of(traced, workload, each)) for each in (FIGURES, figures))
    size = traced[0].cost(workload).bytes
    assert own - usual == pytest.approx(size / 2e12 - size / 4e12 + 40e-6 - 5e-6)
    assert Prediction.of(traced, 512, 4, figures).seconds(2000, 10**6) == pytest.approx(own)


def test_ranks_pay_for_their_links():
    pack, arena = NullPack(H200), Arena(Device("null"), None)
    h, weight = arena.alloc((8, 1024), bfloat16), arena.alloc((2048, 1024), bfloat16)
    linear_add(pack, x=arena.alloc((8, 2048), bfloat16), h=h, weight=weight, ranks=2)
    (call,) = pack.calls
    link, sent = FIGURES.link(2), call.cost(Workload(8, 8, 0, 0)).link
    one, two = (Prediction.of(pack.calls, 8, 8, FIGURES, ranks).seconds(0, 0) for ranks in (1, 2))
    assert sent > 0
    assert two - one == pytest.approx(
        max(0, link.call_s - 5e-6) - max(0, FIGURES.link(1).call_s - 5e-6)
        + sent * (1 / link.bytes_per_s - 1 / FIGURES.link(1).bytes_per_s)
    )  # fmt: skip
    assert sum(Parts.of(pack.calls, Workload(8, 8, 0, 0), FIGURES, 2)) == pytest.approx(two)


BENDS = {
    "most so many keys": lambda w: Cost(1000 * min(w.kv_tokens, 4096 * w.rows), 0),
    "most so many pairs": lambda w: Cost(10, 10**9 * min(w.qk_pairs // w.tokens, 128)),
    "so many chosen pairs": lambda w: Cost(10, 10**6 * min(w.qk_pairs, 1 << 22)),
    "a step": lambda w: Cost(10**9 * (w.kv_tokens > 5000), 0),
}


@pytest.mark.parametrize("name", BENDS)
@pytest.mark.parametrize("sizes", [(0, 0), (500, 500), (9000, 9000), (10**6, 10**7)])
def test_a_cost_that_is_no_line_is_asked_every_time(name, sizes):
    op = Op(
        name,
        dataclasses.make_dataclass("NoArgs", []),
        check=lambda _: None,
        reference=lambda _: None,
        launches=lambda target, _: (),
        cost=lambda workload, _: BENDS[name](workload),
    )
    pack = NullPack(H200)
    op(pack)
    prediction = Prediction.of(pack.calls, 64, 4, FIGURES)
    assert len(prediction.bent) == 1
    expected = BENDS[name](Workload(64, 4, *sizes)).floor_s(SPEED.bytes_per_s, SPEED.flops_per_s)
    assert prediction.seconds(*sizes) == pytest.approx(expected)


def test_layers_that_are_traced_once_count_for_all_that_are_like_them(arena):
    pack, x = NullPack(H200), arena.alloc((8, 64), bfloat16)
    args = {"out": x, "token_ids": arena.alloc((8,), int32), "table": arena.alloc((100, 64), bfloat16)}
    layers = Repeated(pack, [("full", 8), ("linear", 24)])
    assert tuple(layers) == ("full", "linear")

    def forward():
        embed(pack, **args)
        for layer in layers:
            for _ in range(1 + (layer == "linear")):
                embed(pack, **args)
        embed(pack, **args)

    assert [call.times for call in pack.traced(forward)] == [1, 8, 24, 24, 1]
    assert len(pack.traced(forward)) == 5
    assert len(pack.calls) == 10


def test_calls_after_a_pass_that_ended_early_count_once():
    pack = NullPack(H200)
    for _, layer in zip("a", Repeated(pack, [("full", 8), ("linear", 24)]), strict=False):
        assert (layer, pack.times) == ("full", 8)
    assert pack.times == 1


def test_steps_have_predictions_where_the_speed_is_known(caplog):
    caplog.set_level("INFO", "openinfer.kernels")
    steps = {(256, 4, 256): calls(Arena(Device("null"), None))}
    (found,) = predictions(steps, H200).values()
    assert found == Prediction.of(steps[256, 4, 256], 256, 4, GPUS[H200.gpu])
    assert predictions(steps, None) == {}
    assert not caplog.messages
    assert predictions(steps, Target(90, 132, gpu="Unknown")) == {}
    assert caplog.messages[-1].endswith("no speed is known of these kernels on Unknown")
    assert predictions(steps, dataclasses.replace(H200, batch_invariant=True)) == {}


@pytest.mark.parametrize(("longest", "kind"), [(1, "attend, decode"), (4, "attend, decode"), (64, "attend")])
def test_attention_of_rows_with_few_tokens_is_a_kind_of_its_own(longest, kind):
    (op,) = {call.op for call in calls(Arena(Device("null"), None), tokens=512) if call.op.name == "attend"}
    assert Call(op, types.SimpleNamespace(max_q_len=longest), ()).kind == kind
    assert Call(op, types.SimpleNamespace(), ()).kind == "attend"


@pytest.mark.parametrize("ranks", [1, 4])
def test_lines_of_a_mixture_go_by_format_and_by_the_rows_of_an_expert(arena, ranks):
    pack, experts = NullPack(H200), 16 // ranks
    experts_add(
        pack, x=arena.alloc((8, 256), bfloat16), out=arena.alloc((8, 256), bfloat16),
        expert_ids=arena.alloc((8, 4), int32), expert_weights=arena.alloc((8, 4), bfloat16), all_experts=16,
        gate_up=Linear(arena.alloc((experts, 256, 256), float8_e4m3fn), arena.alloc((experts, 2, 2), float32)),
        down=Linear(arena.alloc((experts, 256, 128), float8_e4m3fn), arena.alloc((experts, 2, 1), float32)),
    )  # fmt: skip
    (call,) = pack.calls
    assert (call.kind, call.tokens) == ("experts_add, FP8 experts", 2)
    lines = ((0.5, Speed(1e12, 100e12, 20e-6)), (2, Speed(2e12, 400e12, 40e-6)))
    assert load_lines(dump_lines({call.kind: lines})) == {call.kind: lines}
    figures = FIGURES._replace(ops={call.kind: lines})
    assert figures.speed(call.kind, call.tokens, 5) == lines[1][1]
    assert figures.speed("experts_add, INT4 experts", 2, 2).kernel_s == pytest.approx(10e-6)
    own = FIGURES._replace(ops={"experts_add": lines, "product, FP8": lines[:1]})  # as a CPU's trace names it
    assert own.speed(call.kind, call.tokens, 5) == lines[1][1]
