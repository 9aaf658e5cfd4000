"""The protocol between a recipe and the command line: its checkpoints, its flags, and how to build its engine."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from openinfer.frontend.contract import EngineSpec

__all__ = ["Recipe"]


class Recipe(Protocol):
    """Registered under the entry-point group `openinfer.recipes`: an object with these names.

    Importing it must stay light (no driver, no GPU): `--help` imports it. The engine is built from the
    EngineSpec, usually in another process.
    """

    @property
    def name(self) -> str:
        """Short name, as in `openinfer.recipes.<name>`."""

    def matches(self, config: Mapping[str, object]) -> bool:
        """Whether this recipe serves checkpoints with this config.json. Never raises for a foreign config."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the engine's flags (`--max-model-len`, ...) to the parser that holds the frontend's already."""

    def engine_spec(self, model_dir: Path, args: argparse.Namespace) -> "EngineSpec":
        """The engine for a checkpoint. Every flag of add_arguments ends up in the kwargs or is refused here.

        Raises ValueError or OSError with a one-line message for the user's mistakes.
        """

    def replica_specs(self, model_dir: Path, args: argparse.Namespace, count: int) -> "Sequence[EngineSpec]":
        """The engines of --data-parallel-size, each on devices of its own. Raises as engine_spec does."""
