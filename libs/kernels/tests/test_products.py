"""norm_linear, linear_add, gate_up_silu: kernels in the interpreter against the references."""

import numpy as np
import pytest

from openinfer.kernels import Target, gate_up_silu, linear_add, norm_linear
from openinfer.kernels import products as products_module
from openinfer.kernels.tuning import Choice
from openinfer.tensor import bfloat16, float32

EPS = 1e-6
BF16 = 4e-3  # two roundings to bf16 each cost up to 2^-9


def nans(*shape, dtype=bfloat16):
    return np.full(shape, np.nan, dtype)


CHOICES = {
    "gemv": Choice("gemv", 1, 8, 64),
    "small": Choice("small", 16, 32, 32),
    "split": Choice("small", 16, 32, 32, split=4),
    "tma": Choice("tma", 32, 64, 32),
    "pointer": Choice("pointer", 32, 64, 32),
}


@pytest.fixture(params=CHOICES)
def choice(request, monkeypatch):
    """Every product of the test uses this kernel."""
    choice = CHOICES[request.param]
    monkeypatch.setattr(products_module, "choose", lambda *_: choice)
    return choice


def tokens(choice):
    return {"gemv": 1, "small": 13}.get(choice.kind, 70)


@pytest.mark.parametrize("dtype", [bfloat16, float32])
def test_norm_linear(check_op, normal, choice, dtype):
    m, n, k = tokens(choice), 80, 192
    x, gain, weight = normal(m, k, scale=3.0), normal(k), normal(n, k, scale=k**-0.5)
    out = nans(m, n, dtype=dtype)
    check_op(norm_linear, {"out": BF16}, out=out, x=x, norm_weight=gain, weight=weight, eps=EPS)


def test_linear_add(check_op, normal, choice):
    m, n, k = tokens(choice), 144, 192
    x, h, weight = normal(m, n), normal(m, k), normal(n, k, scale=k**-0.5)
    check_op(linear_add, {"x": BF16}, x=x, h=h, weight=weight)


def test_gate_up_silu(check_op, normal, choice):
    m, n, k = tokens(choice), 80, 192
    x, gain, weight = normal(m, k, scale=3.0), normal(k), normal(2 * n, k, scale=k**-0.5)
    check_op(gate_up_silu, {"out": 2 * BF16}, out=nans(m, n), x=x, norm_weight=gain, weight=weight, eps=EPS)
