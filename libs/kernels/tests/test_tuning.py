"""The choice of kernels: tables where something was measured, the rule elsewhere."""

import json

import pytest

from openinfer.kernels import H200, InvalidTable, Target, UntrustedCache
from openinfer.kernels.linear import choices
from openinfer.kernels.linear.choices import choose
from openinfer.kernels.store import tables
from openinfer.kernels.store.tables import ProductChoice

PLAIN = Target(90, 132)


@pytest.fixture
def table(monkeypatch):
    """Put a table in the place of the measured ones."""

    def use(entries):
        choose.cache_clear()
        monkeypatch.setattr(tables, "gpu_table", lambda gpu: {"linear_add": {"64x128": entries}})

    yield use
    choose.cache_clear()


def test_the_entry_of_the_smallest_m_not_below_is_taken(table):
    table({"16": {"kind": "small", "bm": 16}, "2": {"kind": "gemv"}, "128": {"kind": "cublas"}})
    kinds = {m: choose(H200, "linear_add", m, 64, 128).kind for m in (1, 2, 3, 16, 17, 128)}
    assert kinds == {1: "gemv", 2: "gemv", 3: "small", 16: "small", 17: "cublas", 128: "cublas"}


def test_what_the_table_lacks_goes_by_the_rule(table):
    table({"16": {"kind": "gemv"}})
    for args in (("linear_add", 17, 64, 128), ("linear_add", 4, 80, 128), ("norm_linear", 4, 64, 128)):
        assert choose(PLAIN, *args) == choices.rule(PLAIN, *args)


def test_an_entry_for_cublas_needs_a_target_with_it(table):
    table({"512": {"kind": "cublas"}})
    assert choose(H200, "linear_add", 300, 64, 128).kind == "cublas"
    assert choose(PLAIN, "linear_add", 300, 64, 128).kind == "tma"


@pytest.mark.parametrize("arch", [80, 86, 90, 100, 120])
@pytest.mark.parametrize("k", [16, 112, 256, 384, 2560, 9728, 25600])
@pytest.mark.parametrize("m", [1, 2, 16, 33, 64, 65, 512, 513, 8192])
def test_the_rule_gives_tiles_that_the_kernels_allow(arch, k, m):
    for op, n in (("norm_linear", 48), ("gate_up_silu", 19456), ("linear_add", 5120), ("logits", 151936)):
        c = choices.rule(Target(arch, 100), op, m, n, k)
        assert k % c.bk == 0
        assert c.bk >= 16
        assert c.split * c.bk <= k
        assert c.kind != "gemv" or m == 1
        assert c.kind != "small" or m <= c.bm
        assert c.kind != "tma" or arch >= 90


def test_k_is_split_only_where_the_grid_would_not_fill_the_gpu():
    assert choices.rule(H200, "linear_add", 16, 2560, 9728).split > 1
    assert choices.rule(H200, "norm_linear", 16, 151936, 2560).split == 1


def test_the_tables_of_the_package_are_choices():
    files = list(tables.TABLES.glob("*.json"))
    assert files
    for file in files:
        for op, shapes in tables.load(file).items():
            assert op in ("norm_linear", "logits", "linear_add", "gate_up_silu")
            for shape, by_m in shapes.items():
                _, k = map(int, shape.split("x"))
                for m, entry in by_m.items():
                    choice = ProductChoice(**entry)
                    assert k % choice.bk == 0
                    assert choice.kind != "small" or int(m) <= choice.bm
                    assert choice.kind != "gemv" or m == "1"


TABLE = {"linear_add": {"64x128": {"16": {"kind": "gemv"}}}}


def test_a_table_comes_back_and_a_changed_one_is_refused(tmp_path):
    file = tmp_path / "gpu.json"
    tables.save(file, TABLE)
    assert tables.load(file) == TABLE
    file.write_text(file.read_text().replace("gemv", "small"))
    with pytest.raises(InvalidTable, match=r"digest does not match.*tune again or delete it"):
        tables.load(file)
    assert list(tmp_path.iterdir()) == [file]


def test_a_table_without_a_digest_is_refused(tmp_path):
    (tmp_path / "gpu.json").write_text(json.dumps(TABLE))
    with pytest.raises(InvalidTable, match="digest"):
        tables.load(tmp_path / "gpu.json")


def test_the_folder_of_tables_is_private_and_an_open_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENINFER_CACHE", str(tmp_path / "cache"))
    tables.gpu_table.cache_clear()
    tables.save(tables.table_file(tables.user_tables(), "a gpu"), TABLE)
    assert tables.user_tables().stat().st_mode & 0o777 == 0o700
    assert tables.gpu_table("a gpu") == TABLE
    tables.user_tables().chmod(0o770)
    tables.gpu_table.cache_clear()
    with pytest.raises(UntrustedCache, match="mode 0770"):
        tables.gpu_table("a gpu")
    tables.gpu_table.cache_clear()
