"""The hooks of training in an engine: commands to its weights and memory, while no request runs."""

from openinfer.frontend.contract import EngineStats, Rejected, Sleep, UpdateWeights, WakeUp
from openinfer.frontend.errors import Unsupported
from openinfer.graph import NotPossible
from openinfer.graph.runner import WeightsDesk
from openinfer.recipes.engine.offload import Cache


class Training:
    """Commands to an engine's desk."""

    def __init__(self, desk: WeightsDesk, cache: Cache) -> None:
        self.desk, self._pool, self._tiers = desk, cache.pool, cache.tiers

    def carry_out(self, command: UpdateWeights | Sleep | WakeUp, requests: int) -> None:
        """Raises Unsupported while requests run or wait, and for what the desk cannot do."""
        if requests or not self._pool.idle:
            raise Unsupported(f"{requests} requests run or wait; this is possible only while none does")
        try:
            match command:
                case UpdateWeights():
                    self.desk.update(command.path, command.version, self._forget)
                case Sleep():
                    self.desk.sleep(command.level, self._keep if command.level == 1 else self._forget)
                case WakeUp():
                    self.desk.wake()
        except NotPossible as error:
            raise Unsupported(str(error)) from error

    def _forget(self) -> None:
        self._pool.reset_prefix_cache()
        if self._tiers is not None:
            self._tiers.settle()

    def _keep(self) -> None:
        """Move cached prefixes to the tiers: the weights come again, so they stay true."""
        if self._tiers is None:
            self._forget()
        else:
            self._tiers.take_all(self._pool)
            self._tiers.settle()

    def salt(self, salt: bytes) -> bytes:
        """The salt of prefixes that these weights made: on a disk and at peers are blocks of others."""
        digest = self.desk.digest
        return salt + b"\0weights " + digest if digest else salt

    def refusal(self, request_id: int) -> Rejected | None:
        """The refusal of a request while the engine sleeps or has no weights."""
        why = self.desk.refusal
        return Rejected(request_id, why, "unsupported") if why else None

    def tell(self, stats: EngineStats) -> None:
        """Put the state into the statistics."""
        stats.weights_version, stats.asleep = self.desk.version, self.desk.asleep
        stats.weights_dropped, stats.refusal = self.desk.dropped, self.desk.refusal
