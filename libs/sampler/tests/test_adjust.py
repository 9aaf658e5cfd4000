"""The definition of adjustments, case by case; and `sample` with them."""

import numpy as np
import pytest

from openinfer.sampler import InvalidLogits, SamplingParams, sample
from openinfer.sampler.adjust import adjusted, banned_tokens

ROW = np.array([2.0, -1.0, 0.5, 3.0, 0.0, -np.inf], np.float32)
NEVER = -np.inf


@pytest.mark.parametrize(
    ("params", "want"),
    [
        ({}, ROW),
        ({"allowed_token_ids": (1, 4, 4)}, [NEVER, -1, NEVER, NEVER, 0, NEVER]),
        ({"bad_words_token_ids": ((3,), (1, 1, 0), (0, 2), (3, 1, 1, 4))}, [NEVER, -1, 0.5, NEVER, 0, NEVER]),
        ({"logit_bias": ((0, -100), (5, 100), (2, 0.25))}, [-98, -1, 0.75, 3, 0, NEVER]),
        ({"repetition_penalty": 2}, [1, -2, 0.5, 1.5, 0, NEVER]),
        ({"frequency_penalty": 0.5}, [2, -2, 0.5, 3, 0, NEVER]),
        ({"presence_penalty": -1.5}, [2, 0.5, 0.5, 3, 0, NEVER]),
    ],
    ids=str,
)
def test_each_alone(params, want):
    prompt, output = (0, 3, 5), (1, 1)
    before = ROW.copy()
    got = adjusted(ROW, SamplingParams(**params), prompt, output)
    np.testing.assert_array_equal(got, np.array(want, np.float32))
    np.testing.assert_array_equal(ROW, before)


def test_a_bias_comes_before_the_penalties_and_repetition_before_the_others():
    params = SamplingParams(
        logit_bias=((1, 2.0),), repetition_penalty=4, frequency_penalty=0.5, presence_penalty=0.25
    )
    got = adjusted(ROW, params, (), (1, 1, 1))
    assert got[1] == (-1 + 2.0) / 4 - 3 * 0.5 - 0.25


def test_what_is_allowed_can_still_be_bad_and_no_bias_brings_it_back():
    params = SamplingParams(
        allowed_token_ids=(0, 2), bad_words_token_ids=((0,),), logit_bias=((0, 9.0), (3, 9.0))
    )
    assert adjusted(ROW, params, (), ()).tolist() == [NEVER, NEVER, 0.5, NEVER, NEVER, NEVER]


def test_bad_words_look_at_the_output_only_and_at_all_of_it():
    word = (4, 5, 6)
    assert [banned_tokens([word], output) for output in ((), (5,), (4, 5), (1, 4, 5), (4, 5, 1), (5, 4))] == [
        [], [], [6], [6], [], [],
    ]  # fmt: skip


def test_sample_adjusts_the_rows_that_ask_and_reports_raw_logprobs():
    logits = np.tile(ROW[:5], (4, 1))
    greedy = {"temperature": 0, "logprobs": 1}
    params = [
        SamplingParams(**greedy),
        SamplingParams(**greedy, logit_bias=((4, 50.0),)),
        SamplingParams(**greedy, repetition_penalty=10),
        SamplingParams(temperature=2, allowed_token_ids=(1,), seed=1),
    ]
    got = sample(logits, params, [1, 1, 1, 1], prompts=[[3]] * 4, outputs=[[]] * 4)
    assert got.token_ids.tolist() == [3, 4, 0, 1]
    want = ROW[:5].astype(float) - np.log(np.exp(ROW[:5].astype(float)).sum())
    np.testing.assert_allclose(got.logprobs[:3], want[[3, 4, 0]], rtol=1e-6)
    assert got.top_ids[:3, 0].tolist() == [3, 3, 3]


def test_a_row_with_nothing_left_fails_alone():
    params = [SamplingParams(), SamplingParams(allowed_token_ids=(1,), bad_words_token_ids=((1,),))]
    with pytest.raises(InvalidLogits) as error:
        sample(np.zeros((2, 5), np.float32), params, [0, 0], outputs=[[], []])
    assert error.value.rows == (1,)


@pytest.mark.parametrize(
    ("params", "given", "match"),
    [
        ({"repetition_penalty": 2}, {"outputs": [[1]]}, "pass prompts="),
        ({"presence_penalty": 2}, {"prompts": [[1]]}, "pass outputs="),
        ({"bad_words_token_ids": ((1,),)}, {}, "pass outputs="),
        ({"logit_bias": ((5, 1.0),)}, {}, "name token 5: ids must be below 5"),
        ({"allowed_token_ids": (7,)}, {}, "name token 7"),
    ],
    ids=str,
)
def test_what_sample_refuses(params, given, match):
    with pytest.raises(ValueError, match=match):
        sample(np.zeros((1, 5), np.float32), [SamplingParams(**params)], [2], **given)
