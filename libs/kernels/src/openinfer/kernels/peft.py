"""A LoRA adapter as PEFT writes it: a folder with adapter_config.json and adapter_model.safetensors.

The values of an adapter are a rank, a scale, and two matrices for each projection that it changes. Settings that change
what is computed, and that are not supported, are refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.kernels.errors import InvalidAdapter
from openinfer.tensor import Checkpoint, CheckpointError, dtypes

__all__ = ["Peft", "read_peft", "text_module"]

Array = np.ndarray[Any, Any]
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
PREFIX = "base_model.model."
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "use_qalora": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
}
"""Settings that are supported with these values only."""
OTHER_BASES = ("pissa", "olora", "loftq", "corda")
"""Ways of initialising that change the weights of the base model too."""


@dataclass(frozen=True, slots=True)
class Peft:
    """A validated adapter. `matrices`: A [r, K] and B [N, r] by module, of any dtype of weights, mapped from the file:
    they are valid after the file was closed. B has not been multiplied by `scale`."""

    rank: int
    scale: float
    matrices: Mapping[str, tuple[Array, Array]]


def text_module(name: str) -> str:
    """A module's name without what a model with a vision tower has before the text model."""
    return name.replace("model.language_model.", "model.", 1)


def read_peft(
    folder: Path, shapes: Mapping[str, tuple[int, int]], max_rank: int, unused: tuple[str, ...] = ()
) -> Peft:
    """The adapter in `folder`. shapes: rows and columns of each projection of the model, by module. unused: beginnings
    of modules that the checkpoint may have and that are not run; an adapter may change these too.

    Raises InvalidAdapter for settings that are not supported, damaged files and a rank above max_rank. The same for
    modules or shapes that the model has not, missing matrices and values that are not finite.
    """
    config = _read_config(folder)
    rank, scale, targets = _settings(folder, config, max_rank)
    try:
        with Checkpoint(folder, TENSORS) as checkpoint:
            return Peft(rank, scale, _matrices(folder, checkpoint, rank, targets, shapes, unused))
    except CheckpointError as error:
        raise InvalidAdapter(f"adapter {error}") from None


def _read_config(folder: Path) -> Mapping[str, Any]:
    path = folder / CONFIG
    try:
        if not path.is_file():
            raise InvalidAdapter(f"adapter {folder}: there is no {CONFIG}; give the folder that PEFT saved")
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise InvalidAdapter(f"adapter {path}: is larger than {MAX_CONFIG_BYTES} bytes")
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidAdapter(f"adapter {path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidAdapter(f"adapter {path}: is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise InvalidAdapter(f"adapter {path}: must be a JSON object")
    return config


def _settings(
    folder: Path, config: Mapping[str, Any], max_rank: int
) -> tuple[int, float, Collection[str] | None]:
    """Rank, scale, and the target modules; None where the tensors say which modules are changed."""

    def refuse(key: str, allowed: str) -> InvalidAdapter:
        shown = repr(config.get(key))[:80]
        return InvalidAdapter(f"adapter {folder / CONFIG}: {key} is {shown}; {allowed}")

    if config.get("peft_type") != "LORA":
        raise refuse("peft_type", "only 'LORA' is supported")
    for key, allowed in UNSUPPORTED.items():
        if config.get(key) not in allowed:
            raise refuse(key, "this is not supported; merge the adapter into a checkpoint")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(OTHER_BASES):
        raise refuse(
            "init_lora_weights", "it changes the base model too; merge the adapter into a checkpoint"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise refuse("r", "it must be an integer from 1 on")
    if rank > max_rank:
        raise refuse("r", f"--max-lora-rank is {max_rank}; raise it")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise refuse("lora_alpha", "it must be a number")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    targets = config.get("target_modules")
    if isinstance(targets, list) and targets and all(isinstance(one, str) for one in targets):
        some = any(config.get(key) for key in ("layers_to_transform", "exclude_modules"))
        return rank, scale, None if some else targets
    if not isinstance(targets, str):
        raise refuse("target_modules", "it must be a list of names")
    return rank, scale, None


def _matrices(
    folder: Path,
    checkpoint: Checkpoint,
    rank: int,
    targets: Collection[str] | None,
    shapes: Mapping[str, tuple[int, int]],
    unused: tuple[str, ...],
) -> dict[str, tuple[Array, Array]]:
    spelled = dict(_spelled(folder, checkpoint))
    given = {module for module, _ in spelled}
    modules = {module for module in given if not module.startswith(unused)}
    wanted = modules
    if targets is not None:
        wanted = set(_modules_of(folder, targets, shapes, given - modules))
    if unknown := sorted(modules - shapes.keys()):
        raise InvalidAdapter(
            f"adapter {folder}: {unknown[0]} is no projection of this model that can be adapted "
            f"(one of {len(unknown)}); it is for another base model, or changes embeddings, head or experts"
        )
    if surplus := sorted(modules - wanted):
        raise InvalidAdapter(f"adapter {folder}: {surplus[0]} is not among its target_modules")
    if not wanted:
        raise InvalidAdapter(f"adapter {folder}: it changes no projection")
    found = {}
    for module in sorted(wanted):
        rows, columns = shapes[module]
        pair = []
        for letter, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            name = spelled.get((module, letter))
            if name is None:
                raise InvalidAdapter(f"adapter {folder}: {module} has no lora_{letter}")
            pair.append(_values(checkpoint, name, shape))
        found[module] = (pair[0], pair[1])
    return found


def _spelled(folder: Path, checkpoint: Checkpoint) -> Iterator[tuple[tuple[str, str], str]]:
    """((module, "A" or "B"), name) of every tensor."""
    for name in checkpoint.names:
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", name)
        if match is None:
            raise InvalidAdapter(
                f"adapter {folder}: tensor {name!r} is not one that can be run; names are "
                f"{PREFIX}MODULE.lora_A.weight and .lora_B.weight"
            )
        yield (text_module(match[1]), match[2]), name


def _modules_of(
    folder: Path, targets: Collection[str], shapes: Mapping[str, Any], unused: Collection[str]
) -> Iterator[str]:
    """The modules that PEFT takes for a list of names: those that have one of them as their last parts. A name may be
    one of unused modules alone."""
    for target in targets:

        def named(module: str, target: str = target) -> bool:
            return module == text_module(target) or module.endswith(f".{target}")

        found = [module for module in shapes if named(module)]
        if not found and not any(map(named, unused)):
            raise InvalidAdapter(
                f"adapter {folder}: target_modules has {target!r}, which no projection of this model is called"
            )
        yield from found


def _values(checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> Array:
    info = checkpoint.info(name)
    if info.shape != shape:
        raise CheckpointError(
            info.file, name, f"has shape {list(info.shape)}, and the model takes {list(shape)}"
        )
    if info.dtype not in dtypes.WEIGHTS:
        names = ", ".join(dtype.name for dtype in dtypes.WEIGHTS)
        raise CheckpointError(info.file, name, f"is {info.dtype.name}; {names} are possible")
    values = checkpoint.array(name)
    if not np.isfinite(values).all():
        raise CheckpointError(info.file, name, "has values that are not finite")
    return values
