"""quantization_config of a config.json, as the publishers of packed checkpoints write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openinfer.kernels.errors import UnsupportedQuantization
from openinfer.kernels.formats.int4 import GROUPS, Int4
from openinfer.kernels.formats.weights import FP8_FLOAT32, FP8_MADE, FP8_ROWS, FP8_TENSOR, Packing
from openinfer.kernels.op.rounding import Coding
from openinfer.tensor import Checkpoint, float8_e4m3fn

__all__ = ["AnyPacking", "packed_in", "packing_of"]

AnyPacking = Packing | Int4
"""How a checkpoint stores its packed weights."""

KNOWN = (
    "BF16 checkpoints are run, and those of 'fp8' in blocks of [128, 128] or by tensor, 'compressed-tensors' (FP8, "
    "INT4), 'modelopt' (FP8), 'gptq', 'awq' and 'auto-round' (INT4)"
)
_OF_PACKED = (".weight_scale_inv", ".weight_scale", ".weight_packed", ".qweight")
_COMPRESSED_FP8 = {
    "channel": FP8_ROWS,
    "tensor": FP8_TENSOR,
    "block": Packing(".weight_scale", FP8_FLOAT32.dtype),
}


def packing_of(config: Mapping[str, Any] | None, quantization: str | None = None) -> AnyPacking | None:
    """The packing that a quantization_config describes; None for none.

    quantization: what the command line asks for. "fp8" makes FP8 of plain weights while they are loaded. Raises
    UnsupportedQuantization naming the key that is not supported.
    """
    if config is None:
        return FP8_MADE if quantization == "fp8" else None
    if not isinstance(config, Mapping):
        raise UnsupportedQuantization(f"it is {_shown(config)}; it must be an object")
    method = config.get("quant_method")
    if quantization == "fp8":
        raise UnsupportedQuantization(
            f"--quantization fp8: the checkpoint is quantised already ({_shown(method)}); leave the flag out"
        )
    match method:
        case "fp8":
            if config.get("weight_block_size") is None:
                _expect(config, "quant_method 'fp8' by tensor", activation_scheme=("dynamic", "static"))
                static = config["activation_scheme"] == "static"
                return FP8_TENSOR._replace(coding="tensor" if static else "token")
            _expect(config, "quant_method 'fp8'", weight_block_size=([128, 128],))
            _expect(config, "quant_method 'fp8' in blocks", activation_scheme=("dynamic", None))
            return FP8_FLOAT32
        case "modelopt":
            _expect(config, "quant_method 'modelopt'", quant_algo=("FP8",))
            return FP8_TENSOR._replace(coding="tensor")
        case "compressed-tensors":
            return _compressed(config)
        case "gptq":
            _expect(config, "quant_method 'gptq'", bits=(4,), group_size=GROUPS, sym=(True,))
            _expect(config, "act-order (quant_method 'gptq')", desc_act=(False, None))
            _expect(config, "quant_method 'gptq'", checkpoint_format=("gptq", "gptq_v2", None))
            v2 = config.get("checkpoint_format") == "gptq_v2"
            return Int4("gptq_v2" if v2 else "gptq", config["group_size"])
        case "awq":
            _expect(config, "quant_method 'awq'", bits=(4,), group_size=GROUPS, zero_point=(True,))
            _expect(config, "quant_method 'awq'", version=("gemm", "GEMM", None))
            return Int4("awq", config["group_size"], True)
        case "auto-round":
            form = config.get("packing_format") or "auto_round:auto_gptq"
            _expect({**config, "packing_format": form}, "quant_method 'auto-round'", bits=(4,), group_size=GROUPS,
                    sym=(True,), data_type=("int", None), packing_format=("auto_round:auto_gptq",))  # fmt: skip
            return Int4("gptq", config["group_size"])
    raise UnsupportedQuantization(f"quant_method is {_shown(method)}; {KNOWN}")


def packed_in(packing: AnyPacking | None, checkpoint: Checkpoint) -> AnyPacking | None:
    """The packing with those modules that this checkpoint has packed: publishers leave some plain. Raises
    UnsupportedQuantization for a packed embedding or head, and for packed weights of which config.json says nothing."""
    if packing is None or packing.made:
        odd = next((name for name in checkpoint.names if name.endswith(_OF_PACKED)), None)
        if odd is not None:
            raise UnsupportedQuantization(
                f"the key is missing, and the checkpoint has {odd}; take the publisher's config.json"
            )
        return packing
    found = {name.removesuffix(packing.marker) for name in checkpoint.names if name.endswith(packing.marker)}
    found |= {
        name.removesuffix(".weight")
        for name in checkpoint.names
        if name.endswith(".weight") and checkpoint.info(name).dtype == float8_e4m3fn
    }
    if whole := [name for name in found if name.endswith(("lm_head", "embed_tokens"))]:
        raise UnsupportedQuantization(
            f"{whole[0]} is {packing.kind}; take a checkpoint whose embedding and head are plain"
        )
    if isinstance(packing, Int4):
        indexed = any(name.endswith(".g_idx") for name in checkpoint.names)
        packing = packing._replace(indexed=indexed)
    return packing._replace(modules=frozenset(found) or None)


def _compressed(config: Mapping[str, Any]) -> AnyPacking:
    """compressed-tensors: one group of layers. Activations are quantised as they come, by a published scale, or not."""
    groups = config.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, Mapping) and len(groups) == 1 else None
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
        raise UnsupportedQuantization(
            f"config_groups is {_shown(groups)}; of compressed-tensors one group with weights is run"
        )
    where, activations = "compressed-tensors, weights", group.get("input_activations")
    _expect(weights, where, num_bits=(4, 8), dynamic=(False, None))
    if weights["num_bits"] == 8:
        _expect(weights, where, type=("float",), strategy=tuple(_COMPRESSED_FP8))
        if weights["strategy"] == "block":
            _expect(weights, where, block_structure=([128, 128],))
        return _COMPRESSED_FP8[weights["strategy"]]._replace(coding=_coding(activations, weights["strategy"]))
    _expect(config, "compressed-tensors", format=("pack-quantized",))
    _expect(weights, where, type=("int",), strategy=("group",), group_size=GROUPS, symmetric=(True, False))
    _expect(weights, "act-order (compressed-tensors)", actorder=(None, "weight", "static", False))
    if activations is not None:
        raise UnsupportedQuantization(
            "compressed-tensors: input_activations is given; INT4 weights are run with plain activations"
        )
    return Int4("compressed-tensors", weights["group_size"], not weights["symmetric"])


def _coding(activations: Any, weights: str) -> Coding | None:
    """How activations of FP8 weights are quantised. A scale of a tensor that is found while the model runs would be of
    a batch. One of each token is at least as fine, and a token's result does not depend on the others."""
    if activations is None:
        return None
    given, where = (
        activations if isinstance(activations, Mapping) else {},
        "compressed-tensors, input_activations",
    )
    _expect(given, where, num_bits=(8,), type=("float",), dynamic=(True, False, None))
    if weights == "block":
        _expect(given, where, strategy=("group",), group_size=(128,), dynamic=(True,))
        return "block"
    if given.get("dynamic"):
        _expect(given, where, strategy=("token", "tensor"))
        return "token"
    _expect(given, where, strategy=("tensor",))
    return "tensor"


def _expect(config: Mapping[str, Any], where: str, **allowed: tuple[Any, ...]) -> None:
    for key, values in allowed.items():
        found = config.get(key)
        if found not in values or isinstance(found, bool) != any(
            isinstance(v, bool) for v in values if v == found
        ):
            known = " or ".join(repr(value) for value in values if value is not None)
            raise UnsupportedQuantization(f"{where}: {key} is {_shown(found)}; it must be {known}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
