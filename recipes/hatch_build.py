"""Build hook: with OPENINFER_CUBIN_ARCHS=90,100 the wheel carries compiled kernels for these architectures.

Needs no GPU, but Triton, NVRTC and the libraries in the building environment (`pip wheel --no-build-isolation`).
Editable installs, and builds without the variable, carry none.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "src/openinfer/recipes/cubins"
SHIPPED = ("qwen3", "qwen3_5")
"""Recipes whose kernels go into wheels."""


class CubinHook(BuildHookInterface):
    """Compiles the kernels of every published size into the wheel's folder of cubins."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        archs = [int(a) for a in os.environ.get("OPENINFER_CUBIN_ARCHS", "").split(",") if a]
        if version == "editable" or not archs:
            return
        sys.path.insert(0, str(Path(self.root, "src")))
        from openinfer.kernels import Store, Target

        for arch in archs:
            specs = {}
            for target in (
                Target(arch, 132, cublas, gpu, nvrtc=nvrtc)
                for gpu in ("", "NVIDIA H200")
                for cublas in (False, True)
                for nvrtc in (False, True)
            ):
                for recipe in SHIPPED:
                    specs |= dict.fromkeys(published_specs(recipe, target))
            folder = Path(self.root, PACKAGE)
            prepared = Store(arch, cache=folder, folders=[]).prepare(specs)
            self.app.display_info(f"sm_{arch}: {prepared.kernels} kernels, {prepared.compiled} compiled now")
        build_data["artifacts"] += [f"{PACKAGE}/**/*.cubin", f"{PACKAGE}/**/*.json"]


def published_specs(recipe: str, target: Any) -> Iterator[Any]:
    """The kernels of every published size of a recipe, on GPUs of the target's kind."""
    from openinfer.recipes.engine import Source
    from openinfer.recipes.engine.startup import kernel_specs

    found = importlib.import_module(f"openinfer.recipes.{recipe}").RECIPE
    for name, config in found.published().items():
        if target.arch >= 89 or not name.endswith("-FP8"):  # float8 is for sm_89 and up
            yield from kernel_specs(found, Source(config), found.options(device="cuda"), target)
