"""DeepSeek-V4's accuracy gate, on the CPU: every path passes against the goldens, every control turns it red."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from openinfer.recipes.deepseek_v4 import gate
from openinfer.recipes.deepseek_v4.choices import Choices, Witness
from openinfer.recipes.deepseek_v4.forced import Forced

TINY = Path(__file__).parent / "goldens" / "deepseek_v4-tiny"


@pytest.fixture
def engine(session):
    flags = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "max_model_len": 1024,
        "activation_quantization": "off",
    }
    return session(TINY, **flags, kv_cache_memory_bytes=96 << 20).engine


def test_every_path_passes(references, engine, deepseek):
    verdicts = list(gate.run(engine.runner, references(gate, deepseek)))
    assert len(verdicts) == 10
    assert [str(verdict) for verdict in verdicts if not verdict.passed] == []


def test_every_control_fails(references, engine, deepseek):
    verdicts = list(gate.negative_controls(engine.runner, references(gate, deepseek)))
    assert len(verdicts) == 5
    assert [str(verdict) for verdict in verdicts if verdict.passed] == []
    sequences = references(gate, deepseek)
    few = gate.decode_all(Forced(engine.runner), sequences[:2], chunk=512)
    assert gate.judge("put right again", gate.limits(sequences), sequences[:2], few).passed


def test_an_engine_that_rounds_is_held_against_the_run_that_does(references, session, deepseek):
    flags = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 1024}
    run = session(TINY, **flags, kv_cache_memory_bytes=96 << 20)
    sequences = references(gate, deepseek)
    rounded = gate.comparable(run.engine.runner, sequences)
    found = gate.decode_all(Forced(run.engine.runner), rounded, chunk=512)
    assert gate.judge("rounded", gate.limits(rounded), rounded, found).passed
    assert gate.rounds(rounded, found).passed
    plain = session(TINY, **flags, kv_cache_memory_bytes=96 << 20, activation_quantization="off")
    assert gate.comparable(plain.engine.runner, sequences) is sequences
    found = gate.decode_all(Forced(plain.engine.runner), rounded, chunk=512)
    assert not gate.rounds(rounded, found).passed  # negative control: an engine that does not round


def test_choices_of_others_are_noticed(references, engine, deepseek):
    """The judge of choices: keys that are not those that the indexer had, and a bias that the router had not."""
    runner, sequence = engine.runner, references(gate, deepseek)[-1]
    witness = Witness(runner.pack, runner.stream, quantized=False)
    forced = Forced(runner, eager=True, pack=witness)
    forced.join(1, len(sequence.tokens))
    forced.feed(1, sequence.tokens[:260], 512)
    assert witness.entries.passed
    assert witness.experts.passed
    assert witness.entries.chosen == 2 * 4 * 16  # two layers, four tokens, sixteen entries
    scores = np.arange(100.0)
    for got in ([*range(85, 100), 40], [*range(85, 100), 99]):
        judge = Choices("wrong", 0.02)
        judge.take(scores, np.array(got), 16)
        assert not judge.passed


def test_with_few_pages_for_windows_the_steps_are_the_same(session):
    """Benchmarks and gates take an engine without prefix cache, whose window group has no pages to spare."""
    prompts = [np.random.default_rng(n).integers(3, 540, 700).tolist() for n in (1, 2)]
    flags = {"max_num_batched_tokens": 128, "max_model_len": 1024, "activation_quantization": "off"}

    class TakesWhatIsRead(Forced):
        def _window_page(self, busy):
            return super()._window_page(set(self._windows) - busy)

    def steps(engine, kind=Forced):
        forced = kind(engine.runner)
        for slot, prompt in enumerate(prompts, start=1):
            forced.join(slot, 760)
            forced.feed(slot, prompt, 128)
        logits = [forced.step([(1, [7 + n]), (2, [9 + n])]) for n in range(50)]
        forced.leave()
        return np.stack(logits)

    expected = steps(session(TINY, max_num_seqs=32, **flags).engine)
    few = session(TINY, max_num_seqs=2, enable_prefix_caching=False, **flags).engine
    assert few.runner.model.cache.window.shape[0] - 1 == 3 * 2 + 2 < 2 * 6
    np.testing.assert_allclose(steps(few), expected, atol=1e-5)
    assert np.abs(steps(few, TakesWhatIsRead) - expected).max() > 0.01  # negative control
    forced = Forced(few.runner)
    forced._num_windows = 1 + 3
    for slot in (1, 2):
        forced.join(slot, 760)
    with pytest.raises(MemoryError, match="too few pages of the window group"):
        forced.step([(1, [1] * 60), (2, [1] * 60)])  # a page each, and the next
