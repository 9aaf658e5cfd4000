"""Drafts: the op that accepts them, and a step that verifies them beside steps of one token."""

import itertools

import numpy as np
import pytest

from openinfer.kernels import ContractError, CpuPack
from openinfer.sampler import SamplingParams
from openinfer.sampler.gpu import RowStatus, SampleBuffers, accept, fields, sample_rows, values, verify_rows
from openinfer.tensor import Arena, Device, Tensor

WIDTH, VOCABULARY = 8, 40

# alive, sampled, drafts of the row, whether the draft is the token, accepted before
CASES = list(itertools.product((0, 1), (0, 1), (0, 1, 2, 3), (False, True), (0, 1)))


def arguments(place):
    """All cases in one step, in shuffled slots, with padding rows after them."""
    rng = np.random.default_rng(place)
    rows, slots = len(CASES) + 3, len(CASES) + 1
    order = rng.permutation(len(CASES)) + 1
    args = {name: np.zeros(slots, np.int32) for name in ("alive", "accepted")}
    args |= {name: np.zeros(rows, np.int32) for name in ("slots", "emits", "num_drafts")}
    args |= {"result": rng.integers(0, 5, (rows, 3)).astype(np.int32)}
    args |= {"follows": np.full(rows, -9, np.int32), "starts": np.full(rows + 1, -9, np.int32)}
    args |= {"seq_lens": rng.integers(1, 99, slots).astype(np.int32)}
    args |= {"last_tokens": rng.integers(0, 9, slots).astype(np.int32)}
    args |= {"drafts": np.full((slots, WIDTH), -1, np.int32), "place": place}
    args["slots"][: len(CASES)] = order
    args["emits"][len(CASES) :] = 1  # padding rows may sample
    for row, (slot, (alive, sampled, drafts, right, before)) in enumerate(zip(order, CASES, strict=True)):
        args["alive"][slot], args["emits"][row], args["num_drafts"][row] = alive, sampled, drafts
        args["accepted"][slot] = before
        args["result"][row, 1] = RowStatus.STOP if before else args["result"][row, 1]
        if right:
            args["drafts"][slot, args["seq_lens"][slot] % WIDTH] = args["last_tokens"][slot]
    return args


@pytest.mark.parametrize("run", ["run_cpu", "run_interpreter"])
@pytest.mark.parametrize("place", [1, 2, 3])
def test_every_combination(request, run, place):
    args = arguments(place)
    got = request.getfixturevalue(run)(accept, **args)
    wanted = [alive and sampled and drafts >= place and right for alive, sampled, drafts, right, _ in CASES]
    assert got["follows"].tolist() == [*map(int, wanted), 0, 0, 0]
    assert got["starts"].tolist() == [0, *np.cumsum(got["follows"])]
    before = [case[4] if place > 1 else 0 for case in CASES]
    ends = [sampled and drafts >= place and right for _, sampled, drafts, right, _ in CASES]
    for row, drafted in enumerate(ends):
        status, (_, sampled, drafts, right, _) = args["result"][row, 1], CASES[row]
        if drafted and status == RowStatus.STOP:
            status = RowStatus.DRAFTED_STOP
        if status == RowStatus.RUNNING and sampled and drafts >= place and not right:  # there it is -1
            status = RowStatus.UNTRIED
        assert got["result"][row].tolist() == [args["result"][row, 0], status, args["result"][row, 2]]
    found = set(got["result"][:, 1].tolist())
    assert RowStatus.DRAFTED_STOP in found
    assert place > 2 or RowStatus.UNTRIED in found
    accepted = got["accepted"][args["slots"][: len(CASES)]]
    assert accepted.tolist() == [old + new for old, new in zip(before, wanted, strict=True)]
    for name in ("slots", "emits", "num_drafts", "drafts", "seq_lens", "last_tokens", "alive"):
        np.testing.assert_array_equal(got[name], args[name], err_msg=name)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"place": 0}, "place is 0"), ({"drafts": np.zeros((65, 6), np.int32)}, "6 columns")],
)
def test_the_contract_refuses(run_cpu, change, words):
    with pytest.raises(ContractError, match=words):
        run_cpu(accept, **{**arguments(1), **change})


PARAMS = [
    SamplingParams(temperature=0.9, seed=5, frequency_penalty=0.8, repetition_penalty=1.2, logprobs=2),
    SamplingParams(temperature=0, presence_penalty=1.5, min_tokens=3, logprobs=0),
    SamplingParams(temperature=1.0, seed=8, top_p=0.8, bad_words_token_ids=((3, 4), (3, 5)), logprobs=3),
    SamplingParams(temperature=1.1, seed=2, top_k=7, allowed_token_ids=(3, 4, 5, 6)),
]
DEPTH = 3


def start(max_len):
    """The batch of four sequences that have decoded two tokens, each in a slot of its own."""
    arrays = {f.name: np.zeros((len(PARAMS) + 1, *f.shape), f.dtype) for f in fields(VOCABULARY)}
    slots = np.array([3, 1, 4, 2], np.int32)
    for slot, params in zip(slots, PARAMS, strict=True):
        written = values(
            params, seed=params.seed or 0, stop_ids=(9,), prompt=[1, 2, 3], output=[4, 3], max_len=max_len,
            vocabulary=VOCABULARY,
        )  # fmt: skip
        for name, value in written.items():
            arrays[name][slot] = value
    rows = len(slots)
    arrays |= {"alive": (np.arange(rows + 1) > 0).astype(np.int32), "slots": slots}
    arrays |= {"seq_lens": np.full(rows + 1, 4, np.int32), "last_tokens": np.full(rows + 1, 3, np.int32)}
    arrays |= {"emits": np.ones(rows, np.int32), "q_starts": np.arange(rows + 1, dtype=np.int32)}
    arrays |= {"accepted": np.full(rows + 1, 7, np.int32), "sure_starts": arrays["q_starts"].copy()}
    arrays |= {f"allowed_masks_{place}": arrays["allowed_masks"] for place in range(1, DEPTH + 1)}
    arrays |= {"num_drafts": np.zeros(rows, np.int32), "drafts": np.zeros((rows + 1, WIDTH), np.int32)}
    return arrays


def tensors(arrays):
    return {name: Tensor.from_numpy(array) for name, array in arrays.items()}


def one_by_one(logits, max_len):
    """Steps of one token: the state after each, and its results along the rows."""
    arrays, found = start(max_len), []
    for place in range(DEPTH + 1):
        buffers = SampleBuffers.allocate(Arena(Device("cpu"), 1 << 20), 4, 4, VOCABULARY)
        buffers.logits.numpy()[:] = logits[place]
        sample_rows(CpuPack(), tensors(arrays), buffers, 4)
        found.append((buffers.result.numpy().copy(), buffers.top_ids.numpy().copy()))
    return arrays, found


@pytest.mark.parametrize("max_len", [6, 8, 50])
@pytest.mark.parametrize("seed", range(6))
def test_verified_drafts_give_what_steps_of_one_token_give(seed, max_len):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (DEPTH + 1, 4, VOCABULARY)).astype(np.float32)
    logits[:, :, 9] -= 1  # the stop id comes at times
    _, found = one_by_one(logits, max_len)
    arrays = start(max_len)
    arrays["num_drafts"][:] = [3, 2, 3, 0]
    right = rng.random((4, DEPTH)) < 0.8
    for row, slot in enumerate(arrays["slots"]):
        for place in range(DEPTH):
            token = found[place][0][row, 0]
            arrays["drafts"][slot, (5 + place) % WIDTH] = (
                token if right[row, place] else (token + 1) % VOCABULARY
            )
    buffers = SampleBuffers.allocate(Arena(Device("cpu"), 1 << 20), 4, 4, VOCABULARY, DEPTH)
    buffers.logits.numpy()[:] = logits.reshape(-1, VOCABULARY)
    verify_rows(CpuPack(), tensors(arrays), buffers, 4, DEPTH)
    result = buffers.result.numpy().reshape(DEPTH + 1, 4, 3)
    tops = buffers.top_ids.numpy().reshape(DEPTH + 1, 4, -1)
    for row, slot in enumerate(arrays["slots"]):
        come = 0  # positions that the row samples
        while True:
            wanted, wanted_tops = (part[row].tolist() for part in found[come])
            drafted = come < arrays["num_drafts"][row] and right[row, come]
            if wanted[1] == RowStatus.STOP and drafted:
                wanted[1] = RowStatus.DRAFTED_STOP
            assert result[come, row].tolist() == wanted
            assert tops[come, row].tolist() == wanted_tops
            running = wanted[1] == RowStatus.RUNNING
            if not (running and drafted):
                break
            come += 1
        assert (result[come + 1 :, row, 1] == RowStatus.IDLE).all()
        assert arrays["accepted"][slot] == come
        assert arrays["seq_lens"][slot] == 5 + come
        assert arrays["alive"][slot] == running
        assert arrays["last_tokens"][slot] == wanted[0]


def test_the_state_after_accepted_drafts_is_that_of_steps_of_one_token():
    logits = np.random.default_rng(1).normal(0, 2, (DEPTH + 1, 4, VOCABULARY)).astype(np.float32)
    wanted, found = one_by_one(logits, 50)
    arrays = start(50)
    arrays["num_drafts"][:] = DEPTH
    for row, slot in enumerate(arrays["slots"]):
        for place in range(DEPTH):
            arrays["drafts"][slot, (5 + place) % WIDTH] = found[place][0][row, 0]
    buffers = SampleBuffers.allocate(Arena(Device("cpu"), 1 << 20), 4, 4, VOCABULARY, DEPTH)
    buffers.logits.numpy()[:] = logits.reshape(-1, VOCABULARY)
    verify_rows(CpuPack(), tensors(arrays), buffers, 4, DEPTH)
    for name in ("seq_lens", "last_tokens", "alive", "output_counts", "recent_tokens"):
        np.testing.assert_array_equal(arrays[name], wanted[name], err_msg=name)


def test_rows_that_are_all_greedy_get_the_tokens_of_the_whole_segment():
    logits = np.random.default_rng(2).normal(0, 2, (DEPTH + 1, 4, VOCABULARY)).astype(np.float32)
    best, found = logits.argmax(-1), []
    for all_greedy in (False, True):
        arrays = start(50)
        arrays["temperatures"][:] = arrays["adjusts"][:] = 0
        arrays["num_drafts"][:] = [3, 2, 1, 0]
        for row, slot in enumerate(arrays["slots"]):
            arrays["drafts"][slot, (5 + np.arange(DEPTH)) % WIDTH] = best[:DEPTH, row]
        buffers = SampleBuffers.allocate(Arena(Device("cpu"), 1 << 20), 4, 4, VOCABULARY, DEPTH)
        buffers.logits.numpy()[:] = logits.reshape(-1, VOCABULARY)
        verify_rows(CpuPack(), tensors(arrays), buffers, 4, DEPTH, all_greedy=all_greedy)
        state = [arrays[name] for name in ("accepted", "seq_lens", "last_tokens", "alive")]
        found.append([buffers.result.numpy()[:, :2].copy(), *state])
    assert np.isnan(buffers.logprobs.numpy()).all()
    assert found[0][1][1:].sum() >= 3
    for wanted, got in zip(*found, strict=True):
        np.testing.assert_array_equal(got, wanted)
