"""Items of answers that a client may name instead of sending them again: the last ones, in this process."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from openinfer.frontend.errors import APIError
from openinfer.frontend.http.shapes import encode

__all__ = ["KeptItems"]

MAX_ITEMS = 4096
MAX_BYTES = 32 << 20


class KeptItems:
    """Items of answers by id, the newest last. The oldest are dropped when the items are too many or too large."""

    def __init__(self) -> None:
        self._items: OrderedDict[str, tuple[dict[str, Any], int]] = OrderedDict()
        self._bytes = 0

    def keep(self, items: Iterable[dict[str, Any]]) -> None:
        """Keep the items of an answer that is complete."""
        for item in items:
            size = len(encode(item))
            self._items[item["id"]] = item, size
            self._bytes += size
        while len(self._items) > MAX_ITEMS or self._bytes > MAX_BYTES:
            _, (_, size) = self._items.popitem(last=False)
            self._bytes -= size

    def find(self, identity: object, where: str) -> dict[str, Any]:
        """The item of an item_reference. Raises APIError (400)."""
        if isinstance(identity, str) and identity in self._items:
            return self._items[identity][0]
        raise APIError(
            f"{where} is an item_reference to {identity!r}, which this server does not keep (any more): send the item "
            "itself, as clients do with store: false",
            param="input",
            code="item_not_found",
        )
