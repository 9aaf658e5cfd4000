"""Places: completes the events of tiers with what routers match blocks by: tokens, parent and adapter."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .events import AllBlocksCleared, BlockRemoved, BlockStored

Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(slots=True)
class _Block:
    """A block that is somewhere. tokens None: the pool never had it, so only its name is known."""

    media: tuple[str, ...] = ()
    tokens: "array[int] | None" = None
    parent: bytes | None = None
    lora_name: str | None = None
    salt: bytes = b""


class BlockPlaces:
    """Where each block is. A tier knows only the names of its blocks, but a router finds no block without its tokens.

    A block that a tier has from an earlier process is told when the pool has loaded it once; before, its tokens are
    not known. About 300 bytes a block.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, bytes], _Block] = {}

    def completed(self, events: Sequence[Event]) -> list[Event]:
        """These events, in order, as a router can use them. events: those of the pool before those of its tiers, of
        one moment: a block that is nowhere after the last of them is forgotten."""
        told: list[Event] = []
        seen: set[tuple[int, bytes]] = set()
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._blocks.clear()
                told.append(event)
                continue
            seen.update((event.group_idx, name) for name in event.block_hashes)
            if isinstance(event, BlockRemoved):
                told += self._removed(event)
            elif event.medium == "GPU":
                told += (event, *self._in_pool(event))
            else:
                told += self._in_tier(event)
        for key in seen:
            if key in self._blocks and not self._blocks[key].media:
                del self._blocks[key]
        return told

    def _in_pool(self, event: BlockStored) -> Iterator[BlockStored]:
        """Note what the pool knows of its blocks. Yields the events of tiers that waited for it."""
        size, parent = event.block_size, event.parent_block_hash
        for index, name in enumerate(event.block_hashes):
            block = self._blocks.setdefault((event.group_idx, name), _Block())
            waited = block.media if block.tokens is None else ()
            block.tokens = array("I", event.token_ids[index * size : (index + 1) * size])
            block.parent, block.lora_name, block.salt = parent, event.lora_name, event.salt
            if event.token_ids:  # snapshots have no parents
                parent = name
            for medium in waited:
                yield _told(block, replace(event, block_hashes=[name], medium=medium))
            _add(block, "GPU")

    def _in_tier(self, event: BlockStored) -> Iterator[BlockStored]:
        for name in event.block_hashes:
            block = self._blocks.setdefault((event.group_idx, name), _Block())
            _add(block, event.medium or "")
            if block.tokens is not None:
                yield _told(block, replace(event, block_hashes=[name]))

    def _removed(self, event: BlockRemoved) -> list[BlockRemoved]:
        """The event without blocks that no event has told."""
        names = []
        for name in event.block_hashes:
            block = self._blocks.get((event.group_idx, name))
            if block is None or event.medium not in block.media:
                continue
            block.media = tuple(medium for medium in block.media if medium != event.medium)
            if block.tokens is not None:
                names.append(name)
        return [replace(event, block_hashes=names)] if names else []


def _add(block: _Block, medium: str) -> None:
    if medium not in block.media:
        block.media += (medium,)


def _told(block: _Block, event: BlockStored) -> BlockStored:
    """The event of one block with what the pool knew of it."""
    return replace(
        event,
        parent_block_hash=block.parent,
        token_ids=list(block.tokens or ()),
        lora_name=block.lora_name,
        salt=block.salt,
    )
