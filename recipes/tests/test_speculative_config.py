"""--speculative-config: what is taken, and what is said about the rest."""

import sys
from types import SimpleNamespace

import pytest

from openinfer.graph import Buckets, StepPace
from openinfer.recipes.engine import Source
from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.engine.limits import decide
from openinfer.recipes.qwen3 import RECIPE as QWEN3
from openinfer.scheduler import InvalidSetup, Suffixes
from openinfer.tensor import Device

BUCKETS = Buckets.up_to(8, 64, (1, 2, 4), 4)
BLUEPRINT = QWEN3.blueprint(Source(QWEN3.small), QWEN3.options())
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'


def test_the_keys_of_suffixes_are_vllms():
    text = '{"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_spec_factor": 0.5}'
    drafter = QWEN3.options(speculative_config=text).drafting(BUCKETS, StepPace(), 100).make_drafter()
    assert isinstance(drafter, Suffixes)
    assert list(drafter.propose([1, 2, 3, 4, 5, 1, 2, 3, 4], 4)) == [5, 1]
    with pytest.raises(SetupError, match="never from another's"):
        QWEN3.options(
            speculative_config=text.replace("0.5", '0.5, "suffix_decoding_max_cached_requests": 9')
        ).check("")


class NeedsMore:
    """No Drafter: it cannot be made without an argument."""

    def __init__(self, size):
        self.size = size


class Silent:
    """No Drafter: it proposes nothing."""


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("NeedsMore", "cannot be made without arguments: .*'size'"),
        ("Silent", r"has no method propose\(tokens, count\)"),
        ("Nobody", "has no function 'Nobody'"),
    ],
)
def test_a_class_of_which_no_drafter_can_be_made_is_refused_before_the_weights_load(name, complaint):
    text = f'{{"method": "custom_class", "model": "{__name__}:{name}", "num_speculative_tokens": 2}}'
    with pytest.raises(InvalidSetup, match=complaint):
        decide(QWEN3.options(speculative_config=text), Device("cpu"), BLUEPRINT)


def test_the_engine_has_room_for_logits_after_each_draft():
    options = QWEN3.options(speculative_config=NGRAM, max_num_seqs=8)
    options.check("qwen3")
    limits = decide(options, Device("cpu"), BLUEPRINT)
    assert (limits.max_drafts, limits.max_logits) == (3, 32)
    assert QWEN3.options().drafting(BUCKETS, StepPace(), 100).max_drafts == 0
    assert decide(QWEN3.options(), Device("cpu"), BLUEPRINT).max_drafts == 0


def test_n_grams_are_as_long_as_the_config_says():
    text = '{"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 3, "prompt_lookup_max": 3}'
    drafting = QWEN3.options(speculative_config=text).drafting(BUCKETS, StepPace(), 100)
    assert list(drafting.make_drafter().propose([1, 2, 3, 9, 2, 3], 1)) == []
    assert list(drafting.make_drafter().propose([1, 2, 3, 9, 1, 2, 3], 1)) == [9]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ngram", "it is a JSON object with the keys method, num_speculative_tokens"),
        ("[]", "Expected `object`"),
        ('{"method": "ngram"}', "missing required field `num_speculative_tokens`"),
        (NGRAM.replace("3", "0"), "Expected `int` >= 1"),
        (NGRAM.replace("3", "9"), "Expected `int` <= 8"),
        (
            NGRAM.replace("ngram", "mtp"),
            "method 'mtp' is not possible with this model; possible: ngram, suffix, custom_class, eagle3",
        ),
        (NGRAM[:-1] + ', "draft": "small"}', "unknown field `draft`"),
        (NGRAM[:-1] + ', "quantization": "fp8"}', "quantization 'fp8' with method ngram"),
        (NGRAM[:-1] + ', "model": "small"}', "eagle3 and custom_class need the key model"),
        (NGRAM[:-1] + ', "prompt_lookup_min": 4, "prompt_lookup_max": 2}', "prompt_lookup_min 4 is above"),
    ],
)
def test_another_value_is_refused_with_the_reason(text, complaint):
    with pytest.raises(SetupError, match="--speculative-config.*" + complaint):
        QWEN3.options(speculative_config=text).check("qwen3")


class Echo:
    """Proposes the last token again."""

    def propose(self, tokens, count):
        return list(tokens[-1:]) * count


def test_a_drafter_of_ones_own_is_named_by_its_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "my_drafter", SimpleNamespace(Echo=Echo))
    text = '{"method": "custom_class", "model": "my_drafter:Echo", "num_speculative_tokens": 2}'
    drafting = QWEN3.options(speculative_config=text).drafting(BUCKETS, StepPace(), 100)
    assert list(drafting.make_drafter().propose([5, 6], 2)) == [6, 6]
    for model in ("my_drafter:Other", "no_such_module:Echo", "my_drafter"):
        with pytest.raises(InvalidSetup, match="the drafter"):
            QWEN3.options(speculative_config=text.replace("my_drafter:Echo", model)).drafting(
                BUCKETS, StepPace(), 100
            )
