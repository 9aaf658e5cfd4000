"""A prediction is the sum of what its calls cost, for every workload."""

import pytest

from openinfer.kernels import H200, NullPack, Prediction, Speed, Workload, attend, embed, norm_linear
from openinfer.tensor import Arena, Device, bfloat16, int32

SPEED = Speed(4e12, 500e12, 5e-6)


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
    counted = [
        (call, times) for call, times in zip(calls(Arena(Device("null"), None)), (1, 36, 24, 12), strict=True)
    ]
    workload = Workload(256, 4, kv_tokens, qk_pairs)
    expected = sum(
        times
        * (call.cost(workload).floor_s(SPEED.bytes_per_s, SPEED.flops_per_s) + len(call.commands) * 5e-6)
        for call, times in counted
    )
    prediction = Prediction.of(counted, 256, 4, SPEED)
    assert prediction.seconds(kv_tokens, qk_pairs) == pytest.approx(expected, rel=1e-6)
    assert len(prediction.varying) == 2  # attention alone looks at the cache
    slower = Prediction.of(counted, 256, 4, Speed(2e12, 250e12, 10e-6))
    assert slower.seconds(kv_tokens, qk_pairs) == pytest.approx(2 * expected, rel=1e-6)
