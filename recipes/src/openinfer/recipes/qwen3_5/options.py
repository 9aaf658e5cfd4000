"""The flags of a Qwen3.5 engine."""

from dataclasses import dataclass
from typing import ClassVar

from openinfer.recipes.engine import Options, SetupError, option

STATE_DTYPES = ("float32", "bfloat16")
CHUNK = 64
"""Tokens after which a state may be kept: ops.gated_delta_net.STATE_CHUNK, which importing it here would make slow."""


@dataclass(frozen=True, slots=True)
class HybridOptions(Options):
    """The options of every engine, and how often snapshots of recurrent states are kept."""

    refused: ClassVar[dict[str, str]] = {}
    draft_methods: ClassVar[tuple[str, ...]] = (*Options.draft_methods, "mtp")

    snapshot_interval: int = option(
        512,
        f"tokens between snapshots of a prompt's state, where a cached prefix can end: a multiple of {CHUNK}",
        kind=int,
    )

    mamba_ssm_cache_dtype: str = option(
        "auto",
        "recurrent states between steps; bfloat16: half the memory, less exact; auto: as config.json says",
        choices=("auto", *STATE_DTYPES),
    )

    def check(self, recipe: str) -> None:
        """Raise SetupError; see Options."""
        Options.check(self, recipe)
        if self.snapshot_interval < CHUNK or self.snapshot_interval % CHUNK:
            raise SetupError(
                f"--snapshot-interval {self.snapshot_interval}: it must be a multiple of {CHUNK} tokens"
            )
