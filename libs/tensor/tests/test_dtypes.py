import ml_dtypes
import numpy as np
import pytest

from openinfer.tensor import DTypeError, dtypes

TAGS = [
    "BOOL",
    "I8",
    "I16",
    "I32",
    "I64",
    "U8",
    "U16",
    "U32",
    "U64",
    "F16",
    "F32",
    "F64",
    "BF16",
    "F8_E4M3",
    "F8_E5M2",
    "F8_E8M0",
]


@pytest.mark.parametrize("tag", TAGS)
def test_tag_and_name_go_both_ways(tag: str) -> None:
    dtype = dtypes.from_tag(tag)
    assert dtypes.tag(dtype) == tag
    assert dtypes.of(dtype.name) == dtype
    assert dtypes.of(dtype.type) == dtype
    bits = 8 if tag == "BOOL" else int("".join(c for c in tag.removeprefix("B").split("_")[0] if c.isdigit()))
    assert dtype.itemsize * 8 == bits


def test_names_are_what_engines_write() -> None:
    assert dtypes.of("bfloat16") == dtypes.bfloat16 == np.dtype(ml_dtypes.bfloat16)
    assert dtypes.of("float8_e4m3fn") == dtypes.float8_e4m3fn
    assert dtypes.of("int32") == dtypes.int32 == np.dtype("i4")
    assert dtypes.of("bool") == dtypes.bool_
    assert {dtypes.bfloat16, dtypes.float8_e8m0fnu, dtypes.float64} <= dtypes.FLOATS
    assert dtypes.int8 not in dtypes.FLOATS


@pytest.mark.parametrize("bad", ["bf16", "", "complex64", np.complex64, np.dtype(">f4"), object(), "S4"])
def test_unknown_dtypes_are_refused(bad: object) -> None:
    with pytest.raises(DTypeError, match=r"known: .*bfloat16"):
        dtypes.of(bad)  # type: ignore[arg-type]


def test_unknown_tag_is_refused() -> None:
    with pytest.raises(DTypeError, match=r"F4.*known: .*BF16"):
        dtypes.from_tag("F4")
