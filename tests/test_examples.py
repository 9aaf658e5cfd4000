"""Every example runs; and the toy engine's texts depend on neither batch nor memory."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

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
    spec = importlib.util.spec_from_file_location("toy_engine", EXAMPLES / "toy_engine.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
