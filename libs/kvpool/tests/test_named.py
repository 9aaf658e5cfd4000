"""Eviction policies as a command line names them."""

import pytest

from openinfer.kvpool import Group, InvalidEviction, Lineage, Lru, Pool, Priority, S3Fifo, make_eviction

MODULE = """
from openinfer.kvpool import Lru

class Mine(Lru):
    "The same under another name."

class Nothing:
    def __init__(self, group):
        pass

class Unmade:
    "Takes no group."

class ParentsFirst(Lru):
    def pop(self):
        name = next(reversed(self._order))
        del self._order[name]
        return name

number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    """The name of a module with policies; each test has its own."""
    name = f"policies_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize(
    ("name", "kind"), [("lru", Lru), ("lineage", Lineage), ("priority", Priority), ("s3fifo", S3Fifo)]
)
def test_the_library_has_names_for_its_own(name, kind):
    assert isinstance(make_eviction(name)(Group("kv", 16, 4)), kind)


def test_a_policy_of_your_own_serves_a_pool(module):
    make = make_eviction(f"{module}:Mine")
    assert type(make(Group("kv", 16, 4))).__name__ == "Mine"
    with Pool([Group("kv", 16, 4)], eviction=make).acquire([1] * 20) as lease:
        assert lease.reserve(20) is not None


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("random", "no eviction policy is called 'random'; there are lineage, lru, .* MODULE:CLASS"),
        ("no_such_module:Mine", "cannot be imported: No module named 'no_such_module'"),
        ("{}:Absent", "has no class 'Absent'"),
        ("{}:number", "has no class 'number'"),
        ("{}:Nothing", "AttributeError: 'Nothing' object has no attribute 'add'; run that suite on it"),
        ("{}:Unmade", "TypeError: Unmade.. takes no arguments"),
        ("{}:ParentsFirst", "fails test_a_parent_that_is_let_go_later_.* Broken: popped"),
    ],
)
def test_one_that_cannot_serve_is_refused(module, spec, complaint):
    with pytest.raises(InvalidEviction, match=complaint) as caught:
        make_eviction(spec.format(module))
    assert caught.value.user_can_mend
