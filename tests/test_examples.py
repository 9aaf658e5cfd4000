"""Every example runs; and the toy engine's texts depend on neither batch nor memory."""

import subprocess
import sys
from pathlib import Path

import pytest
from module_files import module_at

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_runs(path):
    result = subprocess.run(
        [sys.executable, "-W", "error", path], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.fixture(scope="module")
def toy():
    return module_at(EXAMPLES / "toy_engine.py")


def test_the_toy_engine_yields_the_same_texts_alone_in_a_batch_and_when_preempted(toy):
    # Prompt 0 is alone in the first run, so it keeps its seed in all of them.
    prompts = ["the loop plans the step and the " + end for end in ("pool ", "row ", "device ", "what ")]
    [alone], _, _ = toy.serve(prompts[:1])
    roomy, loop, _ = toy.serve(prompts, num_blocks=200)
    assert loop.stats.preemptions == 0
    tight, loop, pool = toy.serve(prompts, num_blocks=17)
    assert loop.stats.preemptions > 0
    assert pool.stats.hit_tokens > 0
    assert roomy == tight
    assert alone == roomy[0]
    assert pool.num_free == pool.num_total
