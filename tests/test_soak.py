"""A server's memory does not grow with its requests; and the soak would see a kilobyte a request."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from module_files import module_at

SOAK = Path(__file__).parents[1] / "benchmarks" / "soak.py"
LEAK = '''
"""bench_fake, but each request leaves a kilobyte behind."""

from openinfer.cli.bench import fake as bench_fake
from openinfer.frontend.http.service import Service

kept = []
check = Service.check


def leaking(self, body, *rest):
    kept.append(bytes(1024 - 33))
    return check(self, body, *rest)


Service.check = leaking
if __name__ == "__main__":
    import asyncio
    import sys
    from pathlib import Path

    sys.exit(asyncio.run(bench_fake._serve(int(sys.argv[1]), Path(sys.argv[2]))))
'''


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    return module_at(SOAK)


def test_the_slope_and_its_noise(soak: Any) -> None:
    requests = list(range(100, 10_100, 100))
    warm = [5_000_000 + min(count, 4000) * 900 for count in requests]
    assert soak.slope(requests, warm) == pytest.approx((0, 0), abs=1e-6)
    leaking = [5_000_000 + count * 1024 for count in requests]
    assert soak.slope(requests, leaking) == pytest.approx((1024, 0), abs=1e-6)
    steps = [5_000_000 + count // 2000 * 65536 for count in requests]
    grown, noise = soak.slope(requests, steps)
    assert 20 < grown < 45
    assert noise > 5


def median_slope(values: Sequence[int]) -> float:
    """The median of the slopes between all pairs: a few jumps of an allocator do not move it (Theil and Sen)."""
    first, second = np.triu_indices(len(values), 1)
    return float(np.median((np.asarray(values)[second] - np.asarray(values)[first]) / (second - first)))


@pytest.mark.parametrize(
    ("leaks", "count"), [pytest.param(False, 6000, marks=pytest.mark.slow), (True, 2000)]
)
def test_a_kilobyte_a_request_would_be_seen(
    soak: Any, leaks: bool, count: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """Half a kilobyte is the line."""
    module = "openinfer.cli.bench.fake"
    if leaks:
        (tmp_path / "leaking_fake.py").write_text(LEAK)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
        module = "leaking_fake"
    with soak.served("fake", tmp_path, module) as (port, pids):
        found = soak.soak(port, pids, count, readings=20)
    server, engine = (median_slope(memory[4:]) / (count // 20) for memory in found["private_bytes"])
    assert engine < 512, found
    assert (server > 512) == leaks, found
