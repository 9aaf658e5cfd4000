"""The cubin store, with real compiles of one small kernel (Triton needs no GPU to compile)."""

import json
import os
import threading

import numpy as np
import pytest

from openinfer.kernels import CompileError, KernelMissing, Store, UntrustedCache, embed, launch
from openinfer.kernels.store import cubins as store
from openinfer.tensor import Device, Tensor, bfloat16

ROWS = "openinfer.kernels.device.rows"
ANSWERS = {}
"""What compile workers answered, by architecture and kernels."""


@pytest.fixture(autouse=True)
def compiler():
    """Stores start their own processes here."""


@pytest.fixture(scope="module")
def cubins(tmp_path_factory):
    return tmp_path_factory.mktemp("cubins")


@pytest.fixture
def spec(arena, plan):
    args = {
        "out": arena.alloc((4, 32), bfloat16),
        "token_ids": arena.alloc((4,), np.dtype(np.int32)),
        "table": arena.alloc((9, 32), bfloat16),
    }
    (spec,) = plan(embed, **args).specs()
    return spec


@pytest.fixture
def quick(monkeypatch):
    """A compile that was done before takes no process."""
    run = store._run_workers

    def remembered(keys, arch):
        if (arch, *keys) not in ANSWERS:
            ANSWERS[arch, *keys] = [*run(keys, arch)]
        return ANSWERS[arch, *keys]

    monkeypatch.setattr(store, "_run_workers", remembered)


def broken():
    """A spec whose arguments are not the kernel's."""
    tensor = Tensor(256, (4,), bfloat16, Device("null"))
    return launch(ROWS, "gather_rows", (1,), {"out": tensor}, {"BLOCK": 16}).spec


@pytest.mark.usefixtures("quick")
def test_prepare_compiles_once_and_later_stores_read(cubins, spec):
    seen = []
    first = Store(90, cubins, folders=[])
    assert first.prepare([spec, spec], lambda *step: seen.append(step)) == (1, 1)
    assert seen == [(1, 1)]
    assert first.prepare([spec]) == (0, 0)
    second = Store(90, cubins, folders=[])
    assert second.prepare([spec]) == (1, 0)
    assert second.get(spec) == first.get(spec)
    compiled = second.get(spec)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert compiled.name == "gather_rows"
    assert (compiled.num_warps, compiled.num_ctas, compiled.tensor_maps) == (4, 1, ())
    assert not list(cubins.rglob("*.part"))


def test_architectures_do_not_share(cubins, spec):
    assert store.spec_key(spec, 90) != store.spec_key(spec, 80)


def test_a_sealed_store_refuses_and_counts(tmp_path, spec):
    sealed = Store(90, tmp_path, folders=[])
    sealed.seal()
    for misses in (1, 2):
        with pytest.raises(KernelMissing, match="before the store was sealed"):
            sealed.get(spec)
        assert sealed.misses_after_seal == misses


@pytest.mark.usefixtures("quick")
def test_a_damaged_cubin_is_compiled_again(cubins, tmp_path, spec):
    one = Store(90, tmp_path, folders=[])
    one.prepare([spec])
    (path,) = tmp_path.rglob("*.cubin")
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"x")
    assert Store(90, tmp_path, folders=[]).prepare([spec]) == (1, 1)
    assert path.read_bytes() == good


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("damage", ['"shared": 0', '"shared": 10000000'])
def test_the_digest_covers_what_a_launch_reads(tmp_path, spec, damage):
    Store(90, tmp_path, folders=[]).prepare([spec])
    (path,) = tmp_path.rglob("*.json")
    good = path.read_text()
    changed = json.loads(good) | json.loads(f"{{{damage}}}") | {"num_warps": 8}
    path.write_text(json.dumps(changed))
    assert Store(90, tmp_path, folders=[]).prepare([spec]) == (1, 1)
    assert path.read_text() == good


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '"x"'])
def test_an_index_entry_that_is_none_is_compiled_again(tmp_path, spec, text):
    Store(90, tmp_path, folders=[]).prepare([spec])
    (path,) = tmp_path.rglob("*.json")
    path.write_text(text)
    assert Store(90, tmp_path, folders=[]).prepare([spec]) == (1, 1)


@pytest.mark.usefixtures("quick")
def test_the_cache_is_made_private(tmp_path, spec):
    Store(90, tmp_path / "a/cubin", folders=[]).prepare([spec])
    assert (tmp_path / "a/cubin").stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_cache_that_others_can_write_to_is_refused(tmp_path, spec, mode):
    Store(90, tmp_path, folders=[]).prepare([spec])
    tmp_path.chmod(mode)
    with pytest.raises(UntrustedCache, match=f"mode 0{mode:o}.*run as code.*OPENINFER_CACHE"):
        Store(90, tmp_path, folders=[]).prepare([spec])
    tmp_path.chmod(0o700)


@pytest.mark.usefixtures("quick")
def test_a_cache_of_another_user_is_refused(tmp_path, spec, monkeypatch):
    Store(90, tmp_path, folders=[]).prepare([spec])
    me = os.geteuid()
    if me == 0:
        os.chown(tmp_path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(UntrustedCache, match=r"belongs to user .* OPENINFER_CACHE"):
        Store(90, tmp_path, folders=[]).prepare([spec])
    os.chown(tmp_path, me, -1)


def test_two_processes_fill_one_cache_at_once(tmp_path, spec):
    both = threading.Barrier(2)
    results = []

    def fill():
        one = Store(90, tmp_path, folders=[])
        both.wait()
        results.append(one.prepare([spec]))

    threads = [threading.Thread(target=fill) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [(1, 1), (1, 1)]
    assert not list(tmp_path.rglob("*.part"))
    assert Store(90, tmp_path, folders=[]).prepare([spec]) == (1, 0)


def test_every_failure_is_told(tmp_path, spec):
    gone = launch("openinfer.kernels.device.rows", "no_such_kernel", (1,), {"n": 1}, {}).spec
    some = Store(90, tmp_path, folders=[])
    with pytest.raises(CompileError) as e:
        some.prepare([broken(), spec, gone])
    assert "gather_rows" in str(e.value)
    assert "launch gives ['out'], the kernel takes ['out', 'index', 'table', 'width']" in str(e.value)
    assert "no_such_kernel" in str(e.value)
    assert some.prepare([spec]) == (0, 0)  # the good one was kept


def test_without_triton_a_cached_kernel_is_found_and_a_missing_one_names_the_extra(
    cubins, tmp_path, spec, monkeypatch
):
    Store(90, cubins, folders=[]).prepare([spec])
    monkeypatch.setattr(store, "triton_version", lambda: None)
    assert Store(90, tmp_path, folders=[cubins]).prepare([spec]) == (1, 0)
    with pytest.raises(KernelMissing, match=r"pip install 'openinfer-kernels\[jit\]'"):
        Store(90, tmp_path, folders=[]).prepare([spec])


def test_without_triton_a_package_beside_the_versions_is_no_version(cubins, tmp_path, spec, monkeypatch):
    Store(90, cubins, folders=[]).prepare([spec])
    (version,) = cubins.iterdir()
    (tmp_path / version.name).symlink_to(version)
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(store, "triton_version", lambda: None)
    assert Store(90, tmp_path / "empty", folders=[tmp_path]).prepare([spec]) == (1, 0)


def test_versions_are_ordered_by_number(cubins, tmp_path, spec, monkeypatch):
    Store(90, cubins, folders=[]).prepare([spec])
    (version,) = cubins.iterdir()
    for name in ("3.9.0", "3.10.0"):
        (tmp_path / name).symlink_to(version)
    monkeypatch.setattr(store, "triton_version", lambda: None)
    places = [p.parent.name for p in Store(90, tmp_path, folders=[])._places(spec)]
    assert places == ["3.10.0", "3.9.0"]


def test_wheels_come_before_the_cache(cubins, tmp_path, spec):
    Store(90, cubins, folders=[]).prepare([spec])
    assert Store(90, tmp_path, folders=[cubins]).prepare([spec]) == (1, 0)
    assert not list(tmp_path.iterdir())


def test_the_index_names_what_was_compiled(cubins, spec):
    Store(90, cubins, folders=[]).prepare([spec])
    entries = [json.loads(p.read_text()) for p in cubins.rglob("*.json")]
    assert {e["spec"]["function"] for e in entries} == {"gather_rows"}


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"OPENINFER_CACHE": "/a"}, "/a/cubin"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/openinfer/cubin"),
        ({"HOME": "/c"}, "/c/.cache/openinfer/cubin"),
    ],
)
def test_where_the_cache_is(monkeypatch, environment, folder):
    for name in ("OPENINFER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(store.default_cache()) == folder


def test_the_source_hash_covers_a_module_and_its_siblings(tmp_path, monkeypatch):
    package = tmp_path / "kernels_of_a_test"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.py").write_text("A = 1\n")
    (package / "b.py").write_text("B = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = store.source_hash("kernels_of_a_test.a")
    store.source_hash.cache_clear()
    assert store.source_hash("kernels_of_a_test.a") == before
    (package / "b.py").write_text("B = 2\n")
    store.source_hash.cache_clear()
    assert store.source_hash("kernels_of_a_test.a") != before


def test_the_source_hash_covers_packages_that_are_imported(tmp_path, monkeypatch):
    for name, source in (
        ("first_of_a_test", "from second_of_a_test.b import B\n"),
        ("second_of_a_test", "B = 1\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / ("a.py" if "first" in name else "b.py")).write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = store.source_hash("first_of_a_test.a")
    (tmp_path / "second_of_a_test" / "b.py").write_text("B = 2\n")
    store.source_hash.cache_clear()
    assert store.source_hash("first_of_a_test.a") != before
    with pytest.raises(KernelMissing, match="third_of_a_test, of which there is no source"):
        store.source_hash("third_of_a_test.a")
