"""The adapters (LoRA) of an engine: their places on the device, and those that its flags name."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from openinfer.kernels.authoring import Adapter, Adapters, LinearPlaces, Projection
from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.engine.limits import Limits
from openinfer.tensor import Arena, Tensor, TensorLoad

if TYPE_CHECKING:
    from openinfer.recipes.engine.options import Options


def adapters_of(
    arena: Arena,
    limits: Limits,
    weights: Iterable[Tensor],
    own: LinearPlaces,
    whole: Callable[[], LinearPlaces],
    unused: tuple[str, ...] = (),
) -> Adapters | None:
    """Places for adapters of these weights, of which `own` says what they hold; None in an engine without adapters.
    whole: the places of the model of which this is a rank's part. unused: beginnings of modules that are not run."""
    if limits.adapters is None:
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    for one in _projections(whole().layers):  # a layer may be several
        end = tuple(part.stop for part in one.source)
        shapes[one.module] = max(end, shapes.get(one.module, end))
    projections = _projections(own.layers)
    return Adapters.allocate(
        arena, limits.adapters, weights, projections, dtype=limits.dtype, unused=unused, shapes=shapes
    )


def _projections(loads: Iterable[TensorLoad]) -> list[Projection]:
    return [Projection(load.name.removesuffix(".weight"), load.dst, load.source) for load in loads]


def read_modules(options: "Options", adapters: Adapters | None) -> list[Adapter]:
    """The adapters of --lora-modules; or of dummy weights, one a place. Raises SetupError, InvalidAdapter."""
    if adapters is None:
        if options.enable_lora:
            raise SetupError("--enable-lora: this model's recipe runs no adapters; leave the flag out")
        return []
    if options.load_format == "dummy" and not options.lora_modules:
        return [adapters.dummy(f"dummy-{place}") for place in range(1, adapters.sizes.places + 1)]
    return [adapters.read(name, Path(path)) for name, path in _named(options.lora_modules)]


def _named(modules: Iterable[str]) -> Iterable[tuple[str, str]]:
    """(name, folder) of NAME=PATH, or of a JSON object with the keys name and path."""
    found: dict[str, str] = {}
    for module in modules:
        name, _, path = module.partition("=")
        if module.lstrip().startswith("{"):
            try:
                entry = json.loads(module)
                name, path = entry["name"], entry["path"]
            except (ValueError, KeyError, RecursionError) as error:
                raise SetupError(
                    f"--lora-modules {module[:200]}: {error}; name and path are needed"
                ) from None
        named = isinstance(name, str) and name.isprintable() and name.strip()
        if not (named and isinstance(path, str) and path):
            raise SetupError(f"--lora-modules {module!r}: give NAME=PATH, and a name that is printable")
        if name in found:
            raise SetupError(f"--lora-modules: the name {name!r} comes twice")
        found[name] = path
    return found.items()
