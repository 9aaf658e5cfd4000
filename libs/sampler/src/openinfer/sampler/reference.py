"""Logits to tokens in numpy: the definition that a device implementation has to reproduce.

For a row of fp32 logits, first adjusted as ``openinfer.sampler.adjust`` says, and with forbidden tokens set to -inf:

 1. Greedy (temperature < 1e-5 or top_k == 1): the largest logit, the lowest id among equals. Nothing
    below applies.
 2. ``scaled = logits / temperature``, correctly rounded; ``peak`` is its maximum.
 3. min_p > 0 keeps ``scaled >= peak + log(min_p)``.
 4. top_k > 0 keeps ``scaled >= `` the k-th largest of what is kept, and so all that tie with it.
 5. top_p < 1 takes the softmax over what is kept and keeps ``scaled >= t``. t is the largest value such that
    the mass of ``scaled >= t`` is at least top_p: at least one token is kept, and all that tie with the last.
 6. Gumbel-max: the largest ``scaled + gumbel(hash_u32(seed, position, id))`` among what is kept, the lowest
    id among equals. That is a draw from the softmax over what is kept.

``position`` is the number of tokens in the sequence before the one that is drawn. A draw is a function of
the row's logits, its parameters, seed and position alone. Masses are summed in float64 here; an fp32
implementation may keep one value more or less where a mass lies within rounding of top_p.

Logprobs are those of the raw logits: before temperature, filters, adjustments and forbidden tokens.
"""

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer.sampler.adjust import adjusted
from openinfer.sampler.errors import InvalidLogits
from openinfer.sampler.noise import fresh_seed, gumbel, hash_u32, seed_words
from openinfer.sampler.params import GREEDY_TEMPERATURE, SamplingParams

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]
Ids = Sequence[Sequence[int]]
"""Tokens of each row."""


@dataclass(frozen=True, slots=True)
class Samples:
    """One token for each of R rows. The arrays are new and belong to the caller.

    Attributes:
        token_ids: i32[R].
        logprobs: f32[R], of the chosen token; NaN in rows that asked for none.
        top_ids: i32[R, N], the most likely tokens, best first, the lowest id first among equals. N is the
            most that any row asked for; what a row did not ask for is -1.
        top_logprobs: f32[R, N], theirs; NaN where top_ids is -1.
    """

    token_ids: I32
    logprobs: F32
    top_ids: I32
    top_logprobs: F32


def sample(
    logits: F32,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    seeds: Sequence[int] | None = None,
    *,
    prompts: Ids | None = None,
    outputs: Ids | None = None,
    forbid: Ids | None = None,
) -> Samples:
    """Draw one token a row.

    Args:
        logits: f32[R, V]; only read. -inf means never.
        params: R of them.
        positions: for each row, the number of tokens in its sequence before the one drawn here.
        seeds: for each row, the int64 seed of its sequence, in place of ``params[i].seed``. Without it a row
            whose params name no seed gets a new one in every call: a fair draw, but not a repeatable one.
        prompts: for each row, the ids of its prompt; needed where a row has a repetition_penalty.
        outputs: for each row, the ids generated so far; needed where a row has penalties or bad words.
        forbid: for each row, ids not to be drawn, such as ``params[i].forbidden_ids(...)``.

    Raises:
        InvalidLogits: some rows cannot be sampled; ``.rows`` says which.
        ValueError: lengths, shapes or dtypes do not fit, ids are not below V, or prompts or outputs are missing.
    """
    if not isinstance(logits, np.ndarray) or logits.ndim != 2 or logits.dtype != np.float32:
        given = (
            f"{logits.dtype}{list(logits.shape)}" if isinstance(logits, np.ndarray) else type(logits).__name__
        )
        raise ValueError(f"logits is {given}: it must be a numpy array float32[rows, vocabulary]")
    for name, values in (("params", params), ("positions", positions), ("seeds", seeds)):
        if values is not None and (not isinstance(values, Sized) or len(values) != len(logits)):
            given = f"{len(values)} items" if isinstance(values, Sized) else repr(values)
            raise ValueError(
                f"{name} has {given}: it must have one for each of the {len(logits)} rows of logits"
            )
    if seeds is None:
        seeds = [fresh_seed() if p.seed is None else p.seed for p in params]
    return _sample(
        logits,
        _adjusted(logits, params, prompts, outputs),
        np.array([p.temperature for p in params], np.float32),
        np.array([p.top_k for p in params], np.int32),
        np.array([p.top_p for p in params], np.float32),
        np.array([p.min_p for p in params], np.float32),
        np.array([seed_words(seed) for seed in seeds], np.uint32).reshape(-1, 2),
        np.array(positions, np.int32),
        np.array([-1 if p.logprobs is None else p.logprobs for p in params], np.int32),
        forbid=None if forbid is None else _padded(forbid),
    )


def sample_arrays(
    logits: F32,
    temperature: F32,
    top_k: I32,
    top_p: F32,
    min_p: F32,
    seed: U32,
    position: I32,
    num_logprobs: I32,
    *,
    forbid: NDArray[np.bool_] | I32 | None = None,
) -> Samples:
    """``sample`` on columns, as a device keeps them.

    Args:
        logits: f32[R, V]; only read.
        temperature: f32[R], below 1e-5 is greedy.
        top_k: i32[R], 1 is greedy, 0 and less keep all.
        top_p: f32[R], 1 and more keep all.
        min_p: f32[R], 0 and less keep all.
        seed: u32[R, 2], the (low, high) words of ``seed_words``.
        position: i32[R], tokens before the one drawn.
        num_logprobs: i32[R], -1 for none, 0 for the chosen token's, n for the n most likely tokens' as well.
        forbid: what must not be drawn: bool[R, V], true where forbidden, or i32[R, n], ids padded with -1.

    Raises:
        InvalidLogits: some rows cannot be sampled; ``.rows`` says which.
        ValueError: shapes or dtypes do not fit, or an id is not below V.
    """
    return _sample(
        logits, logits, temperature, top_k, top_p, min_p, seed, position, num_logprobs, forbid=forbid
    )


def _sample(
    logits: F32, candidates: F32, *columns: NDArray[Any], forbid: NDArray[np.bool_] | I32 | None
) -> Samples:
    """``sample_arrays`` that draws from `candidates`, the adjusted logits."""
    _check_columns(logits, *columns)
    *choice, num_logprobs = columns
    allowed = candidates if forbid is None else without(candidates, forbid)
    token_ids, unsound = choose_tokens(logits, allowed, *choice)
    if unsound.any():
        raise InvalidLogits(np.flatnonzero(unsound).tolist())
    return _with_logprobs(logits, token_ids, num_logprobs)


def _adjusted(logits: F32, params: Sequence[SamplingParams], prompts: Ids | None, outputs: Ids | None) -> F32:
    """The logits with the rows that ask for it adjusted; the logits themselves if none does."""
    rows = [r for r, p in enumerate(params) if p.adjusts_logits]
    if not rows:
        return logits
    candidates = logits.copy()
    for r in rows:
        prompt, output = (None if ids is None else ids[r] for ids in (prompts, outputs))
        candidates[r] = adjusted(logits[r], params[r], prompt, output)
    return candidates


def choose_tokens(
    logits: F32, allowed: F32, temperature: F32, top_k: I32, top_p: F32, min_p: F32, seed: U32, position: I32
) -> tuple[I32, NDArray[np.bool_]]:
    """Draw from `allowed`, which the raw `logits` have become (or are): tokens i32[R], and which rows cannot be
    sampled, bool[R]; their tokens mean nothing."""
    token_ids = allowed.argmax(axis=1).astype(np.int32)
    greedy = (temperature < GREEDY_TEMPERATURE) | (top_k == 1)
    divisor = np.where(greedy, np.float32(1), temperature)
    with np.errstate(over="ignore"):  # an infinite peak is refused; any other may become -inf
        peaks = np.take_along_axis(allowed, token_ids[:, None], axis=1)[:, 0] / divisor
        unsound = ~np.isfinite(peaks)  # argmax stops at a NaN, so a NaN anywhere shows in the peak
        if allowed is not logits:
            unsound |= ~np.isfinite(logits.max(axis=1))
        for r in np.flatnonzero(~(greedy | unsound)):
            scaled = allowed[r] / divisor[r]
            kept = np.flatnonzero(scaled >= _threshold(scaled, peaks[r], top_k[r], top_p[r], min_p[r]))
            bits = hash_u32(seed[r, 0], seed[r, 1], position[r].astype(np.uint32), kept.astype(np.uint32))
            token_ids[r] = kept[(scaled[kept] + gumbel(bits)).argmax()]
    return token_ids, unsound


def _threshold(
    scaled: F32, peak: np.float32, top_k: np.int32, top_p: np.float32, min_p: np.float32
) -> np.float32:
    """The smallest value of ``scaled`` that the filters keep."""
    bound = peak + np.log(min_p) if min_p > 0 else np.float32(-np.inf)
    if 0 < top_k < scaled.size:
        at = scaled.size - top_k
        bound = max(bound, np.partition(scaled, at)[at])
    if top_p < 1:
        kept = np.sort(scaled[scaled >= bound])[::-1]
        mass = np.cumsum(np.exp(kept - peak), dtype=np.float64)
        bound = kept[np.searchsorted(mass, top_p * mass[-1])]
    return bound


def _with_logprobs(logits: F32, token_ids: I32, num_logprobs: I32) -> Samples:
    rows, vocabulary = logits.shape
    width = min(int(num_logprobs.max(initial=0)), vocabulary)
    logprobs = np.full(rows, np.nan, np.float32)
    top_ids = np.full((rows, width), -1, np.int32)
    top_logprobs = np.full((rows, width), np.nan, np.float32)
    for r in np.flatnonzero(num_logprobs >= 0):
        log_sum = log_sum_exp(logits[r])
        logprobs[r] = logits[r, token_ids[r]] - log_sum
        if n := min(int(num_logprobs[r]), vocabulary):
            top_ids[r, :n] = best = most_likely(logits[r], n)
            top_logprobs[r, :n] = logits[r, best] - log_sum
    return Samples(token_ids, logprobs, top_ids, top_logprobs)


def log_sum_exp(row: F32) -> np.float64:
    """log(sum(exp(row))) of f32[V] with a finite maximum."""
    peak = row.max()
    with np.errstate(over="ignore"):  # what lies too far below the peak counts as -inf
        mass = np.exp(row - peak).sum(dtype=np.float64)
    total: np.float64 = peak + np.log(mass)
    return total


def most_likely(row: F32, n: int) -> NDArray[np.intp]:
    """The ids of the n largest of f32[V], n <= V, largest first, the lowest id first among equals."""
    near = np.flatnonzero(row >= np.partition(row, row.size - n)[row.size - n])
    return near[np.argsort(-row[near], kind="stable")][:n]


def without(logits: F32, forbid: NDArray[np.bool_] | I32) -> F32:
    """A copy of the logits with -inf where forbidden."""
    rows, vocabulary = logits.shape
    if forbid.dtype == np.bool_:
        if forbid.shape != logits.shape:
            raise ValueError(f"forbid is bool{list(forbid.shape)}: a mask must be bool[{rows}, {vocabulary}]")
        return np.where(forbid, np.float32(-np.inf), logits)
    if forbid.dtype != np.int32 or forbid.ndim != 2 or len(forbid) != rows:
        raise ValueError(f"forbid is {forbid.dtype}{list(forbid.shape)}: ids must be int32[{rows}, n]")
    if forbid.size and forbid.max() >= vocabulary:
        raise ValueError(f"forbid names token {forbid.max()}: ids must be below {vocabulary}, or -1 for none")
    at, column = np.nonzero(forbid >= 0)
    allowed = logits.copy()
    allowed[at, forbid[at, column]] = -np.inf
    return allowed


def _padded(ids: Ids) -> I32:
    padded = np.full((len(ids), max(map(len, ids), default=0)), -1, np.int32)
    for row, given in zip(padded, ids, strict=True):
        row[: len(given)] = given
    return padded


def _check_columns(logits: F32, *columns: NDArray[Any]) -> None:
    if logits.dtype != np.float32 or logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(
            f"logits is {logits.dtype}{list(logits.shape)}: it must be float32[rows, vocabulary]"
        )
    rows = len(logits)
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position", "num_logprobs")
    kinds = ("float32", "int32", "float32", "float32", "uint32", "int32", "int32")
    for name, kind, column in zip(names, kinds, columns, strict=True):
        shape = (rows, 2) if name == "seed" else (rows,)
        if column.dtype != kind or column.shape != shape:
            raise ValueError(f"{name} is {column.dtype}{list(column.shape)}: it must be {kind}{list(shape)}")
