"""Flags of engines that are refused before an engine starts."""

from typing import Any

import pytest

from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.qwen3 import RECIPE as QWEN3


@pytest.mark.parametrize(
    "flags",
    [
        {"max_num_seqs": 0}, {"max_num_seqs": 10**9}, {"max_num_batched_tokens": 10**12},
        {"max_num_batched_tokens": 0}, {"max_num_queued_reqs": 10**20}, {"kv_cache_memory_bytes": 10**23},
        {"kv_cache_memory_bytes": 0}, {"tensor_parallel_size": 10**6}, {"max_loras": 10**9},
        {"gpu_memory_utilization": 1.5}, {"speculative_config": "[" * 100_000},
        {"speculative_config": '{"method":' * 100_000}, {"speculative_config": "9" * 5000},
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1e9}'},
    ],
    ids=range(14),
)  # fmt: skip
def test_absurd_flags_are_refused_before_anything_is_allocated(flags: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match=next(iter(flags)).replace("_", "-")):
        QWEN3.options(**flags).check("qwen3")
