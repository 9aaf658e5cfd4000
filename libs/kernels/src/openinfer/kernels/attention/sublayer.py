"""A decode step's attention sublayer in one launch: device/attention_sublayer.cu."""

from openinfer.kernels.attention.call import ROWS, AttentionCall
from openinfer.kernels.formats.fp4 import FP4_TAIL, Fp4
from openinfer.kernels.formats.fp8 import Fp8
from openinfer.kernels.formats.int4 import Int4Groups
from openinfer.kernels.formats.linear import Linear, Plain
from openinfer.kernels.norms import Norm
from openinfer.kernels.op.launch import Arg, Launch, Scratch, TensorMap, launch_cuda, power_of_two
from openinfer.kernels.op.target import Target, shared_bytes
from openinfer.tensor import Tensor, bfloat16, float32, int32

BLOCKS, WARPS, DIM, DEPTH = 8, 8, 128, 512
"""Blocks of a cluster, which has a key head; warps that multiply; elements of a head; columns of a stage."""
CODINGS = {(Plain(), None): 0, (Fp8(by_row=False), "block"): 1, (Int4Groups(128), None): 2, (Fp4(), None): 3}
"""The kernel's numbers of formats of weights, with what becomes of the numbers that are multiplied with them."""
STAGE, FEWEST_STAGES = 32 * DEPTH, 4
"""Bytes of a stage, and the fewest stages with which the kernel pays."""
HEADS, GROUPS = 8, (2, 4)
"""Key heads, whose clusters all run at once, and query heads that share one (8 of Qwen3-32B are slower)."""
COLUMNS = 1280
"""The most columns of x for each query head of a group: gains take the room of the group's sums."""
CODED_COLUMNS = 4096
"""The most columns of x with codes and more than FEW tokens: sums of more take too many registers."""
FEW, TOKENS = 4, 8
"""Tokens with which any weights pay, and the most: columns of the tensor cores' operand."""
MOST_BYTES = {FEW: 96 << 20, TOKENS: 64 << 20}
"""The most bytes of both weights, by tokens: 64 SMs read larger ones more slowly than all do."""
FEWEST_SMS = 128
"""SMs of a GPU that has room for as many clusters of eight blocks at once, and for some programs of other kernels."""


def takes(
    target: Target, call: AttentionCall, norm: Norm, project: Linear[Tensor], output: Linear[Tensor]
) -> bool:
    """Whether the kernel takes a decode step: a few tokens of one row each, which see the whole context, a cache in
    bf16 or FP8, and weights of one of the formats."""
    coding = _coding(project, output)
    return (
        target.nvrtc
        and target.arch == 90
        and target.num_sms >= FEWEST_SMS
        and not target.batch_invariant
        and max(call.tokens, call.rows) <= TOKENS
        and coding is not None
        and (call.tokens <= FEW or not coding or project.columns <= CODED_COLUMNS)
        and project.nbytes + output.nbytes <= MOST_BYTES[FEW if call.tokens <= FEW else TOKENS]
        and (call.kv_heads, call.dim) == (HEADS, DIM)
        and call.group in (GROUPS if coding < 2 else GROUPS[-1:])
        and project.columns % DEPTH == 0
        and project.columns <= COLUMNS * call.group
        and call.page_size % 16 == 0
        and not call.windowed
        and norm.weight.dtype == bfloat16
        and (call.form.scaled or call.kv.dtype == bfloat16)
        and call.kv.strides[0] % DIM == 0
        and _stages(target, call, project.columns, coding)[0] >= FEWEST_STAGES
    )


def _coding(project: Linear[Tensor], output: Linear[Tensor]) -> int | None:
    """The number of both weights' format; None of two, or of another one."""
    found = CODINGS.get((project.form, project.coding))
    alike = (project.form, project.coding) == (output.form, output.coding)
    return found if alike and (found or project.weight.dtype == bfloat16) else None


def _stages(target: Target, call: AttentionCall, hidden: int, coding: int) -> tuple[int, int]:
    """The stages of the ring, and the bytes of shared memory besides."""
    tokens, group, groups = power_of_two(call.tokens), call.group, hidden // 128
    part, rows, out_rows = group * DIM + 2 * group, (group + 2) * DIM // BLOCKS, hidden // BLOCKS
    sums = (WARPS, 2, 4, 4)[coding] * rows * tokens
    work, floats = 4 * WARPS * part, max((BLOCKS + tokens - 1) * part, sums)
    if coding:  # codes of x lie where sums do later; scales, and cosines and sines
        work = max(work, (1024 if coding == 1 else 2048) * groups)
        floats += 10 * groups + ((out_rows + 191) // 128 + 8) * group + tokens * DIM
    if coding > 1:  # words of rows
        each, tail = (1, 0) if coding == 2 else (2, 4)
        floats += rows * (groups * each + tail) + out_rows * (group * each + tail)
    other = work + 4 * floats + 2 * tokens * rows * BLOCKS + 24 + 8 * (32 + 4 * group) + 10 * 4
    return (shared_bytes(target.arch) - other) // _stage_bytes(call), other


def _stage_bytes(call: AttentionCall) -> int:
    """Bytes of a stage with its barriers, and with the scales of 64 coded keys and values."""
    return STAGE + 16 + (128 if call.form.scaled else 0)


def _halves(call: AttentionCall) -> Tensor:
    """A layer's keys and values in one tensor: keys or values, parts of a row, rows with those of other layers between
    them, and a part's elements, which have 128 bytes."""
    kv, page_rows, of_keys = call.kv, call.kv.strides[0] // DIM, call.kv_heads * call.page_size
    halves = kv.dtype.itemsize
    shape = (2, halves, (kv.shape[0] - 1) * page_rows + of_keys, DIM // halves)
    return Tensor(kv.ptr, shape, kv.dtype, kv.device, (of_keys * DIM, DIM // halves, DIM, 1), kv)


def sublayer(
    target: Target,
    call: AttentionCall,
    x: Tensor,
    norm: Norm,
    project: Linear[Tensor],
    output: Linear[Tensor],
    new: dict[str, Tensor],
    eps: float,
) -> Launch:
    """The launch. new: q_norm and k_norm, if heads have norms, and cos_sin; eps: of these norms, and of `norm`."""
    tokens, hidden, coding = power_of_two(call.tokens), x.shape[1], _coding(project, output)
    assert coding is not None
    stages, other = _stages(target, call, hidden, coding)
    columns, of_kv = 128 // project.weight.dtype.itemsize, _halves(call)  # of a box
    scales: dict[str, Arg] = {}
    if project.scales is not None and output.scales is not None:
        scales = {"weight_scales": project.scales, "output_scales": output.scales}
        if coding > 1:
            words = output.scales.view_as(int32)
            scales["output_scales"] = TensorMap(words, (64, call.group * (1 if coding == 2 else 2)))
        if coding > 2:
            scales["output_factors"] = TensorMap(words, (64, FP4_TAIL // 4))
    args: dict[str, Arg] = {
        "x": x,
        "gain": norm.weight,
        "weight": TensorMap(project.weight, (32, columns) if coding else (16, 256)),
        "output": TensorMap(output.weight, (64, columns)),
        "rows_of_kv": TensorMap(of_kv, (2, of_kv.shape[1], 16, of_kv.shape[3])),
        **call.cache,
        **scales,
        **new,
        **call.some(*ROWS),
        "words": Scratch((HEADS * BLOCKS, HEADS, tokens, hidden // (HEADS * BLOCKS)), float32, zeroed=True),
        **call.some("table_width", "page_stride", "scale"),
    }
    args |= {"eps": eps, "rows": call.rows, "tokens": call.tokens}
    constants = {"HIDDEN": hidden, "HEADS": HEADS, "GROUP": call.group, "PAGE": call.page_size}
    constants |= {"TOKENS": tokens, "STAGES": stages, "NORMED": "q_norm" in new}
    constants |= {"CODED": coding, "CODED_KV": call.form.scaled}
    kernel = "openinfer.kernels.device", "attention_sublayer.cu", "attention_sublayer", (HEADS * BLOCKS,)
    threads, shared = 32 * WARPS + 32, stages * _stage_bytes(call) + other
    return launch_cuda(*kernel, args, constants, threads=threads, shared=shared, early=True)
