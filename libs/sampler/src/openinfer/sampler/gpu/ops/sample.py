"""sample: the next token of every row that asks for one. greedy: the most likely one."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels import authoring as op
from openinfer.kernels.authoring import Command, Cost, Op, Scratch, T, Target, Workload
from openinfer.sampler.gpu.ops import NO_TOKEN, UNSOUND, Adjustment, Array, Tiles
from openinfer.sampler.gpu.ops.adjustments import AdjustArgs, adjust_row
from openinfer.sampler.gpu.ops.state import ADJUSTMENTS, GREEDY_FIELDS, SAMPLE_FIELDS, expect_state
from openinfer.sampler.gpu.ops.step import STEP, ChoiceArgs, expect_step, sampling_rows
from openinfer.sampler.params import GREEDY_TEMPERATURE
from openinfer.sampler.reference import choose_tokens, log_sum_exp
from openinfer.tensor import Tensor, float32, int32

BINS = 256
"""Bins that the logits of a filtered row are counted in."""

LIST = 4096
"""Logits of a row, near the bounds of its filters, that are looked at one by one."""

SHORT = 256
"""A shorter list takes less time."""

SLACK = 384
"""Logits either side of a guessed bound that go to the list."""

BLOCK = 1024
"""Logits that get noise together where all are looked at, or a whole row is searched."""

_MODULE = "openinfer.sampler.gpu.device.sample"
_SEARCH = "openinfer.sampler.gpu.device.search"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Args(AdjustArgs[T], Generic[T]):
    """Draw tokens int32 [R] from logits float32 [R, V], with the meaning of
    `openinfer.sampler.sample_arrays`.

    Row r of the step is the sequence in slot slots[r] and has the tokens q_starts[r] to q_starts[r+1] (int32
    [R] and [R + 1]). It samples if emits[r] (int32 [R]) and alive[slot] are not 0; its position is
    seq_lens[slot] plus its tokens in the step. By slot: seq_lens, alive, top_ks, min_lens int32 [S];
    temperatures, top_ps, min_ps float32 [S]; seeds int32 [S, 2], the bits of the two uint32 words of
    `seed_words`; stop_ids int32 [S, W], -1 = none. The ids in stop_ids[slot] are not drawn while the position
    is below min_lens[slot].

    The bits of adjusts[slot] (int32 [S], `Adjustment`) say which other changes of `openinfer.sampler.adjust` the
    row gets; fields of a bit that is not set are not read. ALLOWED: the bits of allowed_masks int32
    [S, (V + 31) // 32], lowest first. BAD_WORDS: bad_words int32 [S, N, L], each word at the end of its L ids, -1
    before it, all -1 = none; recent_tokens int32 [S, L]: the token at index i of the sequence, if it is one of the
    output, stands at i % L. BIAS: bias_ids int32 [S, B], -1 = none, no id twice, and biases
    float32 [S, B]. PENALTIES: penalties float32 [S, 3] (repetition, frequency, presence); prompt_masks int32
    [S, (V + 31) // 32]; output_counts int32 [S, (V + 1) // 2], two 16-bit counts a word, the lower first. A row
    at position prompt_lens[slot] (int32 [S]) has no output: its counts are set to zero here, whatever they were.
    `values` makes what a sequence that joins has to write; `advance` keeps output_counts and
    recent_tokens.

    logprobs float32 [R] are the chosen tokens' under the raw logits. A row that does not sample gets token -1
    and logprob 0; one that `sample_arrays` would refuse (NaN, +inf, nothing left to draw) gets token -2 and
    logprob 0.
    """

    temperatures: T
    top_ks: T
    top_ps: T
    min_ps: T
    seeds: T


def _check(a: _Args[Tensor]) -> None:
    rows, size = expect_step(a)
    op.expect("logits", a.logits, (rows, -1), float32)
    expect_state(op.tensors(a, *SAMPLE_FIELDS), size, a.logits.shape[1])
    op.expect("biases", a.biases, a.bias_ids.shape, float32)
    op.expect("recent_tokens", a.recent_tokens, (size, a.bad_words.shape[2]), int32)


def _reference(a: _Args[Array]) -> None:
    a.tokens[:], a.logprobs[:] = NO_TOKEN, 0
    found = sampling_rows(a)
    rows, slots, raw, allowed = found.rows, found.slots, found.raw, found.allowed
    adjusts = a.adjusts[slots]
    if (adjusts != 0).any():
        allowed = allowed.copy() if allowed is raw else allowed
        for i in np.flatnonzero(adjusts):
            adjust_row(allowed[i], Adjustment(int(adjusts[i])), found.positions[i], a, slots[i])
    filters = a.temperatures[slots], a.top_ks[slots], a.top_ps[slots], a.min_ps[slots]
    chosen, unsound = choose_tokens(raw, allowed, *filters, a.seeds[slots].view(np.uint32), found.positions)
    a.tokens[rows] = np.where(unsound, UNSOUND, chosen)
    for i in np.flatnonzero(~unsound):
        a.logprobs[rows[i]] = raw[i, chosen[i]] - log_sum_exp(raw[i])


def _launches(target: Target, a: _Args[Tensor]) -> Iterator[Command]:
    rows, tiles = a.logits.shape[0], Tiles.of(a.logits.shape[1])
    chosen, raw = op.tensors(a, "tokens", "logprobs"), tiles.found(rows, float32, "tops", "sums")
    best = tiles.found(rows, float32, "bests") | tiles.found(rows, int32, "best_ids")
    peaks, masses = tiles.found(rows, float32, "peaks"), tiles.found(rows, float32, "masses")
    floors, below = tiles.found(rows, float32, "floors"), tiles.found(rows, float32, "below")
    bins = {"bins": Scratch((rows, BINS), int32)}
    arrived, bounds = {"arrived": Scratch((rows,), int32)}, {"bounds": Scratch((rows, 4), float32)}
    above = tiles.found(rows, int32, "counts") | tiles.found(rows, float32, "k_masses", "p_masses")
    listed = {"listed": Scratch((rows,), int32), "list_logits": Scratch((rows, LIST), float32)}
    listed["list_ids"] = Scratch((rows, LIST), int32)
    adjusted = {"adjusted": Scratch(a.logits.shape, float32)}
    bias_width, (_, words, word_length) = a.bias_ids.shape[1], a.bad_words.shape
    adjustments: dict[str, op.Arg] = {**op.tensors(a, *(name for name in ADJUSTMENTS if name != "adjusts"))}
    adjustments |= {"mask_width": a.prompt_masks.shape[1], "count_width": a.output_counts.shape[1]}
    adjustments |= {"bias_width": bias_width, "words": words, "word_length": word_length}
    filters = (name for name in SAMPLE_FIELDS if name == "adjusts" or name not in ADJUSTMENTS)
    step: dict[str, op.Arg] = {**op.tensors(a, "logits", *STEP, *filters)}
    step |= {"vocabulary": op.aligned(tiles.vocabulary), "stop_width": a.stop_ids.shape[1]}
    step["parts"] = tiles.parts
    grid, greedy = (rows, tiles.parts), {"GREEDY": GREEDY_TEMPERATURE}
    parts = {"PARTS": op.power_of_two(tiles.parts)}
    cut = {**greedy, "CHUNK": tiles.chunk}
    counters = {**bins, **arrived, "listed": listed["listed"]}
    args = {**raw, **peaks, **masses, **best, **floors, **counters, **adjusted, **step, **adjustments}
    constants = {**cut, "BINS": BINS, "BIASES": op.power_of_two(bias_width), "WORDS": op.power_of_two(words)}
    constants |= {str(one.name): int(one) for one in Adjustment}
    yield op.launch(_MODULE, "scan", grid, args, constants, num_warps=8)
    args = {**bounds, **bins, **below, **arrived, **peaks, **masses, **floors, **adjusted, **step}
    constants = {**cut, **parts, "BINS": BINS, "SLACK": SLACK}
    yield op.launch(_SEARCH, "spread", grid, args, constants, num_warps=8)
    args = {**above, **best, **listed, **bounds, **peaks, **adjusted, **step}
    constants = {**cut, **parts, "LIST": LIST, "FEW": LIST // (4 * tiles.parts)}
    constants["BLOCK"] = min(BLOCK, tiles.chunk)
    yield op.launch(_SEARCH, "sift", grid, args, constants, num_warps=8)
    args = {**chosen, **raw, **peaks, **masses, **best, **bounds, **above, **listed, **adjusted, **step}
    constants = {**greedy, **parts, "LIST": LIST, "SHORT": min(SHORT, LIST), "BLOCK": BLOCK}
    yield op.launch(_MODULE, "draw", (rows,), args, constants, num_warps=8)


def _cost(workload: Workload, a: _Args[Tensor]) -> Cost:
    vocabulary = a.logits.shape[1]
    return Cost(workload.rows * (vocabulary * a.logits.itemsize + 8), workload.rows * 4 * vocabulary)


sample = Op("sample", _Args[Tensor], _check, _reference, _launches, _cost)


_GREEDY_MODULE = "openinfer.sampler.gpu.device.greedy"


@dataclass(frozen=True, kw_only=True, slots=True)
class _GreedyArgs(ChoiceArgs[T], Generic[T]):
    """The tokens of `sample` for rows that are greedy and adjust nothing, whatever their other fields by slot say.

    Arguments are those of `sample`; of the state by slot there are min_lens and stop_ids. logprobs float32 [R] become
    NaN: no row has one.
    """


def _greedy_check(a: _GreedyArgs[Tensor]) -> None:
    rows, size = expect_step(a)
    op.expect("logits", a.logits, (rows, -1), float32)
    expect_state(op.tensors(a, *GREEDY_FIELDS), size)


def _greedy_reference(a: _GreedyArgs[Array]) -> None:
    a.tokens[:], a.logprobs[:] = NO_TOKEN, np.nan
    found = sampling_rows(a)
    chosen = found.allowed.argmax(axis=1)
    peak = np.take_along_axis(found.allowed, chosen[:, None], 1)[:, 0]
    sound = np.isfinite(found.raw.max(axis=1)) & np.isfinite(peak)  # a maximum of NaN is NaN
    a.tokens[found.rows] = np.where(sound, chosen, UNSOUND)


def _greedy_launches(target: Target, a: _GreedyArgs[Tensor]) -> Iterator[Command]:
    rows, tiles = a.logits.shape[0], Tiles.of(a.logits.shape[1])
    found = tiles.found(rows, float32, "tops", "bests") | tiles.found(rows, int32, "best_ids")
    chosen, marks = op.tensors(a, "tokens", "logprobs"), op.tensors(a, "slots", "alive", "emits")
    args: dict[str, op.Arg] = {**found, **op.tensors(a, "logits", *STEP, *GREEDY_FIELDS)}
    args |= {"vocabulary": op.aligned(tiles.vocabulary), "stop_width": a.stop_ids.shape[1]}
    args["parts"] = tiles.parts
    grid = (rows, tiles.parts)
    yield op.launch(_GREEDY_MODULE, "scan_greedy", grid, args, {"CHUNK": tiles.chunk})
    args = {**chosen, **found, **marks, "parts": tiles.parts}
    constants = {"NO_TOKEN": NO_TOKEN, "UNSOUND": UNSOUND, "PARTS": op.power_of_two(tiles.parts)}
    yield op.launch(_GREEDY_MODULE, "take_greedy", (rows,), args, constants, num_warps=1)


def _greedy_cost(workload: Workload, a: _GreedyArgs[Tensor]) -> Cost:
    vocabulary = a.logits.shape[1]
    return Cost(workload.rows * (vocabulary * a.logits.itemsize + 8), workload.rows * vocabulary)


greedy = Op("greedy", _GreedyArgs[Tensor], _greedy_check, _greedy_reference, _greedy_launches, _greedy_cost)
