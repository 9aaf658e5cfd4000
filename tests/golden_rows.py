"""A whole prompt through a laid-out model, for comparisons with goldens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from openinfer.graph.runner import Model
from openinfer.kernels import CpuPack, Op, apply_writes
from openinfer.tensor import Device, Stream

BLOCKS = {
    "block_tables": [*range(1, 65)],
    "window_tables": [3, 1, 4, 2, 8, 6, 5, 7],
    "entry_tables": [2, 7, 1, 8, 3, 4, 5, 6],
}


class TapPack:
    """The cpu pack, keeping a copy of a stream wherever an op has changed it. changed: the stream by the op's name."""

    def __init__(self, changed: Mapping[str, str]) -> None:
        self.inner, self.changed = CpuPack(batch_invariant=True), changed
        self.streams: list[np.ndarray[Any, Any]] = []

    def run(self, op: Op[Any], args: Any) -> None:
        self.inner.run(op, args)
        if op.name in self.changed:
            self.streams.append(getattr(args, self.changed[op.name]).numpy().copy())


def start_row(model: Model, prompt: list[int]) -> None:
    """Put a sequence into slot 1, with one step that feeds its whole prompt."""
    rows = model.batch.rows
    rows.set("alive", 1, 1)
    rows.set("limits", 1, 1024)
    rows.write("stop_ids", 1, [-1] * 20)
    for table in model.tables:
        if table is None:
            rows.set("state_from", 1, 1)
            rows.set("state_to", 1, 1)
        else:
            rows.write(table, 1, BLOCKS[table])
    rows.set("slots", 0, 1)
    rows.write("q_starts", 0, [0, len(prompt)])
    rows.set("emits", 0, 1)
    rows.write("prompt", 0, prompt)
    for _ in rows.uploads(Stream(Device("cpu"))):
        apply_writes(CpuPack(), words=rows.words, writes=rows.writes)


def last_logits(model: Model, prompt: list[int]) -> np.ndarray[Any, Any]:
    """The logits after a prompt, in one step."""
    start_row(model, prompt)
    model.forward(CpuPack(batch_invariant=True), len(prompt), 1, len(prompt))
    return model.batch.logits.numpy()[0].copy()
