"""Kernels that read tensors before the kernels ahead have ended: nobody may write these tensors then."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import re
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
from openinfer.recipes.qwen3 import RECIPE
from openinfer.recipes.qwen3_5 import RECIPE as QWEN3_5
from openinfer.tensor import Tensor

SIZES = {"max_num_seqs": 64, "max_num_batched_tokens": 64, "max_model_len": 256}
MTP = '{"method": "mtp", "num_speculative_tokens": 2}'
CODES = ("attend_codes", {"slots", "q_starts", "seq_lens", "alive", "block_tables"})
PAIRS = ("attend_pairs", {"slots", "q_starts", "seq_lens", "alive", "block_tables"})
ADAPTED = ("cluster_product", {"adapters", "token_slots"})
"""Kernels, and what they read early."""
READERS = {
    "qk_norm_rope_write",
    "attend_codes",
    "attend_pairs",
    "delta_step",
    "delta_tokens",
    "cluster_product",
}
CASES = {
    "an FP8 cache": (RECIPE, {"kv_cache_dtype": "fp8"}, CODES, {"forward"}),
    "an FP8 cache and drafts": (
        QWEN3_5,
        {"kv_cache_dtype": "fp8", "speculative_config": MTP},
        CODES,
        {"forward", "draft"},
    ),
    "few pairs and drafts": (QWEN3_5, {"speculative_config": MTP}, PAIRS, {"forward", "draft"}),
    "adapters": (RECIPE, {"enable_lora": True}, ADAPTED, {"forward"}),
    "adapters of Qwen3.5": (QWEN3_5, {"enable_lora": True}, ADAPTED, {"forward"}),
}


RELEASERS = {
    "push_sum", "rms_norm", "hc_collapse", "hc_post", "q_kv_write", "merge_parts", "code_rows", "clamped_gate",
    "add_chosen",
}  # fmt: skip
"""Kernels that let the one behind start before they wait. So does the experts' second product (see below)."""
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


@pytest.mark.parametrize("case", CASES)
def test_what_is_read_early_was_written_before(case: str) -> None:
    """Back to the last launch that is not early, these tensors are given to nobody who may write them."""
    recipe, flags, (function, early), kinds = CASES[case]
    options = recipe.options(**SIZES, **flags)  # type: ignore[arg-type]
    outline = Outline(recipe, Source(recipe.published()["4B"]), options, replace(H200, nvrtc=True))
    pack, found = NullPack(outline.target), set()
    for key, run in segments(outline.model, pack, outline.buckets).items():
        launches = [command for call in pack.traced(run) for command in call.commands]
        for place, launch in enumerate(launches):
            if not isinstance(launch, Launch) or launch.spec.function != function:
                continue
            read = early_arguments(launch, early)
            if not read:
                continue
            found.add(key[0])
            for before in reversed(launches[:place]):
                assert isinstance(before, Launch)
                others = {arg.ptr for arg in before.args if isinstance(arg, Tensor)}
                assert before.spec.function in READERS or not read & others, (key, before)
                if not before.early:
                    break
    assert found == kinds


def early_arguments(launch: Launch, early: set[str]) -> set[Any]:
    """Addresses of these arguments: all of them, or none of a kernel without them."""
    names = [name for name, _ in launch.spec.signature]
    read = {arg.ptr for name, arg in zip(names, launch.args, strict=True) if name in early}
    assert not read or len(read) == len(early)
    return read


@functools.cache
def early_launches(ranks: int) -> dict[Any, list[tuple[Launch, Call]]]:
    """The kernels of DeepSeek-V4's segments, and the calls that they are of."""
    options, source = V4.options(**SIZES | {"max_model_len": 4096}), Source(config_json("Flash", layers=4))
    outline = Outline(V4, source, options, replace(H200, nvrtc=True), ranks=ranks)
    pack, found = NullPack(outline.target), {}
    for key, run in segments(outline.model, pack, outline.buckets).items():
        pairs = [(command, call) for call in pack.traced(run) for command in call.commands]
        found[key] = [(command, call) for command, call in pairs if isinstance(command, Launch)]
    return found


@pytest.mark.parametrize("ranks", [1, 4])
def test_kernels_of_deepseek_v4_wait_before_they_write(ranks: int) -> None:
    """Nothing is written ahead of the wait, and nothing is read but what is named above. In a step of one token all
    kernels start early, but those at its ends and the first of second branches."""
    found = early_launches(ranks)
    late = [launch.spec.function for launch, _ in found["forward", (1, 1, 1, 0)] if not launch.early]
    ends = ["expand_rows", "gather_rows", "gather_last", "gemv", "push_columns"]
    assert late == ends[: 4 + (ranks > 1)]
    for spec in {launch.spec for launches in found.values() for launch, _ in launches if launch.early}:
        if isinstance(spec, CudaSpec):
            body = cuda_source(spec.module, spec.file).partition(f"\n{spec.function}(")[2]
            before, wait, _ = body.partition('if (FIRST) asm volatile("griddepcontrol.wait;"')
            assert wait, spec
            assert not re.search(r"sort_pairs|ld\w*\(|return|fresh", before), spec
            continue
        module = importlib.import_module(spec.module)
        text = inspect.getsource(getattr(module, spec.function).fn).rpartition('"""')[2]
        first = "start_next" if spec.function in RELEASERS else "wait_ahead"
        if spec.function == "push_sum":
            continue
        if spec.function == "q_kv_write":  # two kinds of program, which wait by themselves
            texts = [inspect.getsource(getattr(module, name).fn) for name in ("_write_query", "_write_key")]
        else:
            texts = [text]
        for one in texts:
            before, wait, _ = one.partition(f"{first}(EARLY)\n")
            reads = "" if spec.function in (*EARLY_READS, "rms_norm") else r"load\(|return|_of\(|"
            assert wait, spec
            assert not re.search(reads + r"store\(|atomic", before), spec


def read_too_early(ranks: int, reads: dict[str, tuple[str, ...]]) -> tuple[set[str], set[str]]:
    """Kernels of `reads` that read what kernels that may still run write, and all that were seen. They may run back to
    one that waits before it lets others start; those of the other branch of a fork write nothing of it."""
    found, seen = set(), set()
    for launches in early_launches(ranks).values():
        for place, (launch, call) in enumerate(launches):
            function, names = launch.spec.function, [name for name, _ in launch.spec.signature]
            given = dict(zip(names, launch.args, strict=True))
            some = [given.get(name) for name in reads.get(function, ())] if launch.early else []
            read = {tensor.ptr for tensor in some if isinstance(tensor, Tensor)}
            seen |= {function} if read else set()
            other = 1 if call.branch == 2 else 2
            for before, its in reversed(launches[:place] if read else []):
                if its.branch == other:
                    continue
                if its is not call and read & {tensor.ptr for tensor in its.op.written(its.args)}:
                    found.add(function)
                late = before.spec.function == "experts_fp4" and not dict(before.spec.constants)["FIRST"]
                if before.spec.function not in RELEASERS and not late:
                    break
    return found, seen


@pytest.mark.parametrize("ranks", [1, 4])
def test_what_deepseek_v4_reads_early_was_written_before(ranks: int) -> None:
    found, seen = read_too_early(ranks, EARLY_READS)
    own = {"hc_post"} if ranks > 1 else {"hc_post_ranks", "sparse_attend"}  # 64 heads have another kernel
    assert not found
    assert seen == {name for name, reads in EARLY_READS.items() if reads} - own
    wrong = {"hc_post": ("y",), "hc_post_ranks": ("y",), "merge_parts": ("sinks",), "route": ("logits",)}
    assert read_too_early(ranks, wrong)[0] == {
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
