"""Everything that writing an op needs, from one place. The names are frozen: a change of them is a new major
version.

An `Op` is a contract, a numpy reference, launches and a cost, and runs on a `Pack`. By part:

 - contract: `expect`, `expect_columns`, `expect_weight`, `expect_packed`, `require`, `FLOATS`, `ContractError`; of the
   rows of a step and their positions `expect_rows`, `expect_max_q_len`, `expect_cos_sin`
 - reference: `Array`, `f32`, `rounded`, `matmul_nt`, `rms_norm`, `silu`; of packed weights and rounded values
   `dequantized`, `halves`, `e8m0`, `unpack_fp4`, `q8`, `q4`, `hadamard`, `SCALE_BLOCK`, `FP4_BLOCK`
 - launches: `launch`, `beside`, `Command`, `Launch`, `Matmul`, `Collective`, `Scratch`, `TensorMap`, `Aligned`, `Arg`,
   `aligned`, `power_of_two`, `Target`; tiles that fit: `shared_bytes`, `CONSUMER_SHARED_BYTES`, `depth`
 - parts of ops here that another op may launch: products (`matmul`, `takes_codes`, `expect_bf16`, `expect_q8`),
   attention (`AttentionCall`, `AttentionChoice`, `choose_attention`, `attention_launches`, `require_attention`,
   `expect_cache`, `cached_bytes`, `write_launch`, `WRITING`, `ATTENDING`, `MERGED_AT_ONCE`, `NEW_PAIRS`)
 - sums of several ranks: `Communicator`, `sum_over` (references), `way_of`, `NCCL`, `sum_of_ranks`, `pushed_rows`
 - cost: `Cost`, `Workload`

Kernels themselves import Triton functions from the modules of openinfer.kernels.device by
`from openinfer.kernels.device.module import name`: the key of a compiled kernel follows imports of that form.
openinfer.kernels.testing tests an op.
"""

from __future__ import annotations

from openinfer.kernels.attention import MERGED_AT_ONCE, NEW_PAIRS
from openinfer.kernels.attention import Call as AttentionCall
from openinfer.kernels.attention import Choice as AttentionChoice
from openinfer.kernels.attention import choose as choose_attention
from openinfer.kernels.attention import launches as attention_launches
from openinfer.kernels.communicator import Communicator, sum_over
from openinfer.kernels.contract import (
    FLOATS,
    expect,
    expect_columns,
    expect_cos_sin,
    expect_max_q_len,
    expect_packed,
    expect_rows,
    expect_weight,
    require,
)
from openinfer.kernels.errors import ContractError
from openinfer.kernels.exchange import pushed_rows, sum_of_ranks, way_of
from openinfer.kernels.formats import (
    FP4_BLOCK,
    SCALE_BLOCK,
    dequantized,
    e8m0,
    hadamard,
    halves,
    q4,
    q8,
    unpack_fp4,
)
from openinfer.kernels.kv_cache import cached_bytes, expect_cache
from openinfer.kernels.launch import (
    Aligned,
    Arg,
    Collective,
    Command,
    Launch,
    Matmul,
    Scratch,
    TensorMap,
    aligned,
    beside,
    launch,
    power_of_two,
)
from openinfer.kernels.op import Cost, Op, Pack, Workload
from openinfer.kernels.ops.attend import require_attention
from openinfer.kernels.ops.norm_rope_attend import ATTENDING, WRITING
from openinfer.kernels.ops.qk_norm_rope_write import write_launch
from openinfer.kernels.packed_products import expect_bf16, expect_q8, takes_codes
from openinfer.kernels.products import matmul
from openinfer.kernels.reference import Array, f32, matmul_nt, rms_norm, rounded, silu
from openinfer.kernels.target import Target
from openinfer.kernels.tuning import CONSUMER_SHARED_BYTES, NCCL, depth, shared_bytes

__all__ = [
    "ATTENDING",
    "CONSUMER_SHARED_BYTES",
    "FLOATS",
    "FP4_BLOCK",
    "MERGED_AT_ONCE",
    "NCCL",
    "NEW_PAIRS",
    "SCALE_BLOCK",
    "WRITING",
    "Aligned",
    "Arg",
    "Array",
    "AttentionCall",
    "AttentionChoice",
    "Collective",
    "Command",
    "Communicator",
    "ContractError",
    "Cost",
    "Launch",
    "Matmul",
    "Op",
    "Pack",
    "Scratch",
    "Target",
    "TensorMap",
    "Workload",
    "aligned",
    "attention_launches",
    "beside",
    "cached_bytes",
    "choose_attention",
    "depth",
    "dequantized",
    "e8m0",
    "expect",
    "expect_bf16",
    "expect_cache",
    "expect_columns",
    "expect_cos_sin",
    "expect_max_q_len",
    "expect_packed",
    "expect_q8",
    "expect_rows",
    "expect_weight",
    "f32",
    "hadamard",
    "halves",
    "launch",
    "matmul",
    "matmul_nt",
    "power_of_two",
    "pushed_rows",
    "q4",
    "q8",
    "require",
    "require_attention",
    "rms_norm",
    "rounded",
    "shared_bytes",
    "silu",
    "sum_of_ranks",
    "sum_over",
    "takes_codes",
    "unpack_fp4",
    "way_of",
    "write_launch",
]
