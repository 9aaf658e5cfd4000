"""cuBLASLt against a fake library: what it is asked, and what is kept. Real products: the gpu tests."""

import ctypes
import dataclasses

import pytest

from openinfer.kernels import CublasLt, LaunchError, MissingExtra, Scratch, cublas_available
from openinfer.kernels.op.launch import Matmul
from openinfer.kernels.packs import cublas
from openinfer.tensor import Device, Tensor, bfloat16, float32

ROOM = 1 << 20


class FakeLibrary:
    """The functions of libcublasLt that are used. `status` is what cublasLtMatmul and the heuristic answer."""

    def __init__(self):
        self.made, self.destroyed, self.attributes, self.products = [], [], {}, []
        self.status, self.answers = 0, 1

    def __getattr__(self, name):
        if name.endswith("Destroy"):
            return lambda handle: self.destroyed.append(name) or 0
        raise AttributeError(name)

    def cublasLtCreate(self, handle):  # noqa: N802
        handle._obj.value = 1
        return 0

    def cublasLtMatmulDescCreate(self, desc, compute, scale):  # noqa: N802
        self.made.append(("desc", compute, scale))
        return 0

    def cublasLtMatmulDescSetAttribute(self, desc, attribute, value, size):  # noqa: N802
        self.attributes[attribute] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, layout, dtype, rows, cols, ld):  # noqa: N802
        self.made.append((dtype, rows, cols, ld))
        return 0

    def cublasLtMatrixLayoutSetAttribute(self, layout, attribute, value, size):  # noqa: N802
        self.made.append((attribute, value._obj.value, size))
        return 0

    def cublasLtMatmulPreferenceCreate(self, preference):  # noqa: N802
        return 0

    def cublasLtMatmulPreferenceSetAttribute(self, preference, attribute, value, size):  # noqa: N802
        self.attributes[("preference", attribute)] = value._obj.value
        assert size == ctypes.sizeof(value._obj)
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *args):  # noqa: N802
        args[-1]._obj.value = self.answers
        return 0

    def cublasLtMatmul(self, *args):  # noqa: N802
        _, _, one, a, _, b, _, beta, c, _, d, _, _, workspace, room, stream = args
        self.products.append((one._obj.value, a, b, beta._obj.value, c, d, workspace, room, stream))
        return self.status


@pytest.fixture
def library(monkeypatch):
    fake = FakeLibrary()
    monkeypatch.setattr(cublas, "load_library", lambda: fake)
    return fake


def product(m=5, n=64, k=32, dtype=bfloat16, accumulate=False):
    null = Device("null")
    out, x, weight = (
        Tensor(256, shape, kind, null)
        for shape, kind in (((m, n), dtype), ((m, k), bfloat16), ((n, k), bfloat16))
    )
    return Matmul(out, x, weight, Scratch((ROOM,), bfloat16), accumulate)


def test_row_major_products_are_given_as_column_major_ones(library):
    CublasLt().matmul(product(), [0x300, 0x100, 0x200], workspace=0x1000, stream=9)
    assert library.made == [("desc", 68, 0), (14, 32, 64, 32), (14, 32, 5, 32), (14, 64, 5, 64)]
    assert library.attributes[3] == 1  # the weight is transposed
    assert library.attributes[4] == 0
    assert library.attributes[("preference", 1)] == 2 * ROOM
    assert library.products == [(1.0, 0x200, 0x100, 0.0, 0x300, 0x300, 0x1000, 2 * ROOM, 9)]


def test_groups_are_a_batch_of_columns(library):
    null = Device("null")
    out, x, weight = (Tensor(256, shape, bfloat16, null) for shape in ((5, 192), (5, 96), (192, 32)))
    command = Matmul(out, x, weight, Scratch((ROOM,), bfloat16), groups=3)
    CublasLt().matmul(command, [0x300, 0x100, 0x200], workspace=0x1000, stream=9)
    layouts = ((14, 32, 64, 32), 64 * 32), ((14, 32, 5, 96), 32), ((14, 64, 5, 192), 64)
    told = [(layout, (5, 3, 4), (6, offset, 8)) for layout, offset in layouts]
    assert library.made == [("desc", 68, 0), *(one for three in told for one in three)]


def test_accumulate_reads_what_it_writes(library):
    CublasLt().matmul(product(accumulate=True), [0x300, 0x100, 0x200], 0x1000, 9)
    assert library.products[0][3] == 1.0


def test_float32_output(library):
    CublasLt().matmul(product(dtype=float32), [0x300, 0x100, 0x200], 0x1000, 9)
    assert library.made[-1] == (0, 64, 5, 64)


def test_an_answer_is_kept_for_equal_products(library):
    lt = CublasLt()
    for command, at in ((product(), 0x100), (product(), 0x500), (product(m=6), 0x100), (product(), 0x110)):
        lt.matmul(command, [0x300, at, 0x200], 0x1000, 9)
    assert library.made.count(("desc", 68, 0)) == 3  # another m, and an address with less alignment
    assert library.attributes[("preference", 5)] == 16
    lt.close()
    assert library.destroyed.count("cublasLtMatmulDescDestroy") == 3
    assert library.destroyed.count("cublasLtDestroy") == 1
    lt.close()
    assert library.destroyed.count("cublasLtDestroy") == 1


@pytest.mark.parametrize(
    ("of_weight", "of_x", "modes"), [((64, 1), (1, 5), (3, 3)), ((1, 3), (3, 5), (5, 4))]
)
def test_scales_are_told_with_each_product(library, of_weight, of_x, modes):
    null = Device("null")
    command = dataclasses.replace(
        product(), scales=(Tensor(256, of_x, float32, null), Tensor(256, of_weight, float32, null))
    )
    lt = CublasLt()
    lt.matmul(command, [0x300, 0x100, 0x200, 0x400, 0x500], 0x1000, 9)
    assert library.made[1:] == [(28, 32, 64, 32), (28, 32, 5, 32), (14, 64, 5, 64)]
    assert (library.attributes[31], library.attributes[32]) == modes  # of the weight, of x
    assert (library.attributes[17], library.attributes[18]) == (0x500, 0x400)
    lt.matmul(command, [0x300, 0x100, 0x200, 0x600, 0x700], 0x1000, 9)
    assert (library.attributes[17], library.attributes[18]) == (0x700, 0x600)
    assert library.made.count(("desc", 68, 0)) == 1


def test_errors_name_the_product(library):
    lt = CublasLt()
    library.status = 14
    with pytest.raises(LaunchError, match="cublasLtMatmul gave status 14 for M=5 N=64 K=32 into bfloat16"):
        lt.matmul(product(), [0x300, 0x100, 0x200], 0x1000, 9)
    library.answers = 0
    with pytest.raises(LaunchError, match=r"no algorithm .* for M=7 N=64 K=32"):
        lt.matmul(product(m=7), [0x300, 0x100, 0x200], 0x1000, 9)


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setattr(cublas, "library_path", lambda: None)
    assert not cublas_available()
    with pytest.raises(MissingExtra, match=r"pip install 'openinfer-kernels\[cublas\]'"):
        CublasLt()
