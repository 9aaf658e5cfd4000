"""Kernels that read tensors before the kernels ahead have ended: nobody may write these tensors then."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from openinfer.cli.explain.segments import Outline
from openinfer.graph.runner.segments import segments
from openinfer.kernels import H200, CudaSpec, Launch, NullPack
from openinfer.kernels.packs.null import Call
from openinfer.kernels.store.cubins import cuda_source
from openinfer.recipes.deepseek_v4 import RECIPE as V4
from openinfer.recipes.deepseek_v4.published import config_json
from openinfer.recipes.engine import Source
from openinfer.recipes.qwen3 import RECIPE as QWEN3
from openinfer.recipes.qwen3_5 import RECIPE as QWEN3_5
from openinfer.tensor import Tensor

SIZES = {"max_num_seqs": 64, "max_num_batched_tokens": 64, "max_model_len": 256}
MTP = '{"method": "mtp", "num_speculative_tokens": 2}'
ADAPTED = ("adapters", "token_slots")
ROWS = ("slots", "q_starts", "seq_lens", "alive", "block_tables")
STATES = ("state", "state_from", "state_to", *ROWS[:4])
CASES: dict[str, tuple[Any, str, dict[str, Any], dict[str, tuple[str, ...]], set[str]]] = {
    "an FP8 cache": (QWEN3, "4B", {"kv_cache_dtype": "fp8"}, {"attend_codes": ROWS}, {"forward"}),
    "an FP8 cache and drafts": (
        QWEN3_5,
        "4B",
        {"kv_cache_dtype": "fp8", "speculative_config": MTP},
        {"attend_codes": ROWS, "delta_tokens": (*STATES, "accepted", "num_drafts")},
        {"forward", "draft"},
    ),
    "few pairs": (
        QWEN3_5,
        "4B",
        {"speculative_config": MTP},
        {"attend_pairs": ROWS, "delta_step": (*STATES, "conv_state")},
        {"forward", "draft"},
    ),
    "adapters": (QWEN3, "4B", {"enable_lora": True}, {"cluster_product": ADAPTED}, {"forward"}),
    "adapters of Qwen3.5": (QWEN3_5, "4B", {"enable_lora": True}, {"cluster_product": ADAPTED}, {"forward"}),
    "a mixture": (QWEN3_5, "35B-A3B", {}, {"experts_sums": ("expert_ids", "expert_weights")}, {"forward"}),
}
"""A recipe, its model and flags; kernels and what they read before they wait; and the segments that have them."""

TOKEN = ("token_slots", "positions")
EARLY_READS = {
    "project_few": (),
    "project_codes": (),
    "hc_numbers": (),
    "hc_collapse": ("streams",),
    "hc_post": ("streams", "mix"),
    "hc_post_ranks": ("streams", "mix"),
    "q_kv_write": (*TOKEN, "block_tables"),
    "compress": ("state", "slots", "q_starts", "seq_lens", "alive", "state_tables", "recent"),
    "index_scores": TOKEN,
    "select_entries": TOKEN,
    "sparse_attend": TOKEN,
    "merge_parts": TOKEN,
    "route": ("token_slots", "token_ids"),
    "add_chosen": ("expert_ids", "shared"),
}
"""Kernels of DeepSeek-V4, and what a step writes of that which they read before they wait."""


def launches_of(outline: Outline) -> dict[Any, list[tuple[Launch, Call]]]:
    """The kernels of a recipe's segments, and the calls that they are of."""
    pack, found = NullPack(outline.target), {}
    for key, run in segments(outline.model, pack, outline.buckets).items():
        pairs = [(command, call) for call in pack.traced(run) for command in call.commands]
        found[key] = [(command, call) for command, call in pairs if isinstance(command, Launch)]
    return found


@functools.cache
def text_of(spec: Any) -> str:
    """A Triton kernel's body."""
    kernel = getattr(importlib.import_module(spec.module), spec.function)
    return inspect.getsource(kernel.fn).rpartition('"""')[2]


def releases(launch: Launch) -> bool:
    """Whether a kernel lets the one behind start before it has waited itself. Those of CUDA C++ do, but for experts_fp4
    as the first product."""
    if isinstance(launch.spec, CudaSpec):
        first = launch.spec.function == "experts_fp4" and dict(launch.spec.constants)["FIRST"]
        return launch.early and not first
    return launch.early and "wait_ahead(EARLY)" not in text_of(launch.spec)


def read_too_early(
    found: dict[Any, list[tuple[Launch, Call]]], reads: Mapping[str, tuple[str, ...]]
) -> tuple[set[str], set[tuple[str, str]]]:
    """Kernels of `reads` that read what kernels that may still run write; and all that were seen, by segment. They may
    run back to one that waits before it lets others start; those of the other branch of a fork write nothing of it."""
    wrong, seen = set(), set()
    for key, launches in found.items():
        for place, (launch, call) in enumerate(launches):
            function, names = launch.spec.function, [name for name, _ in launch.spec.signature]
            given = dict(zip(names, launch.args, strict=True))
            some = [given.get(name) for name in reads.get(function, ())] if launch.early else []
            read = {tensor.ptr for tensor in some if isinstance(tensor, Tensor)}
            seen |= {(key[0], function)} if read else set()
            other = 1 if call.branch == 2 else 2
            for before, its in reversed(launches[:place] if read else []):
                if its.branch == other:
                    continue
                if its is not call and read & {tensor.ptr for tensor in its.op.written(its.args)}:
                    wrong.add(function)
                if not releases(before):
                    break
    return wrong, seen


def cut_short(config: dict[str, Any]) -> dict[str, Any]:
    """The model with its first layers alone: every kind of layer, behind every kind that may come before it."""
    if "text_config" in config:
        return {**config, "text_config": {**config["text_config"], "num_hidden_layers": 5}}
    return {**config, "num_hidden_layers": 2}


@pytest.mark.parametrize("case", CASES)
def test_what_is_read_early_was_written_before(case: str) -> None:
    recipe, model, flags, reads, kinds = CASES[case]
    options = recipe.options(**SIZES, **flags)
    source = Source(cut_short(recipe.published()[model]))
    outline = Outline(recipe, source, options, replace(H200, nvrtc=True))
    found = launches_of(outline)
    wrong, seen = read_too_early(found, reads)
    assert not wrong
    specs = {launch.spec for launches in found.values() for launch, _ in launches if launch.early}
    for spec in specs:
        if spec.function in reads and not isinstance(spec, CudaSpec):
            before, wait, _ = text_of(spec).partition("start_next(EARLY)\n")
            assert wait, spec
            assert not re.search(r"store\(|atomic|return", before), spec
    assert {function for _, function in seen} == set(reads)
    assert {kind for kind, _ in seen} == kinds


@functools.cache
def early_launches(ranks: int) -> dict[Any, list[tuple[Launch, Call]]]:
    """Of DeepSeek-V4."""
    options, source = V4.options(**SIZES | {"max_model_len": 4096}), Source(config_json("Flash", layers=4))
    return launches_of(Outline(V4, source, options, replace(H200, nvrtc=True), ranks=ranks))


@pytest.mark.parametrize("ranks", [1, 4])
def test_kernels_of_deepseek_v4_wait_before_they_write(ranks: int) -> None:
    """Nothing is written ahead of the wait, and nothing is read but what is named above. In a step of one token all
    kernels start early, but those at its ends and the first of second branches."""
    found = early_launches(ranks)
    late = [launch.spec.function for launch, _ in found["forward", (1, 1, 1, 0)] if not launch.early]
    ends = ["expand_rows", "gather_rows", "gather_last", "push_columns"]
    assert late == ends[: 3 + (ranks > 1)]
    for spec in {launch.spec for launches in found.values() for launch, _ in launches if launch.early}:
        if isinstance(spec, CudaSpec):
            body = cuda_source(spec.module, spec.file).partition(f"\n{spec.function}(")[2]
            before, wait, _ = body.partition('if (FIRST) asm volatile("griddepcontrol.wait;"')
            assert wait, spec
            assert not re.search(r"sort_pairs|ld\w*\(|return|fresh", before), spec
            continue
        text = text_of(spec)
        first = "start_next" if "start_next(EARLY)" in text or spec.function == "q_kv_write" else "wait_ahead"
        if spec.function == "push_sum":
            continue
        if spec.function == "q_kv_write":  # two kinds of program, which wait by themselves
            module = importlib.import_module(spec.module)
            texts = [inspect.getsource(getattr(module, name).fn) for name in ("_write_query", "_write_key")]
        else:
            texts = [text]
        for one in texts:
            before, wait, _ = one.partition(f"{first}(EARLY)\n")
            reads = "" if spec.function in (*EARLY_READS, "rms_norm", "gemv") else r"load\(|return|_of\(|"
            assert wait, spec
            assert not re.search(reads + r"store\(|atomic", before), spec


@pytest.mark.parametrize("ranks", [1, 4])
def test_what_deepseek_v4_reads_early_was_written_before(ranks: int) -> None:
    wrong, seen = read_too_early(early_launches(ranks), EARLY_READS)
    own = {"hc_post"} if ranks > 1 else {"hc_post_ranks", "sparse_attend"}  # 64 heads have another kernel
    assert not wrong
    assert {name for _, name in seen} == {name for name, reads in EARLY_READS.items() if reads} - own
    early = {"hc_post": ("y",), "hc_post_ranks": ("y",), "merge_parts": ("sinks",), "route": ("logits",)}
    assert read_too_early(early_launches(ranks), early)[0] == {
        "hc_post_ranks" if ranks > 1 else "hc_post",
        "route",
    }  # a control


@pytest.mark.parametrize("ranks", [1, 4])
def test_second_products_read_early_what_the_first_has_waited_for(ranks: int) -> None:
    """experts_fp4 sorts the pairs before it waits where it is the second product. The kernel ahead is the first one of
    the same call."""
    found = 0
    for launches in early_launches(ranks).values():
        for (before, _), (launch, _) in itertools.pairwise(launches):
            if launch.spec.function == "experts_fp4" and not dict(launch.spec.constants)["FIRST"]:
                names, found = [name for name, _ in launch.spec.signature], found + 1
                ids = names.index("expert_ids")
                assert before.spec.function == "experts_fp4"
                assert dict(before.spec.constants)["FIRST"]
                assert before.args[ids] is launch.args[ids]
    assert found
