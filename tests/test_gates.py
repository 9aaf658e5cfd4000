"""The accuracy gate of every recipe, on the CPU: every path passes against the goldens, every control turns it red."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from openinfer.cli import recipes
from openinfer.cli.selftest import gate
from openinfer.recipes.deepseek_v4.choices import Choices, Witness
from openinfer.recipes.deepseek_v4.layers import Injected, LayerCheck
from openinfer.recipes.engine.forced import Forced, NoRoom
from openinfer.recipes.engine.routing import Recorder, routed
from openinfer.recipes.engine.startup import Built, build
from openinfer.recipes.engine.verdict import Reference, Verdict, judge, limits
from openinfer.tensor import bfloat16

GOLDENS = Path(__file__).parent / "goldens"
SMALL = {"device": "cpu", "max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 1024}
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "qwen3-tiny": ({"kv_cache_memory_bytes": 256 << 20}, 4),
    "qwen3_5-tiny": ({"kv_cache_memory_bytes": 256 << 20}, 5),
    "deepseek_v4-tiny": ({"kv_cache_memory_bytes": 96 << 20, "activation_quantization": "off"}, 6),
}
"""By golden: flags, and how many controls there are."""
PATHS = 10


class Case(NamedTuple):
    built: Built
    golden: Any
    controls: int


def built(name: str, **flags: Any) -> Built:
    path = GOLDENS / name
    return build(recipes.find(path), path, **{**SMALL, **MODELS[name][0], **flags})


@pytest.fixture(params=MODELS)
def case(request, golden_of):
    made = built(request.param)
    yield Case(made, golden_of(request.param), MODELS[request.param][1])
    made.engine.pool.check_integrity()
    assert made.engine.pool.num_free == made.engine.pool.num_total, "blocks were not given back"
    made.engine.close()


def test_every_path_passes(references, case):
    sequences = references(case.golden)
    found = list(gate.run(case.built, sequences))
    assert sum(isinstance(one, Verdict) for one in found) == PATHS
    assert [str(verdict) for verdict in found if not verdict.passed] == []


def test_every_control_fails(references, case):
    engine, sequences = case.built.engine, references(case.golden)
    found = list(gate.negative_controls(case.built, sequences))
    assert len(found) == case.controls
    assert [str(verdict) for verdict in found if verdict.passed] == []
    few = gate.decode_all(engine, sequences[:2], chunk=512)
    assert judge("put right again", limits(sequences), sequences[:2], few).passed


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_5-moe-tiny",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("qwen3-tiny", "deepseek_v4-tiny")),
    ],
)
def test_faults_of_a_rank_fail(name, golden_of, references, monkeypatch):
    """Another rank's part of a weight, a part of a sum that is missing, and experts that are off by one."""
    flags = {"activation_quantization": "off"} if name == "deepseek_v4-tiny" else {}
    flags |= SMALL | {"tensor_parallel_size": 2, "kv_cache_memory_bytes": 96 << 20}
    made = build(recipes.find(GOLDENS / name), GOLDENS / name, **flags)
    faults = [one for one in made.blueprint.controls(made.engine.runner.model) if "a rank" in one.name]
    assert len(faults) == (2 if name == "qwen3-tiny" else 3)
    monkeypatch.setattr(type(made.blueprint), "controls", lambda self, model: faults)
    found = list(gate.negative_controls(made, references(golden_of(name))))[: len(faults)]
    assert [str(verdict) for verdict in found if verdict.passed] == []
    made.engine.close()


def test_long_prompts_pass(references, case):
    found = list(gate.run_long(case.built, references(case.golden)[1:3]))
    assert len(found) == 3
    assert [str(verdict) for verdict in found if not verdict.passed] == []


def test_experts_of_decode_steps_are_those_of_prompts(references, deepseek):
    """One sequence's experts come from steps of one token, the other way from one chunk of a prompt."""
    engine = built("deepseek_v4-tiny").engine
    runner, mixtures = engine.runner, engine.runner.model.config.num_layers
    sequences = [
        replace(s, experts={"bf16": np.zeros((len(s.top_ids), mixtures, 1))}) for s in references(deepseek)
    ]
    steps = Recorder(runner.pack, runner.stream)
    gate.decode_all(engine, sequences, chunk=512, runner=runner.eager(steps))
    for sequence, experts in zip(sequences, steps.experts(sequences), strict=True):
        forced = Forced(engine, runner.eager(chunk := Recorder(runner.pack, runner.stream)))
        forced.feed(forced.join(1, sequence.tokens), len(sequence.tokens), 512)
        forced.leave()
        last = [ids[sequence.first : len(sequence.tokens)] for ids in chunk.calls]
        same = experts == np.sort(np.stack(last, 1), -1)
        assert same.all((1, 2)).mean() > 0.7, "but for near ties"
    engine.close()


def test_positions_with_other_experts_are_judged_apart():
    rng, positions = np.random.default_rng(0), 40
    bf16 = np.sort(rng.normal(-3, 1, (positions, 8)))[:, ::-1]
    ids = np.tile(np.arange(8, dtype=np.int32), (positions, 1))
    chosen = np.sort(rng.integers(0, 16, (positions, 3, 4)), -1)
    own = chosen.copy()
    own[:4] += 1
    experts = {"bf16": chosen, "fp32": own}
    reference = Reference([0] * 60, ids, bf16, bf16 + 0.01, experts=experts)
    found = np.concatenate([bf16, np.zeros((positions, 1))], 1)
    found[7, :8] += 3  # another expert moved it
    flipped = chosen.copy()
    flipped[7] += 1
    apart = routed([reference], [found], [flipped])
    assert apart.passed
    assert (apart.agree, apart.own) == (39 / 40, 0.9)
    assert not routed([reference], [found], [chosen]).passed, "the same experts, and yet far away"
    assert not judge("all", limits([reference]), [reference], [found]).passed
    assert not routed([reference], [found], [chosen + 1]).passed, "no position to judge"


def test_an_engine_that_rounds_is_held_against_the_run_that_does(references, deepseek):
    engine, blueprint = built("deepseek_v4-tiny", activation_quantization="on")
    sequences = references(deepseek)
    rounded = blueprint.comparable(sequences)
    found = gate.decode_all(engine, rounded, chunk=512)
    assert judge("rounded", limits(rounded), rounded, found).passed
    engine.close()
    plain, blueprint = built("deepseek_v4-tiny")
    assert blueprint.comparable(sequences) is sequences
    found = gate.decode_all(plain, rounded, chunk=512)
    assert not judge("not rounded", limits(sequences), rounded, found).passed  # negative control
    plain.close()


def test_each_layer_alone_turns_controls_red_under_rounding(references, deepseek):
    """With the published rounding, layers alone tell entries of another size from right ones; logits need not."""
    made = built("deepseek_v4-tiny", activation_quantization="on")
    engine, sequence = made.engine, references(deepseek)[-1]
    count = len(sequence.tokens)
    shape = (len(engine.runner.model.weights.layers), count, *engine.runner.model.buffers.streams.shape[1:])
    inputs = np.random.default_rng(0).standard_normal(shape).astype(bfloat16)
    injected = Injected(engine.runner.pack, engine.runner.stream, inputs)
    injected.begin(0, count)
    forced = Forced(engine, engine.runner.eager(injected))
    forced.feed(forced.join(1, sequence.tokens), count, 512)
    forced.leave()
    outputs = np.stack([one for (one,) in injected.outputs])[:, -64:]
    own = np.zeros(outputs.shape[:2])
    layers = {"inputs": inputs.view(np.uint16), "outputs": outputs, "own": own}
    sequences = [*references(deepseek)[:-1], replace(sequence, layers=layers)]
    checks = [one for one in made.blueprint.checks(engine, sequences) if isinstance(one, LayerCheck)]
    assert len(checks) == len(outputs)
    assert [str(one) for one in checks if one.median or one.p90] == []
    found = list(gate.negative_controls(made, sequences))
    assert len(found) == 6
    assert [str(one) for one in found if one.passed] == []
    assert any(isinstance(one, LayerCheck) for one in found), [str(one) for one in found]
    engine.close()
    two = replace(made.blueprint, config=made.blueprint.config.of_rank(0, 2))
    assert not two.notices("entry_tables")
    assert not two.notices("entries of the wrong size")
    assert two.notices("window_tables")
    assert replace(two, options=replace(two.options, activation_quantization="off")).notices("entry_tables")


def test_choices_of_others_are_noticed(references, deepseek):
    """The judge of choices: what the indexer and the router chose passes, and another choice does not."""
    engine, _ = built("deepseek_v4-tiny")
    sequence = references(deepseek)[-1]
    witness = Witness(engine.runner.pack, engine.runner.stream, quantized=False)
    forced = Forced(engine, engine.runner.eager(witness))
    forced.feed(forced.join(1, sequence.tokens), 260, 512)
    forced.leave()
    engine.close()
    assert witness.entries.passed
    assert witness.experts.passed
    assert witness.entries.chosen == 4 * 16  # one layer, four tokens, sixteen entries
    scores = np.arange(100.0)
    for got in ([*range(85, 100), 40], [*range(85, 100), 99]):
        wrong = Choices("wrong", 0.02)
        wrong.take(scores, np.array(got), 16)
        assert not wrong.passed


def test_a_cache_that_is_too_small_is_named():
    engine, _ = built(
        "deepseek_v4-tiny", max_num_seqs=2, enable_prefix_caching=False, kv_cache_memory_bytes=4 << 20
    )
    forced = Forced(engine)
    with pytest.raises(NoRoom, match="--kv-cache-memory-bytes"):
        forced.feed(forced.join(1, [5] * 100_000), 100_000, 512)
    forced.leave()
    assert engine.pool.num_free == engine.pool.num_total
    engine.close()
