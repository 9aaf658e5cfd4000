"""Places: conversions fill tensors in order, with a bounded number of them made ahead."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from openinfer.tensor import Arena, Checkpoint, CheckpointError, Device, Places, Stream, float32, places

COUNT = 40


@pytest.fixture
def checkpoint(tmp_path: Path) -> Any:
    save_file({f"w{n}": np.full(4, n, np.float32) for n in range(COUNT)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as opened:
        yield opened


def test_conversions_are_made_ahead_but_not_all_of_them(checkpoint: Checkpoint, monkeypatch: Any) -> None:
    monkeypatch.setattr(places, "NUM_THREADS", 3)
    made, ahead, seen = [], [], []
    p = Places(Arena(Device("cpu"), 1 << 16), float32)

    def convert(values: Any) -> Any:
        made.append(values)
        return values + 1

    tensors = [p.converted(f"w{n}", 4, convert=convert) for n in range(COUNT)]

    def progress(done: int, total: int) -> None:
        seen.append(done)
        ahead.append(len(made) - len(seen))
        assert total == COUNT * 16

    p.load(checkpoint, Stream(Device("cpu")), progress)
    assert [tensor.numpy()[0] for tensor in tensors] == [n + 1 for n in range(COUNT)]
    assert seen == [16 * (n + 1) for n in range(COUNT)]
    assert max(ahead) <= 6


def test_a_conversion_that_fails_ends_the_load(checkpoint: Checkpoint) -> None:
    p = Places(Arena(Device("cpu"), 1 << 16), float32)

    def refuse(values: Any) -> Any:
        if values[0] == 7:
            raise ValueError("it is seven")
        return values

    for n in range(COUNT):
        p.converted(f"w{n}", 4, convert=refuse)
    with pytest.raises(CheckpointError, match="'w7': it is seven"):
        p.load(checkpoint, Stream(Device("cpu")))


@pytest.mark.parametrize("asked", ["names", "load"])
def test_what_is_put_off_is_there_once_it_is_needed(checkpoint: Checkpoint, asked: str) -> None:
    p = Places(Arena(Device("cpu"), 1 << 16), float32)
    first, noted = p.plain("w1", 4), []

    def note() -> None:
        noted.append(p.plain("w2", 4))

    p.later(note)
    assert len(p.loads) == 1
    if asked == "names":
        assert [*p.names()] == ["w1", "w2"]
    p.load(checkpoint, Stream(Device("cpu")))
    assert [tensor.numpy()[0] for tensor in (first, *noted)] == [1, 2]
