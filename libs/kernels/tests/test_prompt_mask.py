"""The causal mask of the Gluon kernel for prompts, on a CPU: its arithmetic by numpy, and the passes over blocks.

Gluon has no interpreter. The functions `_range` and `_mask` are plain Python but for `gl`, so they run here with
numpy's functions of the same names. The arguments of the passes over blocks are read from the kernel's source.
"""

import ast
import inspect
import textwrap
import types

import numpy as np
import pytest

triton = pytest.importorskip("triton")

from openinfer.kernels.device import attention_hopper  # noqa: E402

BN = 16


class Gl:
    """The functions of gluon.language that the mask needs."""

    maximum, minimum, where = max, min, staticmethod(np.where)
    constexpr = int

    @staticmethod
    def arange(start, end, layout):
        return np.arange(start, end)

    @staticmethod
    def SliceLayout(dim, parent):  # noqa: N802
        return None


def plain(function):
    """A Gluon function as a Python function over numpy."""
    code = getattr(function, "fn", function).__code__
    return types.FunctionType(code, {"gl": Gl, "HIDDEN": -np.inf})


@pytest.fixture(scope="module")
def functions():
    return plain(attention_hopper._range), plain(attention_hopper._mask)


def source(function):
    """The syntax tree of a Gluon function."""
    return ast.parse(textwrap.dedent(inspect.getsource(getattr(function, "fn", function))))


def calls(tree, name):
    return [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == name]


def passes():
    """(first block, last block, masked) of each call of `_blocks` in `_consume`, as source."""
    names = list(inspect.signature(plain(attention_hopper._blocks)).parameters)
    masked = names.index("MASKED")
    found = calls(source(attention_hopper._consume), "_blocks")
    return [tuple(ast.unparse(call.args[n]) for n in (0, 1, masked)) for call in found]


def visible(position, count, key, window):
    """By the definition: query q of a tile at `position` sees the `window` keys up to its own."""
    query = position + np.arange(count)
    return (key[None, :] <= query[:, None]) & (key[None, :] > query[:, None] - window)


TILES = [
    (position, count, window)
    for position in (0, 1, 15, 16, 31, 40, 100)
    for count in (1, 7, 16, 33)
    for window in (1, 5, 16, 40, 1 << 30)
]


@pytest.mark.parametrize(("position", "count", "window"), TILES)
def test_every_key_of_a_tile_is_masked_or_visible_to_all(functions, position, count, window):
    """Each visible key is in exactly one block of one pass, and a pass without a mask has no hidden key."""
    block_range, mask = functions
    low, inner, whole, last = block_range(position, count, window, BN)
    scope = {"low": low, "inner": inner, "whole": whole, "last": last, "gl": Gl}
    visits = [(last, True)]  # `_consume` itself takes the last block, with a mask
    for first, until, masked in passes():
        blocks = range(eval(first, scope), eval(until, scope) - 1, -1)
        visits += [(block, eval(masked)) for block in blocks]
    assert sorted(block for block, _ in visits) == list(range(low, last + 1))
    queries = position + np.arange(count)
    scores = np.zeros((count, BN))
    for block, masked in visits:
        key = block * BN + np.arange(BN)
        got = mask(scores, block * BN, queries, window, BN, None) if masked else scores
        np.testing.assert_array_equal(got == 0, visible(position, count, key, window))
    outside = np.concatenate([np.arange(low * BN), np.arange((last + 1) * BN, position + count + BN)])
    assert not visible(position, count, outside, window).any()


def test_the_mask_is_applied_where_the_passes_say():
    """`_consume` masks its last block, and `_blocks` every block where MASKED is set, with the block's own keys."""
    (own,) = calls(source(attention_hopper._consume), "_mask")
    assert [ast.unparse(a) for a in own.args[:4]] == ["score", "last * BN", "position", "window"]
    tree = source(attention_hopper._blocks)
    (masked,) = calls(tree, "_mask")
    assert [ast.unparse(a) for a in masked.args[:4]] == ["score", "b * BN", "position", "window"]
    guards = [n for n in ast.walk(tree) if isinstance(n, ast.If) and masked in ast.walk(n)]
    assert [ast.unparse(guard.test) for guard in guards] == ["MASKED"]
    assert [masked for _, _, masked in passes()] == ["True", "False", "True"]
    positions = [n for n in ast.walk(source(attention_hopper._consume)) if isinstance(n, ast.Assign)]
    assert "position = place + mine // GROUP" in map(ast.unparse, positions)
