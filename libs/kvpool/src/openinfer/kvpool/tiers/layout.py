"""Layout: where the blocks of each group are in device memory, and how they lie in a record of another tier."""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

from openinfer.tensor import Stream, Tensor

from ..errors import InvalidTiers
from ..group import Group

ALIGNMENT = 4096
"""Bytes. Records begin and end at its multiples, because O_DIRECT wants that of a file, its offset and the memory."""


def huge(pages: mmap.mmap) -> None:
    """Ask the kernel for huge pages. The driver locks them in less time."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)


def align_up(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Span(NamedTuple):
    """A block's part in one tensor."""

    ptr: int
    """Address of block 0."""
    stride: int
    """Bytes from a block to the next."""
    nbytes: int
    offset: int
    """Place in the record."""


class Layout:
    """The memory of each group's blocks: tensors whose first axis is the block.

    cache: by group, one tensor or several. The caller keeps them alive. part: of the parts of a record, each with the
    bytes of a block, the one that these tensors have. Raises InvalidTiers where they do not have the
    group's num_blocks and block_bytes, or where a block is not contiguous.
    """

    def __init__(self, groups: Sequence[Group], cache: Sequence[Sequence[Tensor]], part: int = 0) -> None:
        if len(groups) != len(cache):
            raise InvalidTiers(f"{len(cache)} lists of tensors for {len(groups)} groups; give one for each")
        self._spans = [_spans(group, tensors, part) for group, tensors in zip(groups, cache, strict=True)]

    def copy(self, stream: Stream, group: int, block: int, record: int, kind: Literal["d2h", "h2d"]) -> None:
        """Put the copies between a block and the record at an address on a stream. kind: "d2h" or "h2d"."""
        for span in self._spans[group]:
            inside, outside = span.ptr + block * span.stride, record + span.offset
            ends = (outside, inside) if kind == "d2h" else (inside, outside)
            stream.copy_async(*ends, span.nbytes, kind)


def _spans(group: Group, tensors: Sequence[Tensor], part: int) -> list[Span]:
    start = part * group.block_bytes
    spans, offset = [], start
    for tensor in tensors:
        if tensor.shape[0] != group.num_blocks or not tensor[0].is_contiguous:
            raise InvalidTiers(
                f"group {group.name!r}: tensor {tensor.name!r} has shape {tensor.shape} and strides {tensor.strides}; "
                f"its first axis must be the {group.num_blocks} blocks, each contiguous"
            )
        nbytes = math.prod(tensor.shape[1:]) * tensor.itemsize
        if nbytes:
            spans.append(Span(tensor.ptr, tensor.strides[0] * tensor.itemsize, nbytes, offset))
        offset += nbytes
    if offset != start + group.block_bytes:
        raise InvalidTiers(
            f"group {group.name!r}: its tensors have {offset - start} bytes a block, {group.block_bytes} declared"
        )
    return spans
