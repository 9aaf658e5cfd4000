"""Where an engine's start-up goes: seconds by driver call and of cuBLASLt, beside the phases that the engine logs.

    python benchmarks/start_up.py MODEL_DIR [FLAGS OF THE ENGINE]

The rest of a phase is Python, or time in which the host waited for the disk.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()


class Timed:
    """A module or object whose calls are timed by name."""

    def __init__(self, inner: Any, seconds: Counter[str], calls: Counter[str]) -> None:
        self._inner, self._seconds, self._calls = inner, seconds, calls

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not name.startswith("cu") or isinstance(value, type):
            return value
        value = timed(value, name, self._seconds, self._calls)
        setattr(self, name, value)
        return value


def timed(
    call: Callable[..., Any], name: str, seconds: Counter[str], calls: Counter[str]
) -> Callable[..., Any]:
    """The call, with its time added up under `name`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            seconds[name] += time.perf_counter() - start
            calls[name] += 1

    return run


def main() -> None:
    """Build the engine and print."""
    from openinfer.cli import recipes
    from openinfer.kernels.packs import cublas, cuda_driver
    from openinfer.tensor import DriverNotFound, cuda

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path)
    model_dir = parser.parse_args(sys.argv[1:2]).model_dir  # the recipe of a model has the other flags
    recipe = recipes.find(model_dir)
    recipe.add_arguments(parser)
    spec = recipe.engine_spec(model_dir, parser.parse_args())
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6d ms %(name)s: %(message)s")
    print(f"imports: {time.perf_counter() - BEGAN:.2f} s", flush=True)
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    try:
        start = time.perf_counter()
        cuda._driver = Timed(cuda.driver(), seconds, calls)
        print(f"driver: {time.perf_counter() - start:.2f} s", flush=True)
    except DriverNotFound:
        print("no driver: the times are those of a CPU")
    for owner, name in ((cublas.CublasLt, "matmul"), (cublas.CublasLt, "_plan"), (cublas, "load_library")):
        setattr(owner, name, timed(getattr(owner, name), f"cuBLASLt {name}", seconds, calls))
    cuda_driver.CudaDriver.encode_tensor_map = timed(  # type: ignore[method-assign]
        cuda_driver.CudaDriver.encode_tensor_map, "encode_tensor_map", seconds, calls
    )
    start = time.perf_counter()
    engine = spec.build()
    print(f"build: {time.perf_counter() - start:.2f} s, of which")
    for name, spent in seconds.most_common(16):
        print(f"  {spent:7.3f} s {calls[name]:7} calls {name}")
    engine.close()


if __name__ == "__main__":
    main()
