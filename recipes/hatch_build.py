"""Build hook: with OPENINFER_CUBIN_ARCHS=90,100 the wheel carries compiled kernels for these architectures.

Needs no GPU, but Triton and the libraries in the building environment (`pip wheel --no-build-isolation`). Editable
installs, and builds without the variable, carry none.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "src/openinfer/recipes/cubins"


class CubinHook(BuildHookInterface):
    """Compiles the kernels of every published size into the wheel's folder of cubins."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        archs = [int(a) for a in os.environ.get("OPENINFER_CUBIN_ARCHS", "").split(",") if a]
        if version == "editable" or not archs:
            return
        sys.path.insert(0, str(Path(self.root, "src")))
        from openinfer.kernels import Store, Target
        from openinfer.recipes.qwen3.config import Config
        from openinfer.recipes.qwen3.published import SIZES, config_json
        from openinfer.recipes.qwen3.startup import specs_of

        for arch in archs:
            specs = {}
            for size in SIZES:
                config = Config.parse(config_json(size), None)
                for gpu, sms in (("", 132), ("NVIDIA H200", 132)):
                    for cublas in (False, True):
                        specs |= dict.fromkeys(specs_of(config, Target(arch, sms, cublas, gpu)))
            folder = Path(self.root, PACKAGE)
            prepared = Store(arch, cache=folder, folders=[]).prepare(specs)
            self.app.display_info(f"sm_{arch}: {prepared.kernels} kernels, {prepared.compiled} compiled now")
        build_data["artifacts"] += [f"{PACKAGE}/**/*.cubin", f"{PACKAGE}/**/*.json"]
