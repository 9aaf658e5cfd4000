"""A decode step's attention sublayer in one launch: device/attention_sublayer.cu."""

from openinfer.kernels.attention.call import AttentionCall
from openinfer.kernels.formats.fp8 import Fp8
from openinfer.kernels.formats.linear import Linear, Plain
from openinfer.kernels.norms import Norm
from openinfer.kernels.op.launch import Arg, Launch, Scratch, TensorMap, launch_cuda, power_of_two
from openinfer.kernels.op.target import Target, shared_bytes
from openinfer.tensor import Tensor, bfloat16, float32

BLOCKS, WARPS, DIM, DEPTH = 8, 8, 128, 512
"""Blocks of a cluster, which has a key head; warps that multiply; elements of a head; columns of a stage."""
BOXES = {False: ((16, 256), (64, 64)), True: ((32, 128), (64, 128))}
"""Rows and columns of the projection, and of the output projection, that are copied at once: of bf16, and of codes."""
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
    bf16, and weights of bf16 or of FP8 by block."""
    return (
        target.nvrtc
        and target.arch == 90
        and target.num_sms >= FEWEST_SMS
        and not target.batch_invariant
        and max(call.tokens, call.rows) <= TOKENS
        and (call.tokens <= FEW or _plain(project, output) or project.columns <= CODED_COLUMNS)
        and project.nbytes + output.nbytes <= MOST_BYTES[FEW if call.tokens <= FEW else TOKENS]
        and (call.kv_heads, call.dim) == (HEADS, DIM)
        and call.group in GROUPS
        and project.columns % DEPTH == 0
        and project.columns <= COLUMNS * call.group
        and call.page_size % 16 == 0
        and not call.windowed
        and {call.kv.dtype, norm.weight.dtype} == {bfloat16}
        and (_plain(project, output) or _coded(project, output))
    )


def _plain(*weights: Linear[Tensor]) -> bool:
    return all(w.form == Plain() and w.weight.dtype == bfloat16 for w in weights)


def _coded(*weights: Linear[Tensor]) -> bool:
    """Whether both have a scale for each 128 x 128 codes, and what they are multiplied with has one for 128."""
    return all(w.form == Fp8(by_row=False) and w.coding == "block" for w in weights)


def _halves(call: AttentionCall) -> Tensor:
    """A layer's keys and values in one tensor: keys or values, halves of a row, rows with those of other layers between
    them, and a half's elements."""
    kv, page_rows, of_keys = call.kv, call.kv.strides[0] // DIM, call.kv_heads * call.page_size
    shape = (2, 2, (kv.shape[0] - 1) * page_rows + of_keys, DIM // 2)
    return Tensor(kv.ptr, shape, kv.dtype, kv.device, (of_keys * DIM, DIM // 2, DIM, 1), kv)


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
    tokens, hidden, coded = power_of_two(call.tokens), x.shape[1], _coded(project, output)
    first, second = BOXES[coded]
    width, of_head = call.group * DIM, (call.group + 2) * DIM
    part, stage = width + 2 * call.group, 32 * DEPTH
    parts = max((BLOCKS + tokens - 1) * part, (2 if coded else WARPS) * of_head // BLOCKS * tokens)
    work, floats = 4 * WARPS * part, parts
    if coded:  # codes of x lie where sums do later; scales, and cosines and sines
        groups, out_blocks = hidden // 128, (hidden // BLOCKS + 191) // 128
        work = max(work, 1024 * groups)
        floats += 10 * groups + (out_blocks + 8) * call.group + tokens * DIM
    other = work + 4 * floats + 2 * tokens * of_head + 16 + 8 * (28 + 4 * call.group) + 10 * 4
    stages = (shared_bytes(target.arch) - other) // (stage + 16)
    named = {"weight_scales": project.scales, "output_scales": output.scales}
    scales = {name: of for name, of in named.items() if of is not None}  # none of bf16
    args: dict[str, Arg] = {
        "x": x,
        "gain": norm.weight,
        "weight": TensorMap(project.weight, first),
        "output": TensorMap(output.weight, second),
        "rows_of_kv": TensorMap(_halves(call), (2, 2, 16, 64)),
        "kv": call.kv,
        **scales,
        **new,
        **{name: call.args[name] for name in ("slots", "q_starts", "seq_lens", "alive", "block_tables")},
        "words": Scratch((HEADS * BLOCKS, HEADS, tokens, hidden // (HEADS * BLOCKS)), float32, zeroed=True),
        **{name: call.args[name] for name in ("table_width", "page_stride", "scale")},
        "eps": eps,
        "rows": call.rows,
        "tokens": call.tokens,
    }
    constants = {
        "HIDDEN": hidden,
        "HEADS": HEADS,
        "GROUP": call.group,
        "PAGE": call.page_size,
        "TOKENS": tokens,
        "STAGES": stages,
        "NORMED": "q_norm" in new,
        "CODED": coded,
    }
    return launch_cuda(
        "openinfer.kernels.device",
        "attention_sublayer.cu",
        "attention_sublayer",
        (HEADS * BLOCKS,),
        args,
        constants,
        threads=32 * WARPS + 32,
        shared=stages * (stage + 16) + other,
        early=True,
    )
