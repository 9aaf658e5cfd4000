"""INT4 checkpoints for tests: weights packed as compressed-tensors, GPTQ and AWQ publish them.

libs/kernels/tests/published_int4.safetensors has what the public packers wrote; test_int4.py compares.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from openinfer.tensor import bfloat16

Array = np.ndarray[Any, Any]
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Quantized(NamedTuple):
    """Codes 0 to 15 [N, K], scales and zero points [N, K / GROUP]."""

    codes: Array
    scales: Array
    zeros: Array

    @property
    def values(self) -> Array:
        """float32 [N, K]."""
        wide = [np.repeat(one, GROUP, axis=1) for one in (self.zeros, self.scales.astype(np.float32))]
        return np.asarray((self.codes - wide[0]) * wide[1], np.float32)


def quantized(weight: Array, symmetric: bool, dtype: Any) -> Quantized:
    """Rounded to the nearest code."""
    groups = weight.reshape(len(weight), -1, GROUP)
    if symmetric:
        scales, zeros = (np.abs(groups).max(-1) / 7.5).astype(dtype), np.full(groups.shape[:2], 8)
    else:
        low, high = groups.min(-1), groups.max(-1)
        scales = ((high - low) / 15).astype(dtype)
        zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 0, 15).astype(int)
    codes = np.rint(groups / scales.astype(np.float32)[..., None]) + zeros[..., None]
    return Quantized(np.clip(codes, 0, 15).astype(int).reshape(weight.shape), scales, zeros)


def words(codes: Array, order: tuple[int, ...] = tuple(range(8))) -> Array:
    """int32 [..., n] of codes [..., 8 n]; place i of a word has the code `order[i]` of its eight."""
    found = np.zeros((*codes.shape[:-1], codes.shape[-1] // 8), np.uint32)
    for place, code in enumerate(order):
        found |= codes[..., code::8].astype(np.uint32) << np.uint32(4 * place)
    return found.view(np.int32)


def compressed(q: Quantized, symmetric: bool) -> dict[str, Array]:
    """compressed-tensors, "pack-quantized"."""
    zeros = {} if symmetric else {"weight_zero_point": np.ascontiguousarray(words(q.zeros.T).T)}
    shape = np.array(q.codes.shape, np.int64)
    return {"weight_packed": words(q.codes), "weight_scale": q.scales, "weight_shape": shape, **zeros}


def gptq(q: Quantized) -> dict[str, Array]:
    """AutoGPTQ and GPTQModel, checkpoint_format "gptq"."""
    return {
        "qweight": np.ascontiguousarray(words(q.codes).T),
        "qzeros": words(q.zeros.T - 1),
        "scales": np.ascontiguousarray(q.scales.T),
        "g_idx": (np.arange(q.codes.shape[1]) // GROUP).astype(np.int32),
    }


def awq(q: Quantized) -> dict[str, Array]:
    """AutoAWQ, version "gemm"."""
    codes, zeros = words(q.codes.T, AWQ_ORDER), words(q.zeros.T, AWQ_ORDER)
    return {"qweight": codes, "qzeros": zeros, "scales": np.ascontiguousarray(q.scales.T)}


COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"], "kv_cache_scheme": None,
}  # fmt: skip
WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": GROUP,
    "dynamic": False,
    "actorder": None,
}
FORMATS: dict[str, tuple[bool, Any, dict[str, Any]]] = {  # symmetric, dtype of scales, quantization_config
    "W4A16": (True, bfloat16, COMPRESSED | {"config_groups": {"group_0": {
        "targets": ["Linear"], "weights": WEIGHTS | {"symmetric": True}, "input_activations": None}}}),
    "W4A16_ASYM": (False, bfloat16, COMPRESSED | {"config_groups": {"group_0": {
        "targets": ["Linear"], "weights": WEIGHTS | {"symmetric": False}, "input_activations": None}}}),
    "GPTQ": (True, np.float16, {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False,
        "checkpoint_format": "gptq"}),
    "AWQ": (False, np.float16, {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
}  # fmt: skip


def packed(name: str, weight: Array) -> tuple[dict[str, Array], Array]:
    """The tensors that a format of FORMATS has for a weight, and the float32 values that they mean."""
    symmetric, dtype, _ = FORMATS[name]
    q = quantized(weight, symmetric, dtype)
    match name:
        case "GPTQ":
            return gptq(q), q.values
        case "AWQ":
            return awq(q), q.values
    return compressed(q, symmetric), q.values
