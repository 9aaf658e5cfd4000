"""Attention of decode steps over an FP8 cache by a kernel of CUDA C++: device/attend_codes.cu."""

from openinfer.kernels.attention.call import ROWS, AttentionCall
from openinfer.kernels.op.launch import Launch, Scratch, launch_cuda, power_of_two
from openinfer.kernels.op.target import Target, shared_bytes
from openinfer.tensor import float32, int32

BLOCK, WARPS, COPIERS = 128, 8, 4
"""Keys of a block, warps that multiply and warps that copy. The kernel has these numbers too."""
MOST_ROWS = 256
"""Rows that all steps of few rows have room for, so that they share a kernel."""
MOST_GROUP = 8
"""The most query heads that share a key head: columns of the tensor cores' operand."""


def takes_codes(target: Target, call: AttentionCall) -> bool:
    """Whether the kernel takes a decode step: all of its rows have one token, and each sees the whole context."""
    known = target.nvrtc and target.arch == 90 and not target.interpreted and not target.batch_invariant
    fits = call.dim in (128, 256) and call.group <= MOST_GROUP and call.page_size % 16 == 0
    return known and fits and call.form.scaled and not call.windowed


def attend_codes(target: Target, call: AttentionCall) -> Launch:
    """The launch. The kernel ahead puts the keys and values of the step's tokens into the cache. The rest of the cache
    and the tensors of rows are read before that kernel ends. So they are written before the last launch that is not
    early, or before the step."""
    merged = WARPS * call.group * (call.dim + 2) * 4
    rows = max(MOST_ROWS, power_of_two(call.rows))
    stage = BLOCK * (2 * call.dim + 2)
    other = merged + (4 * rows + 3) * 4
    stages = (shared_bytes(target.arch) - other) // (stage + 16)
    programs, parts = target.num_sms, 2 * target.num_sms
    args = {**call.some("out", "q"), **call.cache, **call.some(*ROWS)}
    args["partial"] = Scratch((parts, call.group, call.dim), float32)
    args["weights"] = Scratch((parts, call.group, 2), float32)
    args["arrived"] = Scratch((call.rows * call.kv_heads,), int32, zeroed=True)
    args |= call.some("table_width", "page_stride", "scale")
    args |= {"rows": call.rows, "tokens": call.tokens, "heads": call.kv_heads}
    constants = {"D": call.dim, "GROUP": call.group, "PAGE": call.page_size, "ROWS": rows, "STAGES": stages}
    kernel = "openinfer.kernels.device", "attend_codes.cu", "attend_codes", (programs,)
    threads, shared = 32 * (WARPS + COPIERS), stages * (stage + 16) + other
    return launch_cuda(*kernel, args, constants, threads=threads, shared=shared, early=True)
