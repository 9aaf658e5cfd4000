"""Chosen tokens through the whole engine: its loop, its sample segment, and the feedback of the token on the device.

Before each token a mask allows only the chosen one. So the compared log-probabilities come from decode rows that feed
the token which the device sampled, under the noise of a drawn token.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from openinfer.graph.runner import Payload, Sampling
from openinfer.recipes.engine.engine import Engine
from openinfer.recipes.engine.verdict import Reference
from openinfer.sampler import MAX_LOGPROBS, SamplingParams
from openinfer.sampler.gpu import mask_words
from openinfer.scheduler import FirstCome, Seq, StepLoop, Tokens

Array = np.ndarray[Any, Any]

COMPARED = 8
"""The reference's likeliest tokens at a position that are compared: they are among the MAX_LOGPROBS of a step."""


class ChosenTokens:
    """A constraint that allows one token at a time. The runner sets `ended`."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._at, self.ended, self.problem = tokens, 0, False, ""

    def allowed(self, later: int = 0) -> int:
        """The token that is allowed now, or that many tokens later."""
        return self._tokens[min(self._at + later, len(self._tokens) - 1)]

    def forced(self) -> Sequence[int]:
        """No drafts: decode rows are compared."""
        return ()

    def accept(self, token: int) -> None:
        """Advance to the next token. Raises ValueError for a token that was not allowed."""
        if token != self.allowed():
            raise ValueError(f"token {token} was sampled where only {self.allowed()} was allowed")
        self._at += 1


class ChosenMasks:
    """graph.runner.Masks of ChosenTokens."""

    def __init__(self, vocabulary: int) -> None:
        self._words = mask_words(vocabulary)

    def fill(self, constraints: Sequence[Any]) -> tuple[Array, list[bool]]:
        """A mask of one bit each; no output is complete."""
        return self._only([one.allowed() for one in constraints]), [False] * len(constraints)

    def look_ahead(self, constraint: Any, mask: Array, drafts: Sequence[int]) -> tuple[Array, list[int]]:
        """A mask of one bit after each draft."""
        return self._only([constraint.allowed(1 + n) for n in range(len(drafts))]), list(drafts)

    def _only(self, tokens: Sequence[int]) -> Array:
        masks = np.zeros((len(tokens), self._words), np.uint32)
        for mask, token in zip(masks, tokens, strict=True):
            mask[token // 32] = np.uint32(1) << np.uint32(token % 32)
        return masks.view(np.int32)


def sampled(engine: Engine, sequences: Sequence[Reference]) -> tuple[list[Reference], list[Array]]:
    """The compared positions of all sequences at once, by the loop: the references cut to their COMPARED likeliest
    tokens, and what was found of these (as verdict.read gives it). The engine must be idle."""
    runner, kept = engine.runner, engine.runner.masking.masks
    runner.masking.masks = ChosenMasks(engine.info.vocab_size)
    loop: StepLoop[Sampling, Payload] = StepLoop(
        runner, engine.pool, FirstCome(runner.buckets.max_tokens),
        max_rows=runner.buckets.max_rows, max_model_len=engine.info.max_model_len, max_queued=len(sequences),
    )  # fmt: skip
    found: dict[int, list[Array]] = {}
    for number, sequence in enumerate(sequences):
        found[number] = []
        chosen = [*sequence.tokens[sequence.first + 1 :], 0]  # the last token is not looked at
        params = SamplingParams(temperature=1.0, seed=number, logprobs=MAX_LOGPROBS)
        owner = Sampling(params, number, (), ChosenTokens(chosen))
        prompt = list(sequence.tokens[: sequence.first + 1])
        loop.submit(Seq(number, prompt, len(chosen), salt=os.urandom(16), owner=owner))
    while loop.has_work:
        for event in loop.step(1.0):
            if isinstance(event, Tokens):
                _take(event, found, sequences)
    runner.masking.masks = kept
    ours = np.s_[:, :COMPARED]
    cut = [Reference(s.tokens, s.top_ids[ours], s.bf16[ours], s.fp32[ours]) for s in sequences]
    return cut, [np.stack(rows) for rows in found.values()]


def _take(
    event: Tokens[Sampling, Payload], found: dict[int, list[Array]], sequences: Sequence[Reference]
) -> None:
    payload = event.payload
    if payload.top_ids is None or payload.top_logprobs is None:
        raise TypeError("the step has no log-probabilities of likely tokens")
    for at, seq in event.emitting():
        ids, values = payload.top_ids[0, at].tolist(), payload.top_logprobs[0, at].tolist()
        seq.tokens.append(int(payload.token_ids[0, at]))
        wanted = sequences[seq.id].top_ids[len(found[seq.id]), :COMPARED].tolist()
        known = dict(zip(ids, values, strict=True))
        # A token that is not among the engine's likeliest is at most as likely as the last of these.
        row = [known.get(token, values[-1]) for token in wanted]
        found[seq.id].append(np.array([*row, wanted.index(ids[0]) if ids[0] in wanted else -1]))
