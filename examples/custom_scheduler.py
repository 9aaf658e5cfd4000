"""A scheduling policy of your own in the stock Qwen3 engine: the shortest prompt first, but no request waits for ever.

The same requests are served first come, first served, and then under the policy. The policy changes when each request
is served, but no token of its answer. A server takes the policy by its place:

    openinfer serve MODEL_DIR --scheduling-policy custom_scheduler:ShortestFirst

    python examples/custom_scheduler.py [MODEL_DIR]
"""

import sys
import time
from collections.abc import Iterable
from pathlib import Path

from openinfer.frontend.contract import TERMINALS, Request, Scheduled
from openinfer.recipes.engine.startup import build
from openinfer.recipes.qwen3 import RECIPE
from openinfer.sampler import SamplingParams
from openinfer.scheduler import Batching, FirstCome, Policy, Seq, View

TINY = Path(__file__).parents[1] / "tests" / "goldens" / "qwen3-tiny"


class ShortestFirst(Batching):
    """Shortest prompt first. A request that has waited for patience_s seconds goes before all others, by arrival.

    The class inherits the queue `waiting`, chunked prefill within max_batched_tokens, and all bookkeeping.
    """

    def __init__(self, max_batched_tokens: int = 2048, patience_s: float = 2.0) -> None:
        super().__init__(max_batched_tokens)
        self.patience_s = patience_s

    def candidates(self, view: View) -> Iterable[Seq]:
        """The sequences to admit next, in that order."""

        def rank(seq: Seq) -> tuple[int, float]:
            if view.now - seq.arrival > self.patience_s or seq.num_preemptions:
                return 0, seq.arrival
            return 1, len(seq.tokens)

        return sorted(self.waiting, key=rank)

    def victim(self, view: View) -> Seq:
        """The sequence to preempt when the cache is full: the one with the least to compute again."""
        *others, oldest = reversed(view.running)  # the oldest always gets on, so everything ends
        return min(others, key=lambda seq: len(seq.tokens), default=oldest)


def serve(model_dir: str, policy: Policy, prompts: list[list[int]]) -> tuple[list[int], dict[int, list[int]]]:
    """Serve all prompts, two at a time. Returns the order in which they were started, and what each got."""
    engine = build(
        RECIPE,
        model_dir,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=64 << 20,
        scheduling_policy=policy,
    ).engine
    started: list[int] = []
    outputs: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    try:
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=0.0, ignore_eos=True)
            engine.submit(
                Request(
                    id=number,
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    max_tokens=6,
                    arrival=time.monotonic(),
                )
            )
        live = len(prompts)
        while live:
            step = engine.step(wait=1.0)
            for owner, token in zip(step.request_ids, step.token_ids, strict=True):
                outputs[owner].append(token)
            started += [update.id for update in step.updates if isinstance(update, Scheduled)]
            live -= sum(isinstance(update, TERMINALS) for update in step.updates)
    finally:
        engine.close()
    return started, outputs


def main() -> None:
    model_dir = sys.argv[1] if len(sys.argv) > 1 else str(TINY)
    lengths = [40, 30, 50, 8, 20, 4]
    prompts = [[(7 * i + length) % 300 + 1 for i in range(length)] for length in lengths]
    in_order, expected = serve(model_dir, FirstCome(64), prompts)
    shortest, outputs = serve(model_dir, ShortestFirst(64, patience_s=60.0), prompts)
    patient, _ = serve(model_dir, ShortestFirst(64, patience_s=0.0), prompts)
    for name, order in (("first come", in_order), ("shortest first", shortest), ("out of patience", patient)):
        print(f"{name:16} prompts of {[lengths[number] for number in order]} tokens")
    assert in_order == patient == [0, 1, 2, 3, 4, 5]
    assert [lengths[number] for number in shortest] == sorted(lengths)
    assert outputs == expected  # on the CPU, to the token


if __name__ == "__main__":
    main()
