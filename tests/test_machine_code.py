"""scripts/compile_kernels.py reads fences in machine code: an atomic that is not relaxed is seen."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openinfer.kernels import Launch, NullPack, Store, Target, linear_add
from openinfer.kernels.testing import of_the_day
from openinfer.tensor import Arena, Device, bfloat16


@pytest.mark.parametrize("arch", of_the_day([90, 100]))
def test_a_fence_is_seen_where_parts_of_a_sum_wait_for_each_other(
    arch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "scripts")
    script: Any = importlib.import_module("compile_kernels")
    arena, pack = Arena(Device("null"), None), NullPack(Target(arch, 108))
    for columns in (4096, 64):  # of many a part each, of few all by one program
        h, x, weight = (arena.alloc(shape, bfloat16) for shape in ((8, columns), (8, 64), (64, columns)))
        linear_add(pack, x=x, h=h, weight=weight)
    several, one = (c.spec for call in pack.calls for c in call.commands if isinstance(c, Launch))
    assert dict(several.constants)["SPLIT"] > dict(one.constants)["SPLIT"] == 1
    store = Store(arch, cache=tmp_path / "cubins", folders=[])
    store.prepare([several, one])
    code, other = (script.Code.of(store.get(spec).cubin) for spec in (several, one))
    assert (code.fences, other.fences) == (1, 0)
    assert 16 < other.registers <= 255
    assert other.stack == 0
    assert not script.undeclared(several, code)
    silent = replace(several, signature=tuple(("sums", kind) for _, kind in several.signature))
    assert script.undeclared(silent, code)
    assert not script.undeclared(silent, other)
