"""A recipe for the FakeEngine, as a third party would write one; runs as a script too."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from openinfer.frontend import EngineSpec
from openinfer.frontend.serve import serve


class FakeRecipe:
    name = "fake"

    def matches(self, config: Mapping[str, object]) -> bool:
        return config.get("model_type") == "fake"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("engine")
        group.add_argument("--max-model-len", type=int, default=4096, help="context")
        group.add_argument("--step-delay", type=float, default=0.0, help="seconds a step")
        group.add_argument("--start-delay", type=float, default=0.0, help="seconds to start")
        group.add_argument("--start-error", default=None, help="do not start")
        group.add_argument("--frontend-silent", type=float, help="after so long an HTTP process hangs")
        group.add_argument(
            "--engine", type=json.loads, default={}, help="further arguments of FakeEngine, in JSON"
        )

    def engine_spec(self, model_dir: Path, args: argparse.Namespace) -> EngineSpec:
        if args.max_model_len < 1:
            raise ValueError(f"--max-model-len is {args.max_model_len}, it must be at least 1")
        if args.frontend_silent is not None:
            from openinfer.frontend import frontends

            frontends.SILENT_S = args.frontend_silent
        kwargs = {
            "model": model_dir.name,
            "max_model_len": args.max_model_len,
            "start_delay_s": args.start_delay,
            "step_delay_s": args.step_delay,
            "start_error": args.start_error,
            **args.engine,
        }
        return EngineSpec("openinfer.frontend.testing:FakeEngine", kwargs)

    def replica_specs(self, model_dir: Path, args: argparse.Namespace, count: int) -> list[EngineSpec]:
        return [self.engine_spec(model_dir, args)] * count


if __name__ == "__main__":
    sys.exit(serve(FakeRecipe(), sys.argv[1:], "fake_recipe"))
