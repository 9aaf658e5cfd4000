"""What the tests of peers share: engines, by each connector."""

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from sharing_engine import SharingEngine, transfer

from openinfer.kvpool.tiers.peers.link import Link

NIXL = pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed")
SLOW = [
    "TcpConnector",
    pytest.param("shared", marks=pytest.mark.slow),
    pytest.param("NixlConnector", marks=[NIXL, pytest.mark.slow]),
]


@pytest.fixture(params=SLOW)
def connector(request, monkeypatch):
    """shared: both engines are on one host, as they are here. Else they take each other for engines of two hosts."""
    if request.param == "shared":
        return "TcpConnector"
    monkeypatch.setattr(Link, "within_host", False)
    return request.param


@pytest.fixture
def engines(connector):
    made = []

    def make(*addresses, **fields):
        kwargs = {name: fields.pop(name) for name in ("about", "groups", "host") if name in fields}
        made.append(SharingEngine(transfer(connector, **fields), addresses, **kwargs))
        return made[-1]

    yield make
    for engine in reversed(made):
        engine.close()
