"""embed and select_rows: kernels that gather rows."""

import numpy as np
import pytest

from openinfer.kernels import embed, select_rows
from openinfer.tensor import bfloat16, float32


def nans(*shape, dtype=bfloat16):
    return np.full(shape, np.nan, dtype)


@pytest.mark.parametrize("width", [16, 1024, 1040, 2560])
def test_embed_gathers_rows_of_any_width(check_op, rng, normal, width):
    table = normal(37, width)
    ids = rng.integers(0, 37, 5).astype(np.int32)
    check_op(embed, {"out": 0}, out=nans(5, width), token_ids=ids, table=table)


def test_embed_takes_float32(check_op, rng):
    table = rng.standard_normal((9, 48)).astype(float32)
    ids = np.array([8, 0, 8], np.int32)
    check_op(embed, {"out": 0}, out=nans(3, 48, dtype=float32), token_ids=ids, table=table)
