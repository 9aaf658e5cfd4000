"""Every kernel that plans ask for compiles: by default every third one, by the day, for sm_90, and each third day for
another architecture. OPENINFER_TEST_ARCHS=80,100 chooses; `-m slow` does all."""

import datetime
import os

import pytest

from openinfer.kernels import NullPack, Store, Target
from openinfer.sampler.gpu import accept, advance, greedy, sample, score, top_logprobs, widen
from openinfer.sampler.gpu.ops.adjustments import adjustment_fields
from openinfer.tensor import Arena, Device, float32, int32

ARCHS = (80, 90, 100, 120)
TODAY = datetime.date.today().toordinal()
VOCABULARIES = (151_936, 1000, 129_280, 248_320, 600_000)


def archs_of_today():
    chosen = os.environ.get("OPENINFER_TEST_ARCHS")
    if chosen:
        return [int(arch) for arch in chosen.split(",")]
    others = [arch for arch in ARCHS if arch != 90]
    return [90, *([others[TODAY // 3 % len(others)]] if TODAY % 3 == 1 else [])]


def plan(arch, vocabularies):
    pack, arena, slots, rows = NullPack(Target(arch=arch, num_sms=132)), Arena(Device("null"), None), 65, 8

    def i(*shape):
        return arena.alloc(shape, int32)

    def f(*shape):
        return arena.alloc(shape, float32)

    for vocabulary in vocabularies:
        logits, tokens, logprobs = f(rows, vocabulary), i(rows), f(rows)
        step = {"slots": i(rows), "emits": i(rows), "alive": i(slots)}
        lengths = {"q_starts": i(rows + 1), "seq_lens": i(slots)}
        stops = {"min_lens": i(slots), "stop_ids": i(slots, 16)}
        adjustments = {
            field.name: arena.alloc((slots, *field.shape), field.dtype)
            for field in adjustment_fields(vocabulary)
        }
        kept = {name: adjustments[name] for name in ("adjusts", "output_counts", "recent_tokens")}
        sample(
            pack, tokens=tokens, logprobs=logprobs, logits=logits, temperatures=f(slots), top_ks=i(slots),
            top_ps=f(slots), min_ps=f(slots), seeds=i(slots, 2), **step, **lengths, **stops, **adjustments,
        )  # fmt: skip
        greedy(pack, tokens=tokens, logprobs=logprobs, logits=logits, **step, **lengths, **stops)
        top_logprobs(pack, ids=i(rows, 20), values=f(rows, 20), logits=logits, num_logprobs=i(slots), **step)
        score(pack, logprobs=logprobs, ranks=tokens, logits=logits, targets=i(rows))
        advance(
            pack, result=i(rows, 3), tokens=tokens, logprobs=logprobs, last_tokens=i(slots), limits=i(slots),
            **step, **lengths, **stops, **kept,
        )  # fmt: skip
        accept(
            pack, follows=i(rows), accepted=i(slots), num_drafts=i(rows), drafts=i(slots, 16),
            last_tokens=i(slots), starts=i(rows + 1), result=i(rows, 3), seq_lens=i(slots), place=1, **step,
        )  # fmt: skip
        widen(pack, out=logits, logits=f(rows, 32_000), sources=i(vocabulary))
    return pack


def compiles(arch, vocabularies, cache, parts=1):
    """parts: one of so many parts of the kernels is of the day. Those for drafts always are, because no other test
    compiles them."""
    specs = [
        spec
        for number, spec in enumerate(plan(arch, vocabularies).specs())
        if (number + TODAY) % parts == 0 or spec.function in ("accept", "widen")
    ]
    prepared = Store(arch, cache=cache, folders=[]).prepare(specs)
    assert prepared.compiled == len(specs) > 4


@pytest.mark.parametrize("arch", archs_of_today())
def test_kernels_compile(arch, tmp_path, monkeypatch):
    # In one process: to start another takes as long as the kernels.
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    compiles(arch, VOCABULARIES[:1], tmp_path, parts=3)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_of_every_vocabulary_compile_everywhere(arch, tmp_path):
    compiles(arch, VOCABULARIES, tmp_path)
