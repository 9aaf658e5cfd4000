"""Everything that writing an op or a model needs, from one place. The names are frozen: a change of them is a new
major version.

An `Op` is its arguments, a contract, a numpy reference, launches and a cost, and runs on a `Pack`, alone or `joined`
with others to a `Composite`. By part:

 - arguments: `T`, which their tensors are, and `tensors`, for a launch; for a pack of your own `leaves`, `mapped`

 - contract: `expect`, `expect_each`, `expect_columns`, `expect_linear`, `require`, `FLOATS`, `ContractError`; of the
   rows of a step and their positions `expect_rows`, `expect_max_q_len`, `expect_cos_sin`
 - activations as codes: `Coded`; an argument that may be either: `expect_values`, `decoded`, `write_values`,
   `code_args`
 - reference: `Array`, `f32`, `rounded`, `matmul_nt`, `rms_norm`, `rotated_pairs`, `silu`; of rounded values `e8m0`,
   `unpack_fp4`, `q8`, `q4`, `hadamard`, `SCALE_BLOCK`, `FP4_BLOCK`
 - launches: `launch`, `beside`, `Command`, `Launch`, `Matmul`, `Collective`, `Scratch`, `TensorMap`, `Aligned`, `Arg`,
   `aligned`, `power_of_two`, `Target`; tiles that fit: `shared_bytes`, `CONSUMER_SHARED_BYTES`, `depth`
 - parts of ops here that another op may launch: products (`Problem`, `linear_of`, `linear_launches`, `expect_bf16`,
   `expect_q8`), attention (`AttentionCall`, `AttentionChoice`, `choose_attention`, `attention_launches`,
   `require_attention`, `expect_cache`, `cached_bytes`, `write_launch`, `new_tokens`, `QkvAttentionArgs`,
   `attend_pairs`, `MERGED_AT_ONCE`, `NEW_PAIRS`)
 - sums of several ranks: `Communicator`, `sum_over` (references), `way_of`, `NCCL`, `sum_of_ranks`, `pushed_rows`
 - cost: `Cost`, `Workload`, `DealtPack`; calls that it is measured by: `OpCase`, `Memory`, `CaseRows`, `Commands`

A model has

 - weights of linear layers: `Linear` in the forms `Plain`, `Fp8`, `Mx` and `Int4Groups`, `LinearPlaces`,
   `WeightPart`, `padded_rows`, `scale_blocks`, `form_of`, `without_zero_points`; how checkpoints store them: `Packing`,
   `AnyPacking`, `packing_of`, `packed_in`, `module_packing`, `without_coding`, `packing_text`, `FP8_MADE`, `FP8_E8M0`,
   `FP4_E8M0`, `FP8_SCALE_MOST`, `FP4_SCALE_MOST`
 - a cache: `CacheForm`, `FP8_CACHE`, `KvCache`, `KvLayout`, `PUBLISHED_SCALES`
 - adapters: `Adapters`, `Adapter`, `AdapterSizes`, `Projection`

Kernels themselves import Triton functions from the modules of openinfer.kernels.device by
`from openinfer.kernels.device.module import name`: the key of a compiled kernel follows imports of that form.
openinfer.kernels.testing tests an op.
"""

from openinfer.kernels.attention import (
    MERGED_AT_ONCE,
    NEW_PAIRS,
    attend_pairs,
    attention_launches,
    choose_attention,
    new_tokens,
)
from openinfer.kernels.attention.call import AttentionCall, AttentionChoice
from openinfer.kernels.attention.kv_cache import (
    FP8_CACHE,
    PUBLISHED_SCALES,
    CacheForm,
    KvCache,
    KvLayout,
    cached_bytes,
    expect_cache,
)
from openinfer.kernels.errors import ContractError
from openinfer.kernels.formats.fp8 import FP4_SCALE_MOST, FP8_SCALE_MOST, Fp8, Mx
from openinfer.kernels.formats.groups import WeightPart
from openinfer.kernels.formats.int4 import Int4Groups, without_zero_points
from openinfer.kernels.formats.linear import Linear, Plain, expect_linear, linear_of
from openinfer.kernels.formats.quantization import packed_in, packing_of
from openinfer.kernels.formats.weights import (
    FP4_E8M0,
    FP8_E8M0,
    FP8_MADE,
    AnyPacking,
    LinearPlaces,
    Packing,
    form_of,
    module_packing,
    packing_text,
    padded_rows,
    scale_blocks,
    without_coding,
)
from openinfer.kernels.linear.kernels import launches as linear_launches
from openinfer.kernels.linear.problem import Problem, expect_bf16, expect_q8
from openinfer.kernels.lora.adapters import Adapter, Adapters, AdapterSizes, Projection
from openinfer.kernels.op.cases import CaseRows, Commands, Memory, OpCase
from openinfer.kernels.op.coded import Coded, code_args, decoded, expect_values, write_values
from openinfer.kernels.op.contract import (
    FLOATS,
    expect,
    expect_columns,
    expect_cos_sin,
    expect_each,
    expect_max_q_len,
    expect_rows,
    require,
)
from openinfer.kernels.op.launch import (
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
    depth,
    launch,
    power_of_two,
)
from openinfer.kernels.op.op import (
    Composite,
    Cost,
    DealtPack,
    Op,
    Pack,
    T,
    Workload,
    joined,
    leaves,
    mapped,
    tensors,
)
from openinfer.kernels.op.reference import Array, f32, matmul_nt, rms_norm, rotated_pairs, rounded, silu
from openinfer.kernels.op.rounding import FP4_BLOCK, SCALE_BLOCK, e8m0, hadamard, q4, q8, unpack_fp4
from openinfer.kernels.op.target import CONSUMER_SHARED_BYTES, Target, shared_bytes
from openinfer.kernels.ops.attend import require_attention
from openinfer.kernels.ops.norm_rope_attend import QkvAttentionArgs
from openinfer.kernels.ops.qk_norm_rope_write import write_launch
from openinfer.kernels.ranks import Communicator, sum_over
from openinfer.kernels.ranks.exchange import NCCL, pushed_rows, sum_of_ranks, way_of

__all__ = [
    "CONSUMER_SHARED_BYTES", "FLOATS", "FP4_BLOCK", "FP4_E8M0", "FP4_SCALE_MOST", "FP8_CACHE", "FP8_E8M0",
    "FP8_MADE", "FP8_SCALE_MOST", "MERGED_AT_ONCE", "NCCL", "NEW_PAIRS", "PUBLISHED_SCALES", "SCALE_BLOCK",
    "Adapter", "AdapterSizes", "Adapters", "Aligned", "AnyPacking", "Arg", "Array", "AttentionCall",
    "AttentionChoice", "CacheForm", "CaseRows", "Coded", "Collective", "Command", "Commands", "Communicator",
    "Composite", "ContractError", "Cost", "DealtPack", "Fp8", "Int4Groups", "KvCache", "KvLayout", "Launch",
    "Linear", "LinearPlaces", "Matmul", "Memory", "Mx", "Op", "OpCase", "Pack", "Packing", "Plain", "Problem",
    "Projection", "QkvAttentionArgs", "Scratch", "T", "Target", "TensorMap", "WeightPart", "Workload",
    "aligned", "attend_pairs", "attention_launches", "beside", "cached_bytes", "choose_attention",
    "code_args", "decoded", "depth", "e8m0", "expect", "expect_bf16", "expect_cache", "expect_columns",
    "expect_cos_sin", "expect_each", "expect_linear", "expect_max_q_len", "expect_q8", "expect_rows",
    "expect_values", "f32", "form_of", "hadamard", "joined", "launch", "leaves", "linear_launches",
    "linear_of", "mapped", "matmul_nt", "module_packing", "new_tokens", "packed_in", "packing_of",
    "packing_text", "padded_rows", "power_of_two", "pushed_rows", "q4", "q8", "require", "require_attention",
    "rms_norm", "rotated_pairs", "rounded", "scale_blocks", "shared_bytes", "silu", "sum_of_ranks",
    "sum_over", "tensors", "unpack_fp4", "way_of", "without_coding", "without_zero_points",
    "write_launch", "write_values",
]  # fmt: skip
