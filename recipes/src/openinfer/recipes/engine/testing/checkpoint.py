"""A checkpoint with random weights, for a recipe that has no golden one."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from openinfer.recipes.engine.limits import decide
from openinfer.recipes.engine.recipe import Recipe, Source
from openinfer.tensor import Checkpoint, Device, bfloat16, dtypes


class _Asked:
    """Takes the place of a Checkpoint that is validated, and keeps the tensors that must be there."""

    def __init__(self) -> None:
        self.expected: Mapping[str, tuple[tuple[int, ...], Collection[Any]]] = {}

    def require(self, expected: Mapping[str, Any], **_: object) -> None:
        self.expected = expected


def write_random_checkpoint(
    recipe: Recipe[Any], folder: Path, config: Mapping[str, Any] | None = None, seed: int = 0
) -> Path:
    """Write config.json (default: recipe.small) and model.safetensors with the tensors that the recipe requires.

    Matrices keep the variance of their inputs; vectors are around 1, as norms are. Raises ValueError for a model that
    wants other types than bfloat16 and float32. Returns the folder.
    """
    config, options = config or recipe.small, recipe.options(device="cpu")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    blueprint = recipe.blueprint(Source(config), options)
    asked = _Asked()
    limits = decide(options, Device("cpu"), blueprint.max_positions, blueprint.page_size)
    blueprint.validate(cast(Checkpoint, asked), limits)
    rng, header, arrays, offset = np.random.default_rng(seed), {}, [], 0
    for name, (shape, allowed) in asked.expected.items():
        dtype = next((found for one in allowed if (found := dtypes.of(one)) in (bfloat16, np.float32)), None)
        if dtype is None:
            raise ValueError(f"{name} is {allowed}; random weights can be bfloat16 and float32")
        noise = rng.standard_normal(shape)
        array = (1 + 0.1 * noise if len(shape) == 1 else 2 * noise / shape[-1] ** 0.5).astype(dtype)
        span = [offset, offset := offset + array.nbytes]
        header[name] = {"dtype": dtypes.tag(dtype), "shape": list(shape), "data_offsets": span}
        arrays.append(array)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            file.write(array.tobytes())
    return folder
