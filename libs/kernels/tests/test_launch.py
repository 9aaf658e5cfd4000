"""Launch records: types, alignment and identity."""

import numpy as np
import pytest

from openinfer.kernels import Aligned, LaunchError, Scratch, TensorMap, launch
from openinfer.tensor import Device, Tensor, bfloat16, float32


def null(ptr, *shape, dtype=bfloat16):
    return Tensor(ptr, shape, dtype, Device("null"))


def make(args, **constants):
    return launch("m.kernels", "f", (3,), args, constants)


def test_types_follow_from_the_arguments():
    scratch = Scratch((4, 8), float32)
    record = make(
        {
            "a": null(256, 2, 3),
            "b": null(8, 5, dtype=np.dtype(np.int32)),
            "s": scratch,
            "m": TensorMap(null(512, 64, 64), (16, 32)),
            "n": 7,
            "stride": Aligned(64),
            "eps": 1e-6,
        },
        BLOCK=128,
        ADD=True,
    )
    assert record.spec.signature == (
        ("a", "*bf16"),
        ("b", "*i32"),
        ("s", "*fp32"),
        ("m", "tensordesc<bf16[16, 32]>"),
        ("n", "i32"),
        ("stride", "i32"),
        ("eps", "fp32"),
    )
    assert record.spec.divisible == ("a", "s", "stride")  # b's address is not a multiple of 16
    assert record.spec.constants == (("ADD", True), ("BLOCK", 128))
    assert record.grid == (3, 1, 1)
    assert record.args[2] is scratch


def test_equal_launches_share_one_spec_whatever_their_addresses_and_sizes():
    one, two = (make({"a": null(p, 2, n), "n": n}, BLOCK=4) for p, n in ((256, 8), (512, 9)))
    assert one.spec is two.spec
    other = make({"a": null(256, 2, 8), "n": 8}, BLOCK=8)
    assert other.spec != one.spec
    assert len({one.spec, two.spec, other.spec}) == 2


def test_a_spec_is_what_json_has_and_reads_well():
    spec = make({"a": null(256, 2)}, BLOCK=4).spec
    assert set(spec.as_json()) == {
        "module", "function", "signature", "constants", "divisible", "num_warps", "num_stages", "max_registers",
    }  # fmt: skip
    assert str(spec) == "kernels.f[BLOCK=4]w4s3"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"n": 2**31}, "n=2147483648 does not fit an i32"),
        ({"n": Aligned(8)}, "n=8 is said to be a multiple of 16"),
        ({"n": "8"}, "n is a str"),
        ({"n": np.int64(8)}, "n is a int64"),
        ({"x": Scratch((4,), np.dtype(np.float64))}, "x is float64; a kernel takes bfloat16, float16"),
    ],
)
def test_what_a_kernel_cannot_take(args, words):
    with pytest.raises(LaunchError, match=words):
        make(args)


def test_scratch_is_compared_by_identity():
    a, b = Scratch((2, 3), bfloat16), Scratch((2, 3), bfloat16)
    assert a != b
    assert a.nbytes == 12
