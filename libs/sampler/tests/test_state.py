"""The table of fields by slot, what a sequence writes there, and the end of a step."""

import numpy as np
import pytest

from openinfer.kernels import ContractError, CpuPack
from openinfer.sampler import InvalidParams, SamplingParams, sample, seed_words
from openinfer.sampler.gpu import (
    ADVANCE_FIELDS,
    MAX_STOP_IDS,
    SAMPLE_FIELDS,
    Adjustment,
    RowStatus,
    SampleBuffers,
    fields,
    sample_rows,
    score_tokens,
    values,
)
from openinfer.tensor import Arena, Device, Tensor

VOCABULARY, SLOTS = 70, 4
PARAMS = [
    SamplingParams(temperature=0.9, seed=5, top_k=20, repetition_penalty=1.3, logprobs=2),
    SamplingParams(temperature=0, logit_bias=((7, 9.0),), min_tokens=4, logprobs=0),
    SamplingParams(
        seed=8, top_p=0.8, min_p=0.01, bad_words_token_ids=((3, 4),), allowed_token_ids=(3, 4, 5, 6)
    ),
]
PROMPTS = [[1, 2, 3], [4, 5], [6, 3]]


def state_of(params, **changes):
    settings = {"seed": 5, "stop_ids": (9,), "prompt": [1, 2], "output": [], "max_len": 50, **changes}
    return values(params, vocabulary=VOCABULARY, **settings)


def batch():
    """The arrays of three sequences in slots 3, 2, 1, each with a token in the step; and the tensors on them."""
    arrays = {f.name: np.zeros((SLOTS, *f.shape), f.dtype) for f in fields(VOCABULARY)}
    lens = np.zeros(SLOTS, np.int32)
    for row, (params, prompt) in enumerate(zip(PARAMS, PROMPTS, strict=True)):
        slot, seed = SLOTS - 1 - row, params.seed or 0
        lens[slot] = len(prompt) - 1
        written = state_of(params, seed=seed, prompt=prompt, max_len=len(prompt) + 1 if row == 0 else 50)
        for name, value in written.items():
            arrays[name][slot] = value
    arrays |= {"alive": np.array([0, 1, 1, 1], np.int32), "seq_lens": lens}
    arrays |= {"last_tokens": np.zeros(SLOTS, np.int32), "slots": np.array([3, 2, 1], np.int32)}
    arrays |= {"q_starts": np.arange(4, dtype=np.int32), "emits": np.ones(3, np.int32)}
    return arrays, {name: Tensor.from_numpy(array) for name, array in arrays.items()}


def buffers_for(rows, scored=3):
    return SampleBuffers.allocate(Arena(Device("cpu"), 1 << 20), rows, scored, VOCABULARY)


def test_every_field_is_written_for_some_request_and_no_other_name_is():
    everything = SamplingParams(
        logit_bias=((1, 2.0),), allowed_token_ids=(1,), bad_words_token_ids=((1,),), repetition_penalty=2
    )
    assert state_of(everything, output=[1]).keys() == {field.name for field in fields(VOCABULARY)}


def test_what_a_plain_request_writes_fits_the_fields():
    found = state_of(SamplingParams(temperature=0.5, top_k=3, logprobs=2))
    shapes = {field.name: field.shape for field in fields(VOCABULARY)}
    for name, value in found.items():
        assert np.shape(value) == shapes[name], name
    assert found["temperatures"] == 0.5
    assert found["adjusts"] == 0
    assert found["stop_ids"].tolist() == [9] + [-1] * (MAX_STOP_IDS - 1)
    assert found["seeds"].view(np.uint32).tolist() == list(seed_words(5))
    assert state_of(SamplingParams(top_k=1))["temperatures"] == 0.0


def test_a_mask_for_each_token_is_left_to_whoever_writes_it():
    found = state_of(SamplingParams(allowed_token_ids=(1, 2)), masked=True)
    assert found["adjusts"] == Adjustment.ALLOWED
    assert "allowed_masks" not in found


def test_too_many_stop_ids_are_refused():
    with pytest.raises(InvalidParams, match="stop_token_ids"):
        state_of(SamplingParams(), stop_ids=range(MAX_STOP_IDS + 1))


def test_a_step_gives_what_the_definition_gives():
    rng = np.random.default_rng(3)
    arrays, rows = batch()
    buffers = buffers_for(5)
    logits = rng.normal(0, 3, (3, VOCABULARY)).astype(np.float32)
    logits[:, 9] = -20  # the stop id
    buffers.logits.numpy()[:3] = logits
    sample_rows(CpuPack(), rows, buffers, 3)
    for row, (params, prompt) in enumerate(zip(PARAMS, PROMPTS, strict=True)):
        seed = np.array([params.seed or 0])
        expected = sample(
            logits[row : row + 1], [params], [len(prompt)], seeds=seed, prompts=[prompt], outputs=[[]],
            forbid=[[9] if params.min_tokens else []],
        )  # fmt: skip
        assert buffers.tokens.numpy()[row] == expected.token_ids[0]
        logprob = logits[row, expected.token_ids[0]] - np.log(np.exp(logits[row]).sum())
        assert buffers.logprobs.numpy()[row] == pytest.approx(logprob, abs=1e-5)
    assert [RowStatus(s) for s in buffers.result.numpy()[:3, 1]] == [RowStatus.LENGTH] + [
        RowStatus.RUNNING
    ] * 2
    assert arrays["seq_lens"].tolist() == [0, 2, 2, 3]
    assert (buffers.top_ids.numpy()[:3, :3] >= 0).tolist() == [[True, True, False], [False] * 3, [False] * 3]


def test_prompt_tokens_are_scored_with_their_alternatives():
    rng = np.random.default_rng(3)
    buffers = buffers_for(2, scored=4)
    logits = rng.normal(0, 3, (2, VOCABULARY)).astype(np.float32)
    buffers.logits.numpy()[:] = logits
    asked = {"score_targets": [0, 0, 7, -1], "score_tops": [0, 0, 2, 0], "score_rows": [0, 1]}
    rows = {name: Tensor.from_numpy(np.array(x, np.int32)) for name, x in asked.items()}
    score_tokens(CpuPack(), rows, buffers, 2)
    expected = logits[0] - np.log(np.exp(logits[0]).sum())
    assert buffers.score_logprobs.numpy()[2:].tolist() == pytest.approx([expected[7], 0.0], abs=1e-5)
    assert buffers.score_top_ids.numpy()[2, :2].tolist() == np.argsort(-logits[0])[:2].tolist()


@pytest.mark.parametrize("names", [SAMPLE_FIELDS, ADVANCE_FIELDS])
def test_state_that_is_missing_or_of_another_shape_is_refused(names):
    _, rows = batch()
    for name in names:
        with pytest.raises(ContractError, match=name):
            sample_rows(CpuPack(), {**rows, name: Tensor.from_numpy(np.zeros(9, np.int8))}, buffers_for(3), 3)
