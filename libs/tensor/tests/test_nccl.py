"""NcclRanks, over bindings that do nothing."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from openinfer.tensor import Device, NcclRanks, nccl


def test_nvlink_multicast_is_off_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    types = SimpleNamespace(Bfloat16=9, Float16=6, Float32=7, Uint8=1)
    found: list[str] = []

    def comm_init_rank(size: int, unique_id: int, rank: int) -> int:
        found.append(os.environ["NCCL_NVLS_ENABLE"])
        return 1

    bindings = SimpleNamespace(
        comm_init_rank=comm_init_rank, DataType=types, RedOp=SimpleNamespace(Sum=0), comm_abort=found.append
    )
    monkeypatch.setattr(nccl, "_bindings", lambda: bindings)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    ranks = NcclRanks(Device("cpu"), bytes(128), 0, 2)
    ranks.abort()
    ranks.abort()
    assert found == ["0", 1], "switched off before NCCL reads it, and given up once"
