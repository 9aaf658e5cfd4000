"""DeepSeek-V4's weight formats: rounding for training (gradients pass through), and packing for the checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK, GROUP = 128, 32


def power_of_two(x: Tensor) -> Tensor:
    """2 ** ceil(log2(x)) of positive float32, exactly: by the bits."""
    bits = x.view(torch.int32)
    up = (bits & 0x7FFFFF != 0).to(torch.int32)
    return (((bits >> 23) + up) << 23).view(torch.float32)


def fp8_scales(w: Tensor) -> Tensor:
    """A power of two for each block of 128 x 128: [ceil(N / 128), ceil(K / 128)]."""
    rows, columns = w.shape
    padded = torch.nn.functional.pad(w, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))
    return power_of_two(blocks.abs().amax((1, 3)).clamp_min(1e-4) / 448)


def spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """FP8 scales, one an element."""
    wide = scales[:, None, :, None].expand(-1, BLOCK, -1, BLOCK).flatten(0, 1).flatten(1)
    return wide[: shape[0], : shape[1]]


def _spread_groups(scales: Tensor) -> Tensor:
    return scales[..., None].expand(*scales.shape, GROUP).flatten(-2)


def fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """Float8 e4m3 [N, K] and its scales."""
    scales = fp8_scales(w)
    return (w / spread(scales, w.shape)).clamp(-448, 448).to(torch.float8_e4m3fn), scales


def fp8_rounded(w: Tensor) -> Tensor:
    """The values that FP8 keeps, in float32."""
    codes, scales = fp8(w)
    return codes.float() * spread(scales, w.shape)


def fp4_scales(w: Tensor) -> Tensor:
    """A power of two for each 32 columns: [N, K / 32]."""
    return power_of_two(w.unflatten(-1, (-1, GROUP)).abs().amax(-1).clamp_min(6 * 2.0**-126) / 6)


def fp4_values(w: Tensor, scales: Tensor) -> Tensor:
    """Each weight over its scale, rounded to 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with its sign; ties to even."""
    x = (w / _spread_groups(scales)).clamp(-6, 6)
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
    return torch.round(x / step) * step


def fp4_rounded(w: Tensor) -> Tensor:
    """The values that FP4 keeps, in float32."""
    scales = fp4_scales(w)
    return fp4_values(w, scales) * _spread_groups(scales)


def fp4_packed(w: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [N, K / 2], the even column in the low half, and the scales."""
    scales = fp4_scales(w)
    values = fp4_values(w, scales)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=w.device)
    code = torch.searchsorted(table, values.abs().contiguous()) + 8 * torch.signbit(values).long()
    packed = (code[:, 0::2] | (code[:, 1::2] << 4)).to(torch.uint8).view(torch.int8)
    return packed.contiguous(), scales


def fp4_unpacked(packed: Tensor, scales: Tensor) -> Tensor:
    """float32 [N, K] of what fp4_packed made."""
    table = torch.tensor(
        [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], device=packed.device
    )
    codes = packed.view(torch.uint8).long()
    values = table[torch.stack([codes & 15, codes >> 4], -1).flatten(-2)]
    return values * _spread_groups(scales)


def through(rounded: Tensor, w: Tensor) -> Tensor:
    """`rounded` whose gradient is that of w."""
    return w + (rounded - w).detach()
