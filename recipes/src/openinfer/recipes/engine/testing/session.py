"""Session: an engine driven by hand, and its outputs for each request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from openinfer.frontend.contract import TERMINALS, Engine, Request, StepOutputs, TokenLogprobs
from openinfer.sampler import SamplingParams


@dataclass(frozen=True)
class Golden:
    """The results of a published implementation in float32 for one prompt.

    greedy: its greedy tokens. logits: by position of the prompt, the logits float32 [V] of the token after it.
    """

    prompt: Sequence[int]
    greedy: Sequence[int]
    logits: Mapping[int, np.ndarray[Any, Any]] = field(default_factory=dict)

    def logprobs(self, position: int) -> np.ndarray[Any, Any]:
        """Log-probabilities float64 [V] of the token after a position."""
        wide = self.logits[position].astype(np.float64)
        wide -= wide.max()
        found: np.ndarray[Any, Any] = wide - np.log(np.exp(wide).sum())
        return found


@dataclass
class Outcome:
    """All outputs of an engine for one request."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    terminals: list[Any]
    cached: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class Session:
    """Drives an engine by hand and keeps its outputs, by request.

    Raises AssertionError where the engine breaks its contract: two terminals, or anything after a terminal.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outcomes: dict[int, Outcome] = {}

    def submit(self, prompt: Sequence[int], max_tokens: int, **asked: Any) -> int:
        """Queue a request, greedy unless it asks for something else. asked: fields of the request, and of its sampling
        parameters. Its id."""
        request_id = len(self.outcomes)
        own = {name: asked.pop(name) for name in Request.__struct_fields__ if name in asked}
        self.outcomes[request_id] = Outcome([], [], [])
        own |= {"id": request_id, "prompt_token_ids": list(prompt), "max_tokens": max_tokens}
        sampling = SamplingParams(**{"temperature": 0.0, **asked})
        self.engine.submit(Request(sampling=sampling, arrival=0.0, **own))
        return request_id

    def step(self, wait_s: float = 0.0) -> StepOutputs:
        outputs = self.engine.step(wait_s)
        logprobs = outputs.logprobs or [None] * len(outputs.token_ids)
        for scored in outputs.prompt_logprobs:
            outcome = self.outcomes[scored.id]
            ensure(not outcome.terminals, "a prompt's log-probabilities after the terminal")
            ensure(not outcome.tokens, "a prompt's log-probabilities after the first token")
            outcome.prompt_logprobs += scored.logprobs
        for owner, token, logprob in zip(outputs.request_ids, outputs.token_ids, logprobs, strict=True):
            ensure(not self.outcomes[owner].terminals, "a token after the terminal")
            self.outcomes[owner].tokens.append(token)
            self.outcomes[owner].logprobs.append(logprob)
        for update in outputs.updates:
            if isinstance(update, TERMINALS):
                ensure(not self.outcomes[update.id].terminals, "two terminals of one request")
                self.outcomes[update.id].terminals.append(update)
            else:
                self.outcomes[update.id].cached = update.cached_tokens
        return outputs

    @property
    def open(self) -> list[int]:
        """Requests without a terminal."""
        return [i for i, outcome in self.outcomes.items() if not outcome.terminals]

    def finish(self, max_steps: int = 20000) -> None:
        """Step until every request has ended, and once more."""
        for _ in range(max_steps):
            if not self.open:
                self.step()  # a step that is still in flight must give no output for an ended request
                return
            self.step(0.1)  # a GPU may be asked thousands of times before a long step ends
        raise AssertionError(f"requests {self.open} did not end within {max_steps} steps")

    def outcomes_of(self, asked: Sequence[tuple[Sequence[int], int, Mapping[str, Any]]]) -> list[Outcome]:
        """Run requests, each (prompt, max_tokens, sampling), together to their ends."""
        ids = [self.submit(prompt, max_tokens, **sampling) for prompt, max_tokens, sampling in asked]
        self.finish()
        return [self.outcomes[one] for one in ids]


def ensure(condition: bool, broken: str) -> None:
    """Raise AssertionError with the rule that is broken."""
    if not condition:
        raise AssertionError(broken)
