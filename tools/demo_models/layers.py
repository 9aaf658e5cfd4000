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
    """Compile a small function of tensors when fusing is on: a few kernels in place of dozens."""
    name = f"{function.__module__}.{function.__qualname__}"

    def call(*args: Any) -> Any:
        if not ENABLED["fuse"]:
            return function(*args)
        if name not in _FUSED:
            _FUSED[name] = torch.compile(function, dynamic=True)
        return _FUSED[name](*args)

    return call


@fused
def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis in float32, rounded once."""
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


@fused
def rms_one(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same with 1 + weight."""
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * (1 + weight)).to(x.dtype)


@fused
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


@fused
def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, T, heads, dim]: the first 2 * cos.shape[-1] channels, paired by halves."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    y = x.float()
    one, two, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
    return torch.cat([one * cos - two * sin, two * cos + one * sin, rest], -1).to(x.dtype)


def rope_table(inverse: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, len(inverse)]."""
    angles = torch.arange(length, device=inverse.device, dtype=torch.float32)[:, None] * inverse
    return angles.cos(), angles.sin()


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention: q [B, T, A, d], k and v [B, T, G, d] -> [B, T, A * d]."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) if group > 1 else x for x in (k, v))
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
    return out.transpose(1, 2).flatten(2)


@fused
def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each row in float32."""
    wide = logits.float()
    return torch.logsumexp(wide, -1) - wide.gather(-1, targets[..., None])[..., 0]
