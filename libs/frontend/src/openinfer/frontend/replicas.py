"""Several engines of one model behind one client: requests that begin alike go to one engine, load is spread."""

import asyncio
import hashlib
import itertools
import json
import logging
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from openinfer.frontend import contract
from openinfer.frontend.client import EngineClient, Health, OutputDelta, Sink
from openinfer.frontend.errors import EngineDeadError, Unsupported, one_line

PREFIX_TOKENS = 128
"""Prompts are compared at multiples of this length."""
MAX_PREFIXES = 200_000
"""Prefixes that are remembered, at 400 bytes each; the least recently used are forgotten first."""
SLACK = 8
"""A replica may have this many requests more than the emptiest, or half as many again, before others share its work."""

_log = logging.getLogger(__name__)
_Part = TypeVar("_Part", bound=msgspec.Struct)


class Prefixes:
    """The replicas that had each prefix of the last prompts."""

    def __init__(self) -> None:
        self._owners: OrderedDict[bytes, set[int]] = OrderedDict()

    def names(self, request: contract.Request) -> list[bytes]:
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

    A command is carried out by all replicas or by none: control() raises the refusals by replica.
    """

    def __init__(self, replicas: Sequence[EngineClient]) -> None:
        self._replicas = replicas
        self._ids = itertools.count(1)
        self._prefixes = Prefixes()
        self._owner: dict[int, int] = {}  # replica by live request
        self._load = [0] * len(replicas)  # live requests
        self._taken = [0] * len(replicas)  # requests so far
        self._was_up = [True] * len(replicas)
        self._adapting = asyncio.Lock()

    @property
    def info(self) -> contract.EngineInfo:
        capacity = sum(replica.info.kv_capacity_tokens for replica in self._replicas)
        return msgspec.structs.replace(self._replicas[0].info, kv_capacity_tokens=capacity)

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

    def submit(self, request: contract.Request, sink: Sink) -> None:
        names = self._prefixes.names(request)
        up = [index for index, replica in enumerate(self._replicas) if self._is_up(index, replica)]
        if not up:
            raise EngineDeadError(self.health().detail)
        if request.adapter:  # a replica that was restarted may lack it
            up = [index for index in up if request.adapter in self._adapters(index)] or up
        chosen = self._choose(up, self._prefixes.owners(names))

        def counted(delta: OutputDelta) -> None:
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

    def _adapters(self, index: int) -> dict[str, str]:
        return {state.name: state.path for state in self._replicas[index].stats().adapters}

    async def control(self, command: contract.Command) -> str | None:
        if isinstance(command, contract.UpdateWeights) or (
            isinstance(command, contract.Sleep) and command.level > 1
        ):
            raise Unsupported(
                "this is not possible with --data-parallel-size: a replica that is restarted would have other weights"
            )
        if isinstance(command, contract.LoadAdapter | contract.UnloadAdapter):
            async with self._adapting:  # two at once could come to the replicas in different orders
                return await self._control(command)
        return await self._control(command)

    async def _control(self, command: contract.Command) -> str | None:
        asked = dict(enumerate(self._replicas))
        for index, replica in asked.items():
            if not replica.health().ok:  # the replicas must stay alike
                why = f"replica {index} is down, so none does this: {replica.health().detail}; try again"
                raise EngineDeadError(why)
        if isinstance(command, contract.Sleep | contract.ResetPrefixCache) and any(self._load):
            # An idle replica would forget its prefixes before a busy one refuses, and nothing brings them back.
            raise Unsupported(
                f"{sum(self._load)} requests run or wait; this is possible only while none does"
            )
        undo: dict[int, contract.Command] = {}
        if isinstance(command, contract.Sleep | contract.WakeUp):
            asleep = isinstance(command, contract.WakeUp)
            asked = {index: one for index, one in asked.items() if one.stats().asleep == asleep} or asked
            undo = {} if asleep else dict.fromkeys(asked, contract.WakeUp())
        if isinstance(command, contract.LoadAdapter | contract.UnloadAdapter):
            had = {index: self._adapters(index).get(command.name) for index in asked}
            if isinstance(command, contract.UnloadAdapter):
                asked = {index: one for index, one in asked.items() if had[index] is not None} or asked
            name, unload = command.name, contract.UnloadAdapter(command.name)
            undo = {
                index: unload if path is None else contract.LoadAdapter(name, path, in_place=True)
                for index, path in had.items()
            }
        answers = await _all_or_none(asked, command, undo)
        if isinstance(command, contract.SlowTraces):
            parts = [json.loads(answer or "{}") for answer in answers]
            traces = [trace for part in parts for trace in part.get("traces", ())]
            return json.dumps({"found": sum(part.get("found", 0) for part in parts), "traces": traces})
        return answers[0]

    def stats(self) -> contract.EngineStats:
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
    asked: Mapping[int, EngineClient], command: contract.Command, undo: Mapping[int, contract.Command]
) -> list[str | None]:
    """The answers of all. Where one refuses, the others carry out their `undo`. Raises Unsupported or EngineDeadError,
    as the first refusal, with all refusals and what could not be undone."""
    found = await _tell(asked, dict.fromkeys(asked, command))
    errors = {index: one for index, one in found.items() if isinstance(one, BaseException)}
    if not errors:
        return [one for one in found.values() if not isinstance(one, BaseException)]
    why = _by_cause(errors)
    undone = await _tell(asked, {index: one for index, one in undo.items() if index in found.keys() - errors})
    kept = {index: one for index, one in undone.items() if isinstance(one, BaseException)}
    for index in undone.keys() - kept:
        match command, undo[index]:
            case contract.LoadAdapter(path=new), contract.LoadAdapter(path=old) if Path(new) == Path(old):
                kept[index] = Unsupported(f"it has the values that {old} has now")  # those before are gone
    if kept:
        why = f"{why}; not undone: {_by_cause(kept)}"
        _log.error("the replicas are no longer alike after %r: %s", command, why)
    first = next(iter(errors.values()))
    if not isinstance(first, Unsupported | EngineDeadError):
        raise first
    raise type(first)(why) from first


async def _tell(
    asked: Mapping[int, EngineClient], commands: Mapping[int, contract.Command]
) -> dict[int, str | BaseException | None]:
    answers = (asked[index].control(one) for index, one in commands.items())
    found = await asyncio.gather(*answers, return_exceptions=True)
    return dict(zip(commands, found, strict=True))


def _by_cause(errors: Mapping[int, BaseException]) -> str:
    """Each cause once, after the replicas that have it."""
    replicas: dict[str, list[str]] = {}
    for index, error in sorted(errors.items()):
        replicas.setdefault(one_line(error), []).append(f"replica {index}")
    return "; ".join(f"{', '.join(names)}: {cause}" for cause, names in replicas.items())


def summed(parts: Sequence[contract.EngineStats]) -> contract.EngineStats:
    """The sums of the statistics of several engines."""
    total = contract.EngineStats()
    for name in contract.EngineStats.__struct_fields__:
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
    total.step_times = _by_name(time for part in parts for time in part.step_times)
    total.adapters = _by_name(state for part in parts for state in part.adapters)
    return total


def _by_name(parts: Iterable[_Part]) -> list[_Part]:
    """One for each name, which is the first field, with the sums of the numbers."""
    found: dict[str, _Part] = {}
    for part in parts:
        name, *others = part.__struct_fields__
        key = getattr(part, name)
        numbers = [other for other in others if not isinstance(getattr(part, other), str)]
        if key in found:
            sums = {one: getattr(found[key], one) + getattr(part, one) for one in numbers}
            part = msgspec.structs.replace(part, **sums)
        found[key] = part
    return list(found.values())
