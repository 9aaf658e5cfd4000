import dataclasses
import math

import msgspec
import numpy as np
import pytest

from openinfer.sampler import InvalidParams, SamplingParams


@pytest.mark.parametrize(
    ("param", "refused"),
    [
        ("temperature", [-0.1, 2.001, math.nan, math.inf, "1", None, True]),
        ("top_k", [-2, 1.0, 2**31, True, "4"]),
        ("top_p", [0, 0.0, -0.1, 1.01, math.nan, 10**400]),
        ("min_p", [-0.01, 1.01, math.nan]),
        ("frequency_penalty", [-2.01, 2.01, math.nan]),
        ("presence_penalty", [-2.01, 2.01, "0"]),
        ("repetition_penalty", [0, 0.009, 100.5, math.inf]),
        (
            "logit_bias",
            [5, "ab", (5,), ((5,),), ((-1, 0),), ((1.0, 0),), ((1, 100.1),), ((1, 2), (1, 3)), {1: 2.0}],
        ),
        ("logit_bias", [tuple((i, 0) for i in range(301))]),
        ("allowed_token_ids", [(-1,), tuple(range(4097)), "12", 5]),
        ("bad_words_token_ids", [5, "ab", (5,), ((),), ((-1,),), (tuple(range(33)),), ((1,),) * 129]),
        ("seed", [2**63, -(2**63) - 1, 0.5, False]),
        ("min_tokens", [-1, 1.5]),
        ("stop_token_ids", [(-1,), (2**31,), (1.0,), tuple(range(17)), "12", 5]),
        ("ignore_eos", [1, "yes", None]),
        ("logprobs", [-1, 21, 1.0, True]),
    ],
)
def test_values_outside_the_table_are_refused_by_name(param, refused):
    for value in refused:
        with pytest.raises(InvalidParams, match=param) as caught:
            SamplingParams(**{param: value})
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("param", "accepted"),
    [
        ("temperature", [0, 0.0, 2, 2.0]),
        ("top_k", [0, 1, 2**31 - 1]),
        ("top_p", [1e-9, 1]),
        ("min_p", [0, 1]),
        ("frequency_penalty", [-2, 2]),
        ("presence_penalty", [-2, 2]),
        ("repetition_penalty", [0.01, 100]),
        ("logit_bias", [(), tuple((i, -100.0) for i in range(300)), ((2**31 - 1, 100.0),)]),
        ("allowed_token_ids", [(), tuple(range(4096))]),
        ("bad_words_token_ids", [(), ((1,),) * 128, (tuple(range(32)),)]),
        ("seed", [None, 0, -1, 2**63 - 1, -(2**63)]),
        ("min_tokens", [0, 10**6]),
        ("stop_token_ids", [(), tuple(range(16))]),
        ("ignore_eos", [True, False]),
        ("logprobs", [None, 0, 20]),
    ],
)
def test_both_ends_of_each_range_are_allowed(param, accepted):
    for value in accepted:
        assert getattr(SamplingParams(**{param: value}), param) == value


def test_equal_requests_are_equal_and_hash_alike_however_they_were_spelled():
    plain = SamplingParams(temperature=0.5, top_k=0, stop_token_ids=(3, 4), seed=7)
    spelled = SamplingParams(temperature=np.float32(0.5), top_k=-1, stop_token_ids=[3, 4], seed=np.int64(7))
    assert spelled == plain
    assert hash(spelled) == hash(plain)
    assert type(spelled.seed) is int
    assert type(spelled.temperature) is float


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        ({}, False),
        ({"temperature": 0}, True),
        ({"temperature": 9e-6}, True),
        ({"temperature": 1e-5}, False),
        ({"top_k": 1}, True),
        ({"top_k": 2}, False),
    ],
)
def test_is_greedy(params, greedy):
    assert SamplingParams(**params).is_greedy is greedy


def test_forbidden_ids_are_what_would_end_the_sequence_too_early():
    params = SamplingParams(min_tokens=3, stop_token_ids=(5, 6))
    assert params.forbidden_ids(2, [9]) == (5, 6, 9)
    assert params.forbidden_ids(3, [9]) == ()
    assert dataclasses.replace(params, ignore_eos=True).forbidden_ids(0, [9]) == (5, 6)


def test_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().top_k = 3


@pytest.mark.parametrize("codec", [msgspec.json, msgspec.msgpack])
def test_survives_the_wire(codec):
    params = SamplingParams(temperature=0.6, top_k=20, seed=-3, stop_token_ids=(1, 2), logprobs=5)
    assert codec.decode(codec.encode(params), type=SamplingParams) == params


def test_decoding_validates():
    with pytest.raises(msgspec.ValidationError, match="top_p") as caught:
        msgspec.json.decode(b'{"top_p": 0}', type=SamplingParams)
    assert isinstance(caught.value.__cause__, InvalidParams)


def test_what_needs_adjusting_and_the_ids_that_are_named():
    plain = SamplingParams(temperature=0.5, top_k=4, min_tokens=3)
    assert (plain.adjusts_logits, plain.has_penalties, plain.max_token_id) == (False, False, -1)
    for given, penalties, largest in [
        ({"frequency_penalty": -1}, True, -1),
        ({"presence_penalty": 1}, True, -1),
        ({"repetition_penalty": 1.1}, True, -1),
        ({"logit_bias": ((5, 0), (3, 9))}, False, 5),
        ({"allowed_token_ids": (7, 2)}, False, 7),
        ({"bad_words_token_ids": ((1,), (8, 2))}, False, 8),
    ]:
        params = SamplingParams(**given)
        assert (params.adjusts_logits, params.has_penalties, params.max_token_id) == (
            True,
            penalties,
            largest,
        )
    assert SamplingParams(stop_token_ids=(4,)).max_token_id == 4
