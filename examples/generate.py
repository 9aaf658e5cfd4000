"""The Qwen3 engine in your own process, without HTTP, without text: token ids in, token ids out.

A frontend of your own does the same: it submits requests, calls step() and reads columns. The engine runs on the GPU if
there is one. Without a checkpoint directory it takes the tiny checkpoint of the tests.

    python examples/generate.py [MODEL_DIR]
"""

import sys
import time
from pathlib import Path

from openinfer.frontend.contract import TERMINALS, Engine, Finished, Request
from openinfer.recipes.engine.startup import build
from openinfer.recipes.qwen3 import RECIPE
from openinfer.sampler import SamplingParams

TINY = Path(__file__).parents[1] / "tests" / "goldens" / "qwen3-tiny"


def generate(
    engine: Engine, prompts: list[list[int]], sampling: SamplingParams, max_tokens: int
) -> list[list[int]]:
    """Continue every prompt; all of them run in one batch. Raises RuntimeError for one that the engine refuses."""
    for number, prompt in enumerate(prompts):
        engine.submit(
            Request(
                id=number,
                prompt_token_ids=prompt,
                sampling=sampling,
                max_tokens=max_tokens,
                arrival=time.monotonic(),
            )
        )
    outputs: list[list[int]] = [[] for _ in prompts]
    live = len(prompts)
    while live:
        step = engine.step(wait=1.0)
        for owner, token in zip(step.request_ids, step.token_ids, strict=True):
            outputs[owner].append(token)
        for update in step.updates:
            if isinstance(update, TERMINALS):
                live -= 1
                if not isinstance(update, Finished):
                    raise RuntimeError(f"prompt {update.id}: {update}")
    return outputs


def main() -> None:
    model_dir = sys.argv[1] if len(sys.argv) > 1 else str(TINY)
    engine = build(
        RECIPE, model_dir, max_num_seqs=4, max_num_batched_tokens=64, kv_cache_memory_bytes=64 << 20
    ).engine
    try:
        prompts = [[47, 76, 332], [5, 6, 7, 8, 9], [100]]
        greedy = generate(engine, prompts, SamplingParams(temperature=0.0), 12)
        drawn = generate(engine, prompts, SamplingParams(temperature=0.8, seed=1), 12)
        for prompt, best, other in zip(prompts, greedy, drawn, strict=True):
            print(f"{prompt} -> {best}\n    or, at temperature 0.8, {other}")
        assert (
            generate(engine, prompts[:1], SamplingParams(temperature=0.0), 12) == greedy[:1]
        )  # alone or not
    finally:
        engine.close()


if __name__ == "__main__":
    main()
