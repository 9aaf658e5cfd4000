"""The hooks of training in an engine: commands to its weights and memory, while no request runs."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openinfer.frontend.contract import EngineStats, Rejected, Sleep, UpdateWeights, WakeUp
from openinfer.frontend.errors import Unsupported
from openinfer.graph import NotPossible
from openinfer.graph.runner import WeightsDesk
from openinfer.kvpool import Pool
from openinfer.recipes.engine.limits import Limits
from openinfer.tensor import Arena, Checkpoint, Stream

if TYPE_CHECKING:
    from openinfer.recipes.engine.blueprint import Blueprint


def desk_of(
    blueprint: Blueprint[Any], model: Any, arena: Arena, stream: Stream, limits: Limits, ranks: int
) -> WeightsDesk:
    """The desk of a model that is laid out in `arena`."""
    cache = [tensor for group in blueprint.cache(model) for tensor in group]
    check, load = partial(_validate, blueprint, limits), partial(blueprint.load, model)
    refused = f"the weights are spread over {ranks} ranks; this is possible on one GPU" if ranks > 1 else ""
    return WeightsDesk(check, load, arena, stream, cache, refused)


def _validate(blueprint: Blueprint[Any], limits: Limits, checkpoint: Checkpoint) -> None:
    blueprint.validate(checkpoint, limits)


class Training:
    """Commands to an engine's desk. None: an engine that start-up did not make."""

    def __init__(self, desk: WeightsDesk | None) -> None:
        self.desk = desk
        self._unique = os.urandom(8)  # a disk outlives the engine, and a version may name other weights then

    def carry_out(self, command: UpdateWeights | Sleep | WakeUp, pool: Pool, requests: int) -> None:
        """Raises Unsupported while requests run or wait, and for what the desk cannot do."""
        if self.desk is None or requests or not pool.reset_prefix_cache():
            raise Unsupported(f"{requests} requests run or wait; this is possible only while none does")
        try:
            match command:
                case UpdateWeights():
                    self.desk.update(Path(command.path), command.version)
                case Sleep():
                    self.desk.sleep(command.level)
                case WakeUp():
                    self.desk.wake()
        except NotPossible as error:
            raise Unsupported(str(error)) from error

    def salt(self, salt: bytes) -> bytes:
        """The salt of prefixes that these weights made: blocks outside the pool must not match others."""
        version = self.desk.version if self.desk is not None else ""
        return salt + b"\0weights " + version.encode() + self._unique if version else salt

    def refusal(self, request_id: int) -> Rejected | None:
        """The refusal of a request while the engine sleeps."""
        if self.desk is None or not self.desk.asleep:
            return None
        return Rejected(request_id, "the engine sleeps; POST /wake_up first", "unsupported")

    def tell(self, stats: EngineStats) -> None:
        """Put the state into the statistics."""
        if self.desk is not None:
            stats.weights_version, stats.asleep = self.desk.version, self.desk.asleep
