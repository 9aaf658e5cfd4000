"""What the three torch models share: fused pieces, norms, rotary embeddings, the loss.

Weights are dictionaries by published tensor names, as in a checkpoint. Matrices come in bfloat16, the rest in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
_FUSED: dict[str, Callable[..., Any]] = {}
ENABLED = {"fuse": False}


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a small function when fusing is on: a few kernels in place of dozens. Its first argument has rows [N, ...],
    as may others; their number may change without another compilation, all other sizes are compiled in."""
    name = f"{function.__module__}.{function.__qualname__}"

    def call(*args: Any) -> Any:
        if not ENABLED["fuse"]:
            return function(*args)
        for arg in args:
            if isinstance(arg, Tensor) and arg.dim() > 1 and arg.shape[0] == args[0].shape[0]:
                torch._dynamo.maybe_mark_dynamic(arg, 0)
        if name not in _FUSED:
            _FUSED[name] = torch.compile(function)
        return _FUSED[name](*args)

    return call


def fused_any(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for tensors of which any size may change."""
    name = f"{function.__module__}.{function.__qualname__}"

    def call(*args: Any) -> Any:
        if not ENABLED["fuse"]:
            return function(*args)
        if name not in _FUSED:
            _FUSED[name] = torch.compile(function, dynamic=True)
        return _FUSED[name](*args)

    return call


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis in float32, rounded once."""
    return _rms(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)


def rms_one(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same with 1 + weight."""
    return _rms(x.reshape(-1, x.shape[-1]), 1 + weight, eps).view(x.shape)


@fused
def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return _swiglu(gate.reshape(-1, gate.shape[-1]), up.reshape(-1, gate.shape[-1])).view(gate.shape)


@fused
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, T, heads, dim] by cos and sin [B * T, pairs]: its first channels, paired by halves."""
    return _rotate_halves(x.flatten(0, 1), cos, sin).view(x.shape)


@fused
def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    y = x.float()
    one, two, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
    return torch.cat([one * cos - two * sin, two * cos + one * sin, rest], -1).to(x.dtype)


def rope_table(inverse: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B * T, len(inverse)] for rows of ids [B, T]."""
    angles = torch.arange(ids.shape[1], device=inverse.device, dtype=torch.float32)[:, None] * inverse
    return angles.cos().repeat(ids.shape[0], 1), angles.sin().repeat(ids.shape[0], 1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention: q [B, T, A, d], k and v [B, T, G, d] -> [B, T, A * d]."""
    group = q.shape[2] // k.shape[2]
    k, v = (repeated(x, group) for x in (k, v))
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    )
    return out.transpose(1, 2).flatten(2)


def repeated(x: Tensor, times: int) -> Tensor:
    """Each head of [B, T, heads, dim] so many times in a row."""
    return x[:, :, :, None].expand(-1, -1, -1, times, -1).flatten(2, 3) if times > 1 else x


def looked_up(table: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [B, T, H] of a float32 table, whose gradients are then added up in float32."""
    return table.index_select(0, ids.reshape(-1)).to(dtype).unflatten(0, ids.shape)


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each token in float32."""
    return _losses(logits.flatten(0, 1), targets.reshape(-1)[:, None]).view(targets.shape)


@fused
def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    wide = logits.float()
    return torch.logsumexp(wide, -1) - wide.gather(-1, targets)[:, 0]
