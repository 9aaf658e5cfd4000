"""attention_sublayer: norm_linear, norm_rope_attend and linear_add of a transformer's layer as one op."""

from dataclasses import dataclass
from typing import Generic

from openinfer.kernels.attention.call import AttentionCall
from openinfer.kernels.attention.sublayer import sublayer, takes
from openinfer.kernels.formats.linear import linear_of
from openinfer.kernels.norms import Norm
from openinfer.kernels.op.launch import Launch, Scratch
from openinfer.kernels.op.op import Composite, T, tensors
from openinfer.kernels.op.target import Target
from openinfer.kernels.ops.linear_add import AddArgs, linear_add
from openinfer.kernels.ops.norm_linear import LinearArgs, norm_linear
from openinfer.kernels.ops.norm_rope_attend import RopeAttentionArgs, norm_rope_attend
from openinfer.tensor import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Args(Generic[T]):
    """x += the output projection of attention over the norm of x: the arguments of norm_linear, which makes qkv, of
    norm_rope_attend, which makes heads of it, and of linear_add. What qkv and heads hold afterwards is unspecified."""

    project: LinearArgs[T]
    attend: RopeAttentionArgs[T]
    add: AddArgs[T]

    @property
    def ranks(self) -> int:
        """As of linear_add."""
        return self.add.ranks


def _whole(target: Target, a: _Args[Tensor]) -> Launch | None:
    project, attend, add = a.project, a.attend, a.add
    chained = project.out.ptr == attend.qkv.ptr and attend.out.ptr == add.h.ptr and project.x.ptr == add.x.ptr
    alone = add.ranks == 1 and add.normed is None and project.lora is None and add.lora is None
    norm = Norm.of(project.norm_weight, project.eps)
    if not chained or not alone or norm is None or attend.max_q_len > 1 or project.eps != attend.eps:
        return None
    dim = attend.kv.shape[4]
    q = Scratch((attend.out.shape[0], attend.out.shape[1] // dim, dim), attend.out.dtype)
    call = AttentionCall.of(attend.attending(q, attend.window))
    weight, output = linear_of(project.weight), linear_of(add.weight)
    if not takes(target, call, norm, weight, output):
        return None
    new = tensors(attend, "q_norm", "k_norm", "cos_sin")
    return sublayer(target, call, add.x, norm, weight, output, new, attend.eps)


attention_sublayer = Composite(
    "attention_sublayer",
    _Args[Tensor],
    {"project": norm_linear, "attend": norm_rope_attend, "add": linear_add},
    _whole,
)
