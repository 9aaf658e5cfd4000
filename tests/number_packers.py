"""FP4 and INT8 checkpoints for tests, by the publishers' descriptions of their formats: for each form its
quantization_config, and a function from a weight [N, K] to a module's tensors and the float32 values that they mean."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
Packed = tuple[dict[str, Array], Array]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
RNG = np.random.default_rng(5)


def fp4(scaled: Array) -> tuple[Array, Array]:
    """The nearest codes of values, and what they mean."""
    index = np.abs(np.abs(scaled)[..., None] - E2M1).argmin(-1)
    return (index + 8 * (scaled < 0)).astype(np.uint8), np.copysign(E2M1[index], scaled)


def nibbles(codes: Array) -> Array:
    return np.asarray(codes[:, ::2] | codes[:, 1::2] << 4)


def nvfp4(style: str, weight: Array) -> Packed:
    factor = np.float32(np.abs(weight).max() / (6 * 448))
    blocks = weight.reshape(len(weight), -1, 16)
    scales = (np.abs(blocks).max(-1) / 6 / factor).astype(ml_dtypes.float8_e4m3fn)
    wide = np.maximum(scales.astype(np.float32), np.float32(2**-9))[..., None]
    codes, numbers = fp4(blocks / (wide * factor))
    packed, unit = nibbles(codes.reshape(weight.shape)), numbers * scales.astype(np.float32)[..., None]
    if style == "modelopt":
        extra = {"weight_scale_2": np.array(factor), "input_scale": np.array(0.01, np.float32)}
        return {"weight": packed, "weight_scale": scales, **extra}, (unit * factor).reshape(weight.shape)
    divisor = np.array([1 / factor], np.float32)
    extra = {"weight_global_scale": divisor, "input_global_scale": np.array([99], np.float32)}
    meant = unit * (np.float32(1) / divisor[0])
    return {"weight_packed": packed, "weight_scale": scales, **extra}, meant.reshape(weight.shape)


def mxfp4(name: str, weight: Array) -> Packed:
    blocks = weight.reshape(len(weight), -1, 32)
    exponent = np.ceil(np.log2(np.maximum(np.abs(blocks).max(-1), 1e-20) / 6)).astype(int)
    codes, numbers = fp4(blocks / 2.0 ** exponent[..., None])
    tensors = {name: nibbles(codes.reshape(weight.shape)), "weight_scale": (exponent + 127).astype(np.uint8)}
    return tensors, (numbers * 2.0 ** exponent[..., None]).astype(np.float32).reshape(weight.shape)


def rounded(
    weight: Array, group: int, dtype: Any = np.float32, most: int = 127
) -> tuple[Array, Array, Array]:
    """Codes -most to most in groups of columns, scales [N, K / group], and values."""
    groups = weight.reshape(len(weight), -1, group)
    scales = (np.abs(groups).max(-1) / most).astype(dtype)
    wide = scales.astype(np.float32)[..., None]
    codes = np.clip(np.rint(groups / wide), -most, most)
    return (
        codes.astype(int).reshape(weight.shape),
        scales,
        (codes * wide).astype(np.float32).reshape(weight.shape),
    )


def int8(whole: bool, weight: Array) -> Packed:
    codes, scales, meant = rounded(
        weight.reshape(1, -1) if whole else weight, weight.size if whole else weight.shape[1]
    )
    extra = {"input_scale": np.array([0.02], np.float32)} if whole else {}
    scales = scales.reshape(1) if whole else scales
    return {
        "weight": codes.reshape(weight.shape).astype(np.int8),
        "weight_scale": scales,
        **extra,
    }, meant.reshape(weight.shape)


def words(codes: Array, bits: int) -> Array:
    """int32 [..., n] of codes [..., 32 n / bits], the first in the lowest bits."""
    each = 32 // bits
    found = np.zeros((*codes.shape[:-1], codes.shape[-1] // each), np.uint32)
    for place in range(each):
        found |= codes[..., place::each].astype(np.uint32) << np.uint32(bits * place)
    return found.view(np.int32)


def packed_int8(group: int, weight: Array) -> Packed:
    codes, scales, meant = rounded(weight, group or weight.shape[1], ml_dtypes.bfloat16)
    shape = np.array(weight.shape, np.int64)
    return {"weight_packed": words(codes + 128, 8), "weight_scale": scales, "weight_shape": shape}, meant


def gptq(bits: int, group: int, ordered: bool, weight: Array) -> Packed:
    order = np.argsort(RNG.random(weight.shape[1])) if ordered else np.arange(weight.shape[1])
    codes, scales, sorted_ = rounded(weight[:, order], group, np.float16, 127 if bits == 8 else 7)
    meant, natural, index = np.empty_like(sorted_), np.empty_like(codes), np.empty(len(order), np.int32)
    meant[:, order], natural[:, order], index[order] = sorted_, codes, np.arange(len(order)) // group
    zero = 1 << bits - 1
    tensors = {
        "qweight": np.ascontiguousarray(words(natural + zero, bits).T),
        "qzeros": words(np.full((len(scales.T), len(weight)), zero - 1), bits),
        "scales": np.ascontiguousarray(scales.T), "g_idx": index,
    }  # fmt: skip
    return tensors, meant


def compressed_in_order(weight: Array) -> Packed:
    """compressed-tensors: groups in the order of activations."""
    tensors, meant = gptq(4, 32, True, weight)
    natural = np.empty(weight.shape, np.int64)
    wide = tensors["scales"].astype(np.float32).T[:, tensors["g_idx"]]
    natural[:] = np.rint(meant / wide)
    shape = np.array(weight.shape, np.int64)
    return {
        "weight_packed": words(natural + 8, 4), "weight_scale": np.ascontiguousarray(tensors["scales"].T),
        "weight_g_idx": tensors["g_idx"], "weight_shape": shape,
    }, meant  # fmt: skip


def compressed(form: str, activations: Any = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "format": form, "input_activations": activations}
    group["weights"] = {"symmetric": True, "dynamic": False, **weights}
    said = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    return said | {"config_groups": {"group_0": group}}


def of_gptq(bits: int, ordered: bool) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": True, "desc_act": ordered}


INT8: dict[str, Any] = {"num_bits": 8, "type": "int"}
FP4: dict[str, Any] = {"num_bits": 4, "type": "float"}
QUARK = {
    "quant_method": "quark", "exclude": ["lm_head"], "layer_quant_config": {}, "kv_cache_quant_config": {},
    "global_quant_config": {"bias": None, "output_tensors": None, "input_tensors": {"dtype": "fp4"}, "weight": {
        "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}},
}  # fmt: skip
OF = functools.partial
WAYS: dict[str, tuple[dict[str, Any], Any]] = {
    "NVFP4": (
        compressed("nvfp4-pack-quantized", {**FP4, "dynamic": "local"}, **FP4, strategy="tensor_group", group_size=16),
        OF(nvfp4, "compressed-tensors"),
    ),
    "NVFP4 (modelopt)": (
        {"quant_method": "modelopt", "quant_algo": "nvfp4", "group_size": 16}, OF(nvfp4, "modelopt"),
    ),
    "MXFP4": (
        compressed("mxfp4-pack-quantized", **FP4, strategy="group", group_size=32), OF(mxfp4, "weight_packed"),
    ),
    "MXFP4 (quark)": (QUARK, OF(mxfp4, "weight")),
    "INT8": (
        compressed("int-quantized", {**INT8, "strategy": "token", "dynamic": True}, **INT8, strategy="channel"),
        OF(int8, False),
    ),
    "INT8 by tensor": (
        compressed("int-quantized", {**INT8, "strategy": "tensor", "dynamic": False}, **INT8, strategy="tensor"),
        OF(int8, True),
    ),
    "W8A16 in groups": (
        compressed("pack-quantized", **INT8, strategy="group", group_size=64), OF(packed_int8, 64),
    ),
    "W8A16": (compressed("pack-quantized", **INT8, strategy="channel"), OF(packed_int8, 0)),
    "GPTQ 8 bits": (of_gptq(8, False), OF(gptq, 8, 32, False)),
    "GPTQ act-order": (of_gptq(4, True), OF(gptq, 4, 32, True)),
    "INT4 act-order": (
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, actorder="group"),
        compressed_in_order,
    ),
}  # fmt: skip
