"""What an op without device code answers when it is asked for its launches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openinfer.kernels import Command, ContractError, Target


def no_device_code(target: Target, **args: Any) -> Iterator[Command]:
    """Raises ContractError."""
    raise ContractError(
        f"an op called with {', '.join(args)} has no device code for sm_{target.arch} yet; run DeepSeek-V4 on the cpu"
    )
