"""Several engines of one model behind one client: requests that begin alike go to one engine, load is spread."""

import asyncio
import hashlib
import itertools
import json
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence

import msgspec

from openinfer.frontend.client import Delta, EngineClient, Health, Sink
from openinfer.frontend.contract import (
    AdapterState,
    Command,
    EngineInfo,
    EngineStats,
    LoadAdapter,
    Request,
    Sleep,
    SlowTraces,
    StepTimes,
    UnloadAdapter,
    UpdateWeights,
    WakeUp,
)
from openinfer.frontend.errors import EngineDeadError, Unsupported

__all__ = ["Prefixes", "ReplicatedClient", "summed"]

PREFIX_TOKENS = 128
"""Prompts are compared at multiples of this length."""
MAX_PREFIXES = 200_000
"""Prefixes that are remembered; the least recently used are forgotten first."""
SLACK = 8
"""A replica may have this many requests more than the emptiest, and half as many again, before its prefixes are
computed elsewhere."""


class Prefixes:
    """The replicas that had each prefix of the last prompts."""

    def __init__(self) -> None:
        self._owners: OrderedDict[bytes, set[int]] = OrderedDict()

    def names(self, request: Request) -> list[bytes]:
        """Names of a prompt's prefixes, the shortest first. O(prompt)."""
        salt = f"{request.cache_salt}\0{request.adapter}".encode()
        running, tokens = hashlib.blake2b(salt, digest_size=16), array("Q", request.prompt_token_ids)
        names = []
        for end in range(PREFIX_TOKENS, len(tokens) + 1, PREFIX_TOKENS):
            running.update(tokens[end - PREFIX_TOKENS : end])
            names.append(running.digest())
        return names

    def owners(self, names: Sequence[bytes]) -> set[int]:
        """The replicas that had the longest of these prefixes."""
        return next((found for name in reversed(names) if (found := self._owners.get(name))), set())

    def note(self, names: Sequence[bytes], replica: int) -> None:
        """A replica computes a prompt with these prefixes."""
        for name in names:
            self._owners.setdefault(name, set()).add(replica)
            self._owners.move_to_end(name)
        while len(self._owners) > MAX_PREFIXES:
            self._owners.popitem(last=False)

    def forget(self, replica: int) -> None:
        """A replica has lost its cache."""
        for owners in self._owners.values():
            owners.discard(replica)


class ReplicatedClient:
    """An EngineClient over the clients of several engines of one model.

    replicas: clients that bring their engine back (RestartingClient). While one is down the others serve; its own
    requests fail, as they do with one engine. died() returns when all are lost for good.
    """

    def __init__(self, replicas: Sequence[EngineClient]) -> None:
        self._replicas = replicas
        self._ids = itertools.count(1)
        self._prefixes = Prefixes()
        self._owner: dict[int, int] = {}  # replica by live request
        self._load = [0] * len(replicas)  # live requests
        self._taken = [0] * len(replicas)  # requests so far
        self._was_up = [True] * len(replicas)

    @property
    def info(self) -> EngineInfo:
        first, capacity = (
            self._replicas[0].info,
            sum(replica.info.kv_capacity_tokens for replica in self._replicas),
        )
        return msgspec.structs.replace(first, kv_capacity_tokens=capacity)

    async def start(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for replica in self._replicas:
                    group.create_task(replica.start())
        except ExceptionGroup as errors:
            await self.close()
            raise errors.exceptions[0] from None

    async def close(self) -> None:
        await asyncio.gather(*(replica.close() for replica in self._replicas))

    def new_id(self) -> int:
        return next(self._ids)

    def submit(self, request: Request, sink: Sink) -> None:
        names = self._prefixes.names(request)
        up = [index for index, replica in enumerate(self._replicas) if self._is_up(index, replica)]
        if not up:
            raise EngineDeadError(self.health().detail)
        chosen = self._choose(up, self._prefixes.owners(names))

        def counted(delta: Delta) -> None:
            if delta.terminal is not None and self._owner.pop(request.id, None) is not None:
                self._load[chosen] -= 1
            sink(delta)

        self._replicas[chosen].submit(request, counted)
        self._owner[request.id] = chosen
        self._load[chosen] += 1
        self._taken[chosen] += 1
        self._prefixes.note(names, chosen)

    def _is_up(self, index: int, replica: EngineClient) -> bool:
        up = replica.health().ok
        if self._was_up[index] and not up:
            self._prefixes.forget(index)
        self._was_up[index] = up
        return up

    def _choose(self, up: Sequence[int], owners: set[int]) -> int:
        """The replica with the prompt's longest prefix, unless it is much busier than the emptiest."""
        emptiest = min(up, key=lambda index: (self._load[index], self._taken[index]))
        with_prefix = min(owners & set(up), key=self._load.__getitem__, default=emptiest)
        least, load = self._load[emptiest], self._load[with_prefix]
        return emptiest if load > least + SLACK and load > 1.5 * least else with_prefix

    def abort(self, request_id: int) -> None:
        if request_id in self._owner:
            self._replicas[self._owner[request_id]].abort(request_id)

    async def control(self, command: Command) -> str | None:
        if isinstance(command, UpdateWeights) or (isinstance(command, Sleep) and command.level > 1):
            raise Unsupported(
                "this is not possible with --data-parallel-size: a replica that is restarted would have other weights"
            )
        down = [replica.health().detail for replica in self._replicas if not replica.health().ok]
        if down:  # the replicas must stay alike
            raise EngineDeadError(f"a replica is down, so none does this: {down[0]}; try again")
        asked = self._replicas
        undo: Command | None = None
        if isinstance(command, Sleep | WakeUp):
            asleep = isinstance(command, WakeUp)
            asked = [one for one in asked if one.stats().asleep == asleep] or asked
            undo = None if asleep else WakeUp()
        if isinstance(command, LoadAdapter) and command.name not in {
            one.name for one in self.stats().adapters
        }:
            undo = UnloadAdapter(command.name)
        answers = await _all_or_none(asked, command, undo)
        if isinstance(command, SlowTraces):
            parts = [json.loads(answer or "{}") for answer in answers]
            traces = [trace for part in parts for trace in part.get("traces", ())]
            return json.dumps({"found": sum(part.get("found", 0) for part in parts), "traces": traces})
        return answers[0]

    def stats(self) -> EngineStats:
        return summed([replica.stats() for replica in self._replicas])

    def health(self) -> Health:
        found = [replica.health() for replica in self._replicas]
        down = [f"replica {index}: {one.detail}" for index, one in enumerate(found) if not one.ok]
        if len(down) == len(found):
            return Health(False, "; ".join(down))
        return Health(True, "; ".join(down) or "ok")

    async def died(self) -> str:
        return "; ".join(await asyncio.gather(*(replica.died() for replica in self._replicas)))


async def _all_or_none(
    asked: Sequence[EngineClient], command: Command, undo: Command | None
) -> list[str | None]:
    """The answers of all. Where one refuses, the others carry out `undo`, and its error is raised."""
    found = await asyncio.gather(*(one.control(command) for one in asked), return_exceptions=True)
    errors = [one for one in found if isinstance(one, BaseException)]
    if errors:
        done = [
            one for one, answer in zip(asked, found, strict=True) if not isinstance(answer, BaseException)
        ]
        if undo is not None:
            await asyncio.gather(*(one.control(undo) for one in done), return_exceptions=True)
        raise errors[0]
    return [answer for answer in found if not isinstance(answer, BaseException)]


def summed(parts: Sequence[EngineStats]) -> EngineStats:
    """The sums of the statistics of several engines."""
    total = EngineStats()
    for name in EngineStats.__struct_fields__:
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], bool):
            setattr(total, name, any(values))
        elif isinstance(values[0], str):
            setattr(total, name, next(filter(None, values), ""))
        elif isinstance(values[0], int):
            setattr(total, name, sum(values))
        elif isinstance(values[0], dict):
            counts: Counter[str] = Counter()
            for value in values:
                counts.update(value)
            setattr(total, name, dict(counts))
    total.accepted_by_position = [
        sum(counts) for counts in itertools.zip_longest(*(p.accepted_by_position for p in parts), fillvalue=0)
    ]
    times: dict[str, StepTimes] = {}
    for time in [time for part in parts for time in part.step_times]:
        one = times.get(time.key, StepTimes(time.key, 0, 0.0, 0.0))
        times[time.key] = StepTimes(
            time.key,
            one.steps + time.steps,
            one.predicted_s + time.predicted_s,
            one.measured_s + time.measured_s,
        )
    total.step_times = list(times.values())
    states: dict[str, AdapterState] = {}
    for state in [state for part in parts for state in part.adapters]:
        known = states.get(state.name, AdapterState(state.name, state.path, 0, 0))
        states[state.name] = AdapterState(
            state.name, state.path, known.running + state.running, known.waiting + state.waiting
        )
    total.adapters = list(states.values())
    return total
