"""The state of sampling by slot: one table of fields, and what a sequence writes there when it joins.

Every field is named here once. The ops take the fields as keyword arguments of these names. `fields` declares them to
the code that allocates the batch. `values` makes the values of a SamplingParams.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from openinfer.kernels.authoring import expect
from openinfer.sampler.errors import InvalidParams
from openinfer.sampler.gpu.ops import Adjustment, Array
from openinfer.sampler.gpu.ops.adjustments import SlotField, adjustment_fields, adjustment_values
from openinfer.sampler.noise import seed_words
from openinfer.sampler.params import SamplingParams
from openinfer.tensor import Tensor, float32, int32

MAX_STOP_IDS = 20
"""Stop ids of a slot, the model's EOS ids among them."""

GREEDY_FIELDS = ("min_lens", "stop_ids")
"""The fields that `greedy` reads."""
ADJUSTMENTS = tuple(field.name for field in adjustment_fields(1))
SAMPLE_FIELDS = ("temperatures", "top_ks", "top_ps", "min_ps", "seeds", *GREEDY_FIELDS, *ADJUSTMENTS)
"""The fields that `sample` reads."""
ADVANCE_FIELDS = ("limits", *GREEDY_FIELDS, "adjusts", "output_counts", "recent_tokens")
"""The fields that `advance` reads. It writes those of penalties and bad words too."""

_ANY_WIDTH = {"stop_ids", "bias_ids", "biases", "bad_words", "recent_tokens"}
_BY_VOCABULARY = {"prompt_masks", "output_counts", "allowed_masks"}


def fields(vocabulary: int) -> list[SlotField]:
    """All state by slot that the sampling ops read, by the names of their arguments."""
    return [
        SlotField("limits", (), int32),
        SlotField("min_lens", (), int32),
        SlotField("stop_ids", (MAX_STOP_IDS,), int32),
        SlotField("temperatures", (), float32),
        SlotField("top_ks", (), int32),
        SlotField("top_ps", (), float32),
        SlotField("min_ps", (), float32),
        SlotField("seeds", (2,), int32),
        SlotField("num_logprobs", (), int32),
        *adjustment_fields(vocabulary),
    ]


def values(
    params: SamplingParams,
    *,
    seed: int,
    stop_ids: Sequence[int],
    prompt: Sequence[int],
    output: Sequence[int],
    max_len: int,
    vocabulary: int,
    masked: bool = False,
) -> dict[str, float | Array]:
    """The values to write at the slot of a sequence that joins, by field.

    A value is a number for a field of no axis, else an array of the field's shape or of its beginning. A field that is
    not named may keep its old value in the slot.

    stop_ids: every id that ends the sequence, EOS included unless ignored. prompt: ids of the prompt; output: ids
    generated before, which a preempted sequence has. max_len: tokens at which the sequence ends. masked: a mask of
    allowed tokens is written before each token, as a grammar needs it; `allowed_masks` is then left out here.
    Raises InvalidParams for more than MAX_STOP_IDS stop ids.
    """
    if len(stop_ids) > MAX_STOP_IDS:
        raise InvalidParams("stop_token_ids", stop_ids, f"at most {MAX_STOP_IDS} ids with the model's EOS")
    found: dict[str, float | Array] = {
        "limits": max_len,
        "min_lens": len(prompt) + params.min_tokens,
        "stop_ids": np.array([*stop_ids, *[-1] * (MAX_STOP_IDS - len(stop_ids))], np.int32),
        "temperatures": 0.0 if params.is_greedy else params.temperature,
        "top_ks": params.top_k,
        "top_ps": params.top_p,
        "min_ps": params.min_p,
        "seeds": np.array(seed_words(seed), np.uint32).view(np.int32),
        "num_logprobs": params.logprobs or 0,
        "adjusts": 0,
    }
    if params.adjusts_logits or masked:
        found |= adjustment_values(params, prompt, output, vocabulary)
    if masked:
        found["adjusts"] = int(found["adjusts"]) | Adjustment.ALLOWED
        found.pop("allowed_masks", None)
    return found


def expect_state(state: Mapping[str, Tensor], slots: int, vocabulary: int = 0) -> None:
    """Raise ContractError unless these fields have an entry a slot. Lists of ids, biases and words may be of any width;
    so may masks and counts where the op knows no vocabulary (0)."""
    for field in fields(vocabulary):
        if field.name in state:
            free = field.name in _ANY_WIDTH or (field.name in _BY_VOCABULARY and not vocabulary)
            shape = (-1,) * len(field.shape) if free else field.shape
            expect(field.name, state[field.name], (slots, *shape), field.dtype)
