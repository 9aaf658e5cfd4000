"""LLM inference ops without PyTorch. Each op has a contract, a numpy reference, device code and a cost.

An op runs in four ways, which are the packs."""

from openinfer.kernels.attention.rope import place_rope_table, rope_frequencies, rope_table, yarn_frequencies
from openinfer.kernels.errors import (
    CompileError,
    ContractError,
    InvalidAdapter,
    InvalidTable,
    KernelMissing,
    KernelsError,
    LaunchError,
    MissingExtra,
    RankLost,
    UnsupportedQuantization,
    UntrustedCache,
)
from openinfer.kernels.measure.prediction import Parts, Prediction, predictions
from openinfer.kernels.measure.speeds import GPUS, Figures, Lines, LinkSpeed, Speed
from openinfer.kernels.op.cores import usable_cores
from openinfer.kernels.op.launch import (
    Aligned,
    Collective,
    Command,
    CudaSpec,
    KernelSpec,
    Launch,
    Matmul,
    Scratch,
    Spec,
    TensorMap,
    beside,
    launch,
    launch_cuda,
)
from openinfer.kernels.op.op import Cost, Op, Pack, Workload
from openinfer.kernels.op.target import H200, Target
from openinfer.kernels.ops.add_lora import add_lora
from openinfer.kernels.ops.apply_writes import apply_writes, copy_words
from openinfer.kernels.ops.attend import attend
from openinfer.kernels.ops.attention_sublayer import attention_sublayer
from openinfer.kernels.ops.collectives import (
    all_gather,
    all_reduce,
    gather_columns,
    reduce_add,
    reduce_scatter,
)
from openinfer.kernels.ops.embed import embed, expand_rows, select_rows
from openinfer.kernels.ops.experts import experts
from openinfer.kernels.ops.experts_add import experts_add
from openinfer.kernels.ops.index_topk import index_topk
from openinfer.kernels.ops.kept_states import keep_states, take_states
from openinfer.kernels.ops.linear_add import linear_add
from openinfer.kernels.ops.norm_linear import gate_up_silu, norm_linear
from openinfer.kernels.ops.norm_rope_attend import norm_rope_attend
from openinfer.kernels.ops.project import code_rows, gate_up_clamped, norm_rows, project
from openinfer.kernels.ops.qk_norm_rope_write import qk_norm_rope_write
from openinfer.kernels.ops.route import route, route_topk
from openinfer.kernels.packs import CpuPack
from openinfer.kernels.packs.cublas import CublasLt, cublas_available
from openinfer.kernels.packs.cuda import LaunchPack
from openinfer.kernels.packs.cuda_driver import CudaDriver
from openinfer.kernels.packs.interp import InterpDriver
from openinfer.kernels.packs.null import Call, NullPack, Repeated, one_of_each
from openinfer.kernels.ranks import Communicator, SharedMemory
from openinfer.kernels.ranks.gpu_ranks import GpuRanks
from openinfer.kernels.store.cubins import Compiled, Prepared, Store

__all__ = [
    "GPUS", "H200", "Aligned", "Call", "Collective", "Command", "Communicator", "CompileError", "Compiled",
    "ContractError", "Cost", "CpuPack", "CublasLt", "CudaDriver", "CudaSpec", "Figures", "GpuRanks",
    "InterpDriver", "InvalidAdapter", "InvalidTable", "KernelMissing", "KernelSpec", "KernelsError", "Launch",
    "LaunchError", "LaunchPack", "Lines", "LinkSpeed", "Matmul", "MissingExtra", "NullPack", "Op", "Pack",
    "Parts", "Prediction", "Prepared", "RankLost", "Repeated", "Scratch", "SharedMemory", "Spec", "Speed",
    "Store", "Target", "TensorMap", "UnsupportedQuantization", "UntrustedCache", "Workload", "add_lora",
    "all_gather", "all_reduce", "apply_writes", "attend", "attention_sublayer", "beside", "code_rows",
    "copy_words", "cublas_available", "embed", "expand_rows", "experts", "experts_add", "gate_up_clamped",
    "gate_up_silu", "gather_columns", "index_topk", "keep_states", "launch", "launch_cuda", "linear_add",
    "norm_linear", "norm_rope_attend", "norm_rows", "one_of_each", "place_rope_table", "predictions", "project",
    "qk_norm_rope_write", "reduce_add", "reduce_scatter", "rope_frequencies", "rope_table", "route",
    "route_topk", "select_rows", "take_states", "usable_cores", "yarn_frequencies",
]  # fmt: skip
