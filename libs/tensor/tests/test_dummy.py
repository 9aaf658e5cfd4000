"""Checkpoints of random values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from openinfer.tensor import (
    Arena,
    CheckpointError,
    Conversion,
    Device,
    DummyCheckpoint,
    Stream,
    TensorLoad,
    bfloat16,
    float8_e4m3fn,
    float8_e8m0fnu,
    float32,
    int8,
    int64,
    load_tensors,
)

EXPECTED = {
    "w": ((300, 70), (float32, bfloat16)),
    "norm.weight": ((70,), (bfloat16,)),
    "codes": ((256, 384), (float8_e4m3fn,)),
    "codes_scale_inv": ((2, 3), (float32,)),
    "e8m0": ((2, 3), (float8_e8m0fnu,)),
    "fp4": ((4, 64), (int8,)),
    "table": ((50, 6), (int64,)),
}


@pytest.fixture
def dummy() -> DummyCheckpoint:
    made = DummyCheckpoint(Path("model"))
    made.require(EXPECTED, ignore=["mtp.*"])
    return made


def test_values_are_valid_in_every_dtype(dummy):
    assert list(dummy) == list(EXPECTED)
    assert dummy.info("w").dtype == bfloat16
    w, norm = (dummy.array(name).astype(np.float32) for name in ("w", "norm.weight"))
    assert abs(w.std() - 0.02) < 0.001
    assert abs(norm.mean() - 1) < 0.1
    codes = dummy.array("codes").astype(np.float32)
    assert np.isfinite(codes).all()
    assert 0.9 < codes.std() < 1.1
    assert (dummy.array("codes_scale_inv") == np.float32(0.02)).all()
    assert (dummy.array("e8m0").astype(np.float32) == 2.0**-6).all()
    assert len(np.unique(dummy.array("fp4"))) > 100
    assert (dummy.array("table") == np.arange(6)).all()
    assert (dummy.array("w") == dummy.array("w")).all()


def test_tensors_of_other_names_differ():
    """Alike layers bring all tokens to the same experts."""
    dummy = DummyCheckpoint(Path("model"))
    dummy.require(dict.fromkeys(("layers.0.w", "layers.1.w"), ((300, 70), (bfloat16,))))
    first, second = (dummy.array(f"layers.{n}.w").astype(np.float32) for n in range(2))
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.05


def test_a_conversion_of_a_part_makes_no_more_values(dummy, monkeypatch):
    """As experts of one tensor are quantised."""
    asked, read = [], DummyCheckpoint.read_into

    def counted(self, name, out, start=0):
        asked.append(out.nbytes)
        read(self, name, out, start)

    whole = dummy.array("w")[20:30].astype(np.float32)
    monkeypatch.setattr(DummyCheckpoint, "read_into", counted)
    place = Arena(Device("cpu"), 1 << 20).alloc((10, 70), float32)
    made = Conversion(("w",), place, np.asarray, ((slice(20, 30),),)).converted(dummy)
    assert (made == whole).all()
    assert sum(asked) == 10 * 70 * 2


def test_a_part_has_the_values_of_the_whole(dummy):
    """As ranks load it."""
    arena, stream = Arena(Device("cpu"), 1 << 20), Stream(Device("cpu"))
    part = arena.alloc((300, 20), bfloat16)
    report = load_tensors(dummy, [TensorLoad("w", part, (slice(None), slice(10, 30)))], stream)
    assert report.bytes == 300 * 20 * 2
    assert (part.numpy() == dummy.array("w")[:, 10:30]).all()
    with pytest.raises(CheckpointError, match="bytes 41990 to 42010 are not there"):
        dummy.read_into("w", np.empty(20, np.uint8), 41990)
    with pytest.raises(CheckpointError, match="is not in this checkpoint"):
        dummy.array("other")


def test_parts_of_a_large_tensor_are_not_alike() -> None:
    """Heads and groups of heads are powers of two rows. Alike, one rank's part would do for another's."""
    dummy = DummyCheckpoint(Path("model"))
    dummy.require({"w": ((1 << 15, 1024), (float8_e4m3fn,))})
    first, other = np.empty(1 << 16, np.uint8), np.empty(1 << 16, np.uint8)
    dummy.read_into("w", first)
    for rows in (512, 4096, 8192, 16384):
        dummy.read_into("w", other, start=rows * 1024)
        assert (first != other).mean() > 0.5
