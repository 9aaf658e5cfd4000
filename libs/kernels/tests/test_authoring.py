"""What ops are written with: the names stay, each is documented, and none of them needs a compiler or a driver."""

import subprocess
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

import numpy as np

from openinfer.kernels import authoring
from openinfer.kernels.authoring import (
    FLOATS,
    Array,
    Command,
    Cost,
    Op,
    T,
    Target,
    Workload,
    expect,
    f32,
    launch,
    require,
    rounded,
)
from openinfer.kernels.testing import Case, OpConformance
from openinfer.tensor import Tensor, bfloat16

FROZEN = [
    "CONSUMER_SHARED_BYTES",
    "FLOATS",
    "FP4_BLOCK",
    "FP4_E8M0",
    "FP4_SCALE_MOST",
    "FP8_CACHE",
    "FP8_E8M0",
    "FP8_MADE",
    "FP8_SCALE_MOST",
    "MERGED_AT_ONCE",
    "NCCL",
    "NEW_PAIRS",
    "PUBLISHED_SCALES",
    "SCALE_BLOCK",
    "Adapter",
    "AdapterSizes",
    "Adapters",
    "Aligned",
    "AnyPacking",
    "Arg",
    "Array",
    "AttentionCall",
    "AttentionChoice",
    "CacheForm",
    "CaseRows",
    "Coded",
    "Collective",
    "Command",
    "Commands",
    "Communicator",
    "Composite",
    "ContractError",
    "Cost",
    "DealtPack",
    "Fp8",
    "Int4Groups",
    "KvCache",
    "KvLayout",
    "Launch",
    "Linear",
    "LinearPlaces",
    "Matmul",
    "Memory",
    "Mx",
    "Op",
    "OpCase",
    "Pack",
    "Packing",
    "Plain",
    "Problem",
    "Projection",
    "QkvAttentionArgs",
    "Scratch",
    "T",
    "Target",
    "TensorMap",
    "WeightPart",
    "Workload",
    "aligned",
    "attend_pairs",
    "attention_launches",
    "beside",
    "cached_bytes",
    "choose_attention",
    "code_args",
    "decoded",
    "depth",
    "e8m0",
    "expect",
    "expect_bf16",
    "expect_cache",
    "expect_columns",
    "expect_cos_sin",
    "expect_each",
    "expect_linear",
    "expect_max_q_len",
    "expect_q8",
    "expect_rows",
    "expect_values",
    "f32",
    "form_of",
    "hadamard",
    "joined",
    "launch",
    "leaves",
    "linear_launches",
    "linear_of",
    "mapped",
    "matmul_nt",
    "module_packing",
    "new_tokens",
    "packed_in",
    "packing_of",
    "packing_text",
    "padded_rows",
    "power_of_two",
    "pushed_rows",
    "q4",
    "q8",
    "require",
    "require_attention",
    "rms_norm",
    "rotated_pairs",
    "rounded",
    "scale_blocks",
    "shared_bytes",
    "silu",
    "sum_of_ranks",
    "sum_over",
    "tensors",
    "unpack_fp4",
    "way_of",
    "without_coding",
    "without_zero_points",
    "write_launch",
    "write_values",
]


def test_names_are_frozen_sorted_and_all_that_the_module_has():
    assert authoring.__all__ == FROZEN
    public = {name for name in vars(authoring) if not name.startswith("_")} - {"annotations"}
    assert public == set(FROZEN)


def test_the_docstring_names_each_of_them_and_each_is_documented():
    for name in authoring.__all__:
        assert f"`{name}`" in authoring.__doc__, name
        thing = getattr(authoring, name)
        if isinstance(thing, type) or (typing.get_origin(thing) is None and callable(thing)):
            assert thing.__doc__, name


def test_importing_it_needs_no_triton_and_no_driver():
    code = (
        "import sys, openinfer.kernels.authoring; "
        "bad = {'triton', 'torch', 'cuda.bindings.driver'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# An op of somebody else's, written with these names alone. Its kernel is one that the library has.


@dataclass(frozen=True, kw_only=True, slots=True)
class LookUpArgs(Generic[T]):
    """out[t] = table[token_ids[t]]."""

    out: T
    table: T
    token_ids: T


def _check(a: LookUpArgs[Tensor]) -> None:
    expect("table", a.table, (-1, -1), *FLOATS)
    expect("token_ids", a.token_ids, (-1,), np.dtype(np.int32))
    expect("out", a.out, (a.token_ids.shape[0], a.table.shape[1]), a.table.dtype)
    require(a.table.shape[1] % 16 == 0, f"table has {a.table.shape[1]} columns; it must be a multiple of 16")


def _reference(a: LookUpArgs[Array]) -> None:
    a.out[:] = rounded(f32(a.table[a.token_ids]), a.out.dtype)


def _launches(target: Target, a: LookUpArgs[Tensor]) -> Iterator[Command]:
    args = {"out": a.out, "index": a.token_ids, "table": a.table, "width": a.table.shape[1]}
    yield launch("openinfer.kernels.device.rows", "gather_rows", (a.out.shape[0],), args, {"BLOCK": 64})


def _cost(workload: Workload, a: LookUpArgs[Tensor]) -> Cost:
    return Cost(2 * workload.tokens * a.table.shape[1] * a.table.itemsize, 0)


look_up = Op(
    "look_up", LookUpArgs[Tensor], check=_check, reference=_reference, launches=_launches, cost=_cost
)


class TestLookUp(OpConformance):
    op = look_up
    cases = (
        Case(
            {
                "out": np.full((3, 32), np.nan, bfloat16),
                "table": np.arange(160).reshape(5, 32).astype(bfloat16),
                "token_ids": np.array([4, 0, 4], np.int32),
            },
            outputs={"out": 0.0},
        ),
    )


def test_a_cost_is_of_a_workload():
    given = {name: Tensor.from_numpy(array) for name, array in TestLookUp.cases[0].args.items()}
    assert look_up.cost(Workload.prefill(3), look_up.args(**given)) == Cost(2 * 3 * 32 * 2, 0)
