"""quantization_config of a config.json, as the publishers of packed checkpoints write it."""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from openinfer.kernels.errors import UnsupportedQuantization
from openinfer.kernels.formats.fp4 import mxfp4_packing, nvfp4_packing
from openinfer.kernels.formats.gptq import ONE_GROUP, gptq_packing, ordered_packing
from openinfer.kernels.formats.groups import ONE, Grouped
from openinfer.kernels.formats.int4 import GROUPS, int4_packing
from openinfer.kernels.formats.int8 import int8_packing
from openinfer.kernels.formats.weights import (
    FP8_FLOAT32,
    FP8_MADE,
    FP8_ROWS,
    FP8_TENSOR,
    AnyPacking,
    Mixed,
    Packing,
)
from openinfer.kernels.op.rounding import Coding
from openinfer.tensor import Checkpoint, float8_e4m3fn, int8, uint8

KNOWN = (
    "BF16 checkpoints are run, and those of 'fp8' in blocks of [128, 128] or by tensor, 'compressed-tensors' (FP8, "
    "INT8, INT4, NVFP4, MXFP4), 'modelopt' (FP8, NVFP4, mixed), 'quark' (MXFP4), 'gptq' (4 and 8 bits), 'awq' and "
    "'auto-round' (INT4)"
)
Pack = Packing | Grouped
Groups = list[tuple[Callable[[str], bool], Pack]]
"""Which modules have which packing; the first that takes a module's name."""
MOST_REPEATS = 4
"""The most repetitions in an expression for names; matching takes up to this power of a name's length."""
_OF_PACKED = (".weight_scale_inv", ".weight_scale", ".weight_packed", ".qweight")
_PLAIN = ("ignore", "exclude_modules", "exclude", "modules_to_not_convert")
"""Lists of modules that are not packed."""
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
            return _modelopt(config)
        case "compressed-tensors":
            return _compressed(config)
        case "quark":
            return _quark(config)
        case "gptq":
            _expect(config, "quant_method 'gptq'", bits=(4, 8), sym=(True,))
            bits = config["bits"]
            ordered = config.get("desc_act") is True
            any_group = ordered or bits == 8
            sizes = (*GROUPS, ONE_GROUP) if any_group else GROUPS
            _expect(config, "quant_method 'gptq'", group_size=sizes, desc_act=(True, False, None))
            _expect(config, "quant_method 'gptq'", checkpoint_format=("gptq", "gptq_v2", None))
            v2 = config.get("checkpoint_format") == "gptq_v2"
            return gptq_packing(bits, config["group_size"], v2=v2, ordered=ordered)
        case "awq":
            _expect(config, "quant_method 'awq'", bits=(4,), group_size=GROUPS, zero_point=(True,))
            _expect(config, "quant_method 'awq'", version=("gemm", "GEMM", None))
            return int4_packing("awq", config["group_size"])
        case "auto-round":
            form = config.get("packing_format") or "auto_round:auto_gptq"
            _expect({**config, "packing_format": form}, "quant_method 'auto-round'", bits=(4,), group_size=GROUPS,
                    sym=(True,), data_type=("int", None), packing_format=("auto_round:auto_gptq",))  # fmt: skip
            return gptq_packing(4, config["group_size"], v2=False, ordered=False)
    raise UnsupportedQuantization(f"quant_method is {_shown(method)}; {KNOWN}")


def packed_in(
    packing: AnyPacking | None, checkpoint: Checkpoint, config: Mapping[str, Any] | None = None
) -> AnyPacking | None:
    """The packing with those modules that this checkpoint has packed: publishers leave some plain. config: the
    quantization_config. Raises UnsupportedQuantization where it says nothing or something else of a packed weight."""
    if packing is None or packing.made:
        odd = next((name for name in checkpoint.names if name.endswith(_OF_PACKED)), None)
        if odd is not None:
            raise UnsupportedQuantization(
                f"the key is missing, and the checkpoint has {odd}; take the publisher's config.json"
            )
        return packing
    names, packings = set(checkpoint.names), packing.packings if isinstance(packing, Mixed) else (packing,)
    found = set().union(*(_modules(one, checkpoint) for one in packings))
    for key in _PLAIN:
        plain = (config or {}).get(key)
        for module in plain if isinstance(plain, list) else []:
            if module in found:
                raise UnsupportedQuantization(f"{key} names {module}, which is packed in the checkpoint")
    if isinstance(packing, Mixed):
        return _mixed_in(packing, found, names)
    return _of_modules(packing, frozenset(found), names)


def _of_modules(packing: Pack, modules: frozenset[str], names: set[str]) -> Pack:
    if isinstance(packing, Grouped):
        return packing.found_in(names, modules)
    return packing._replace(modules=modules or None)


def _modules(packing: Pack, checkpoint: Checkpoint) -> set[str]:
    """The modules that have a tensor which only packed ones have."""
    found = {name.removesuffix(packing.marker) for name in checkpoint.names if name.endswith(packing.marker)}
    return found | {
        name.removesuffix(".weight")
        for name in checkpoint.names
        if name.endswith(".weight") and checkpoint.info(name).dtype in (float8_e4m3fn, int8, uint8)
    }


def _mixed_in(packing: Mixed, modules: set[str], names: set[str]) -> Mixed:
    found: dict[int, set[str]] = {}
    for module in sorted(modules):
        own = packing.pick(module)
        if own is None:
            raise UnsupportedQuantization(f"{module} is packed, and config.json names no format for it")
        if isinstance(own, Grouped) and module + own.codes.ending not in names:
            raise UnsupportedQuantization(
                f"{module} is {own.kind} by config.json, and has no {own.codes.ending[1:]}"
            )
        found.setdefault(packing.packings.index(own), set()).add(module)
    resolved = [_of_modules(packing.packings[at], frozenset(some), names) for at, some in found.items()]
    return packing._replace(packings=tuple(resolved))


def _mixed(groups: Groups) -> AnyPacking:
    """The packing of the first group that takes a module."""
    packings = list(dict.fromkeys(one for _, one in groups))

    def pick(module: str) -> Pack | None:
        return next((one for takes, one in groups if takes(module)), None)

    return Mixed(tuple(packings), pick)


def _modelopt(config: Mapping[str, Any]) -> AnyPacking:
    """modelopt: one algorithm for all modules, or one for each of the named ones."""
    algorithm, where = str(config.get("quant_algo")).upper(), "quant_method 'modelopt'"
    if algorithm != "MIXED_PRECISION":
        return _algorithm({**config, "quant_algo": algorithm}, where)
    layers = config.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        raise UnsupportedQuantization(
            f"{where}: quantized_layers is {_shown(layers)}; it must name the modules"
        )
    groups: Groups = []
    # The longest name that a module has, by whole components, says how it is packed.
    for name, own in sorted(layers.items(), key=lambda item: -len(item[0])):
        own = own if isinstance(own, Mapping) else {}
        of = {**own, "quant_algo": str(own.get("quant_algo")).upper()}
        groups.append((functools.partial(_is_within, name), _algorithm(of, f"{where}: {name}")))
    return _mixed(groups)


def _is_within(name: str, module: str) -> bool:
    return module == name or module.startswith(name + ".")


def _algorithm(config: Mapping[str, Any], where: str) -> Pack:
    _expect(config, where, quant_algo=("FP8", "NVFP4", "W4A16_NVFP4"))
    if config["quant_algo"] == "FP8":
        return FP8_TENSOR._replace(coding="tensor")
    _expect(config, where, group_size=(16, None))
    return nvfp4_packing("modelopt")


def _quark(config: Mapping[str, Any]) -> AnyPacking:
    """quark: MXFP4. Activations in FP4 are published with it, and stay plain here."""
    where, every = "quant_method 'quark'", config.get("global_quant_config")
    every = every if isinstance(every, Mapping) else {}
    weight = every.get("weight")
    _expect(config, where, layer_quant_config=({}, None), layer_type_quant_config=({}, None))
    _expect(every, where, output_tensors=(None,), bias=(None,))
    _expect(
        weight if isinstance(weight, Mapping) else {}, f"{where}, weight", dtype=("fp4",), qscheme=("per_group",),
        group_size=(32,), scale_format=("e8m0",), is_dynamic=(False, None),
    )  # fmt: skip
    return mxfp4_packing(".weight")


def _compressed(config: Mapping[str, Any]) -> AnyPacking:
    """compressed-tensors: groups of layers. Activations are quantised as they come, by a published scale, or not."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise UnsupportedQuantization(f"config_groups is {_shown(groups)}; it must be groups with weights")
    named: list[tuple[bool, Callable[[str], bool], Pack]] = []
    for name, group in groups.items():
        group = group if isinstance(group, Mapping) else {}
        if not isinstance(group.get("weights"), Mapping):
            raise UnsupportedQuantization(f"config_groups: {name} must have weights; it is {_shown(group)}")
        form = group.get("format") or (config.get("format") if len(groups) == 1 else None)
        said = group.get("targets", ["Linear"] if len(groups) == 1 else None)
        targets = _names(said, f"config_groups: {name}: targets")
        named.append(("Linear" in targets, _takes(targets), _compressed_group(group, form)))
    if len(named) == 1:
        return named[0][2]
    # Names come before the class of all linear layers, whatever the order of the groups.
    return _mixed([(takes, one) for _, takes, one in sorted(named, key=lambda one: one[0])])


def _names(targets: Any, where: str) -> list[str]:
    if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
        raise UnsupportedQuantization(f"{where} is {_shown(targets)}; it must be names")
    for one in (one[3:] for one in targets if one.startswith("re:")):
        try:
            re.compile(one)
        except re.error as error:
            raise UnsupportedQuantization(f"{where}: {_shown(one)}: {error}") from None
        if len(re.findall(r"[*+{]", one)) > MOST_REPEATS or re.search(r"\)[*+?{]", one):
            raise UnsupportedQuantization(
                f"{where}: {_shown(one)} repeats too much to be matched in a bounded time"
            )
    return targets


def _takes(targets: list[str]) -> Callable[[str], bool]:
    """Whether a module is one of the targets: names, "re:" and an expression, or the class of all linear layers."""
    expressions = [re.compile(one[3:]) for one in targets if one.startswith("re:")]
    return lambda module: (
        "Linear" in targets or module in targets or any(one.match(module) for one in expressions)
    )


def _compressed_group(group: Mapping[str, Any], form: Any) -> Pack:
    weights, activations = group["weights"], group.get("input_activations")
    where = "compressed-tensors, weights"
    _expect(group, "compressed-tensors", output_activations=(None,))
    _expect(weights, where, num_bits=(4, 8), dynamic=(False, None), type=("int", "float"))
    bits, kind = weights["num_bits"], weights["type"]
    if kind == "float" and bits == 8:
        _expect(weights, where, strategy=tuple(_COMPRESSED_FP8))
        if weights["strategy"] == "block":
            _expect(weights, where, block_structure=([128, 128],))
        return _COMPRESSED_FP8[weights["strategy"]]._replace(
            coding=_coding(activations, kind, weights["strategy"])
        )
    if kind == "float":
        return _compressed_fp4(weights, form, where)
    packed = bits == 4 or form == "pack-quantized"
    forms = ("pack-quantized",) if packed else ("int-quantized", None)
    _expect({"format": form}, "compressed-tensors", format=forms)
    ordered = weights.get("actorder") in ("group", True)
    symmetric = (True, False) if bits == 4 and not ordered else (True,)
    _expect(weights, where, actorder=(None, "weight", "static", "group", True, False), symmetric=symmetric)
    if packed:
        if activations is not None:
            raise UnsupportedQuantization(
                f"compressed-tensors: input_activations is given; INT{bits} weights in groups are run with plain "
                "activations"
            )
        _expect(weights, where, strategy=("group",) if bits == 4 else ("group", "channel"))
        channel = weights["strategy"] == "channel"
        _expect(weights, where, group_size=(None, -1) if channel else GROUPS)
        group_size = ONE if channel else weights["group_size"]
        if ordered:
            return ordered_packing(bits, group_size)
        if bits == 4:
            return int4_packing("compressed-tensors", group_size, zeros=not weights["symmetric"])
        return int8_packing(group_size, packed=True)
    _expect(weights, where, strategy=("channel", "tensor"), actorder=(None, "weight", "static", False))
    coding = _coding(activations, "int", weights["strategy"])
    return int8_packing(ONE, packed=False, whole=weights["strategy"] == "tensor", coding=coding)


def _compressed_fp4(weights: Mapping[str, Any], form: Any, where: str) -> Grouped:
    """NVFP4 and MXFP4. Activations in FP4 or FP8 are published with some, and stay plain here."""
    _expect({"format": form}, "compressed-tensors", format=("nvfp4-pack-quantized", "mxfp4-pack-quantized"))
    _expect(weights, where, symmetric=(True, None))
    if form == "nvfp4-pack-quantized":
        _expect(weights, where, strategy=("tensor_group",), group_size=(16,))
        return nvfp4_packing("compressed-tensors")
    _expect(weights, where, strategy=("group",), group_size=(32,))
    return mxfp4_packing(".weight_packed")


def _coding(activations: Any, kind: str, weights: str) -> Coding | None:
    """How activations of FP8 ("float") or INT8 ("int") weights are quantised. A scale of a tensor that is found while
    an FP8 model runs would be of a batch. One of each token is at least as fine, and a token's result does not depend
    on the others."""
    if activations is None:
        return None
    given = activations if isinstance(activations, Mapping) else {}
    where = "compressed-tensors, input_activations"
    _expect(given, where, num_bits=(8,), type=(kind,))
    if kind == "int":
        _expect(given, where, symmetric=(True, None), dynamic=(True, False))
        _expect(given, where, strategy=("token",) if given["dynamic"] else ("tensor",))
        return "int8 token" if given["dynamic"] else "int8 tensor"
    _expect(given, where, dynamic=(True, False, None))
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
