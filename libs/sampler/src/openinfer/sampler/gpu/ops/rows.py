"""The results of the sampling ops for a row."""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

NO_TOKEN = -1
"""In place of a token: the row does not sample."""

UNSOUND = -2
"""In place of a token: no token can be drawn from the row's logits."""


class RowStatus(IntEnum):
    """The state of a row after a step: the second column of `advance`'s result."""

    IDLE = 0
    """Dead, or without tokens in the step; nothing was touched."""
    RUNNING = 1
    STOP = 2
    """Ended: the token is among the row's stop ids."""
    LENGTH = 3
    """Ended: the sequence, its new token included, is as long as it may be."""
    FAILED = 4
    """Ended: no token could be drawn (NaN or +inf among the logits, or nothing left to draw)."""
    DRAFTED_STOP = 5
    """Ended like STOP, and the token is the row's next draft, as `accept` found."""


class Adjustment(IntFlag):
    """The kinds of changes to a row's logits before a token is chosen: the bits of the field `adjusts`."""

    ALLOWED = 1
    BAD_WORDS = 2
    BIAS = 4
    PENALTIES = 8
