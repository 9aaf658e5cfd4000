"""A checkpoint with random weights, for a recipe that has no golden one."""

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from openinfer.recipes.engine.limits import decide
from openinfer.recipes.engine.recipe import Recipe, Source
from openinfer.tensor import Device, bfloat16, dtypes, float8_e4m3fn, float32, int8, int32, uint8

KINDS = (bfloat16, float32, float8_e4m3fn, int8, int32, uint8)

FP4_SIZE = 2.7
"""The root of the mean square of FP4's codes."""


def write_random_checkpoint(
    recipe: Recipe[Any], folder: Path, config: Mapping[str, Any] | None = None, seed: int = 0
) -> Path:
    """Write config.json (default: recipe.small) and model.safetensors with the tensors that the recipe requires.

    Matrices keep the variance of their inputs; vectors are around 1, as norms are. Packed weights of compressed-tensors
    have scales that differ much, and zero points from 4 to 11. Raises ValueError for other types. Returns the folder.
    """
    config, options = config or recipe.small, recipe.options(device="cpu")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    blueprint = recipe.blueprint(Source(config), options)
    expected: dict[str, tuple[tuple[int, ...], Collection[Any]]] = {}
    asked: Any = SimpleNamespace(require=lambda tensors, **_: expected.update(tensors))
    blueprint.validate(asked, decide(options, Device("cpu"), blueprint))
    rng, arrays = np.random.default_rng(seed), {}
    for name, (shape, allowed) in expected.items():
        dtype = next((found for one in allowed if (found := dtypes.of(one)) in KINDS), None)
        if dtype is None:
            raise ValueError(f"{name} is {allowed}; random weights can be {', '.join(d.name for d in KINDS)}")
        arrays[name] = _values(rng, name, shape, dtype, expected)
    write_tensors(folder / "model.safetensors", arrays)
    return folder


def write_tensors(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write a file of the safetensors format."""
    save_file({name: array.copy() for name, array in arrays.items()}, path)  # in C order


def _values(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], dtype: Any, expected: Mapping[str, Any]
) -> np.ndarray[Any, Any]:
    if dtype == int32:
        bits = rng.integers(0, 1 << 32, shape, np.uint32).view(np.int32)
        return (bits & 0x77777777) + 0x44444444 if "zero_point" in name else bits
    module = name.rpartition(".weight_scale")[0] or name.rpartition(".weight_global_scale")[0]
    codes = expected.get(f"{module}.weight") or expected.get(f"{module}.weight_packed")
    if dtype == uint8 and module and codes is not None:  # exponents of FP4
        usual = round(127 - math.log2(FP4_SIZE * (2 * codes[0][-1]) ** 0.5))
        return rng.integers(usual - 2, usual + 3, shape, np.uint8)
    if dtype in (int8, uint8):
        return rng.integers(0, 256, shape, np.uint8).view(dtype)
    noise = rng.standard_normal(shape)
    if dtype == float8_e4m3fn and module:
        return np.exp(0.5 * noise).astype(dtype)
    if name.endswith("_global_scale") and codes is not None:
        return np.full(shape, FP4_SIZE * (2 * codes[0][-1]) ** 0.5, np.float32)
    if dtype == float8_e4m3fn:
        return np.asarray((64 * noise).clip(-448, 448), np.float32).astype(dtype)
    if len(shape) == 1:
        return np.asarray(1 + 0.1 * noise).astype(dtype)
    if not module or codes is None:
        return np.asarray(2 * noise / shape[-1] ** 0.5).astype(dtype)
    of_int4 = f"{module}.weight_packed" in expected
    size, columns = (5, 8 * codes[0][-1]) if of_int4 else (64, codes[0][-1])  # of codes; of the weight
    return np.asarray(2 / size * columns**-0.5 * np.exp(0.5 * noise)).astype(dtype)
