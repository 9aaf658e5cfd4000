"""Recipe: the interface between a recipe and the command line. Importing it imports no model code and no driver."""

import argparse
import dataclasses
import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from openinfer.recipes.engine.config_fields import load_config
from openinfer.recipes.engine.options import O, add_arguments

if TYPE_CHECKING:
    from openinfer.frontend.contract import EngineSpec
    from openinfer.recipes.engine.blueprint import Blueprint
    from openinfer.recipes.engine.gguf import GgufFormat
    from openinfer.tensor import Checkpoint

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """The files that a model is made from: config.json, the EOS ids of generation_config.json, and perhaps the tensors.

    A plan needs no tensors: without a checkpoint a recipe takes the formats that config.json implies.
    eos: the ids in the form of the file; None: the ids of config.json count.
    """

    config: Json
    eos: object = None
    checkpoint: "Checkpoint | None" = None

    @classmethod
    def read(cls, model_dir: Path) -> "Source":
        """From a checkpoint directory. Raises UnsupportedModel."""
        return cls(*load_config(model_dir))


class Recipe(ABC, Generic[O]):
    """One family of models. An object of a subclass is registered under the entry-point group `openinfer.recipes`.
    Other processes make objects of the same class, so it takes no arguments.

    Every command of `openinfer` works with it: serve, bench, explain, tune, compile, selftest.
    """

    name: str
    """Short, as users see it."""
    options: type[O]
    """The dataclass of the recipe's flags."""
    small: Json
    """config.json of a model with one layer of each kind, as small as the kernels take, for tests and `bench idle`."""

    @abstractmethod
    def matches(self, config: Json) -> bool:
        """Whether config.json is one of this family's. Never raises."""

    @abstractmethod
    def blueprint(self, source: Source, options: O, *, ranks: int = 1, rank: int = 0) -> "Blueprint[Any]":
        """The model of a source. ranks: the number of GPUs that share it; above 1, this is the part of GPU `rank` of
        them. Raises UnsupportedModel, SetupError."""

    def published(self) -> Mapping[str, Json]:
        """config.json of published models by a short name; wheels may carry kernels for these."""
        return {}

    def gguf(self) -> "Mapping[str, GgufFormat]":
        """How GGUF files of this family are read, by their `general.architecture`."""
        return {}

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the engine's flags, named as users of vLLM know them."""
        add_arguments(self.options, parser, self.name)

    def parsed(self, args: argparse.Namespace) -> O:
        """The options that the command line gave. Raises SetupError."""
        names = [field.name for field in dataclasses.fields(self.options)]
        options = self.options(**{name: getattr(args, name) for name in names})
        options.check(self.name)
        return options

    def engine_spec(self, model_dir: Path, args: argparse.Namespace) -> "EngineSpec":
        """The engine for a checkpoint. Raises SetupError."""
        return self._spec(model_dir, self.parsed(args))

    def replica_specs(self, model_dir: Path, args: argparse.Namespace, count: int) -> "list[EngineSpec]":
        """The engines of --data-parallel-size, each on devices of its own. Raises SetupError."""
        from openinfer.recipes.engine.devices import split

        return [self._spec(model_dir, options) for options in split(self.parsed(args), count)]

    def _spec(self, model_dir: Path, options: O) -> "EngineSpec":
        from openinfer.frontend.contract import EngineSpec

        which = {"recipe": self.known_as, "model_dir": str(model_dir)}
        return EngineSpec("openinfer.recipes.engine.startup:build_named", which | dataclasses.asdict(options))

    @property
    def known_as(self) -> tuple[str, str]:
        """Module and name of the class, for `named` in another process."""
        return type(self).__module__, type(self).__qualname__


def named(known_as: Sequence[str]) -> Recipe[Any]:
    module, name = known_as
    recipe: Recipe[Any] = getattr(importlib.import_module(module), name)()
    return recipe
