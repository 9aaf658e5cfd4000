"""The public names, and what importing the library costs."""

import subprocess
import sys
import types

import pytest

import openinfer.kernels as library


def test_all_is_every_public_name_and_sorted():
    public = {
        n for n, v in vars(library).items() if not n.startswith("_") and not isinstance(v, types.ModuleType)
    }
    assert public == set(library.__all__)
    assert len(set(library.__all__)) == len(library.__all__)
    assert library.__all__ == sorted(library.__all__, key=lambda n: (not n.isupper(), n[0].islower(), n))


def test_public_names_have_docstrings():
    for name in library.__all__:
        value = getattr(library, name)
        if isinstance(value, type | types.FunctionType | library.Op):
            assert value.__doc__, name
        if isinstance(value, library.Op):
            text = value.__doc__.partition("\n")[2].strip()
            assert text, name
            assert "Args(" not in text, f"{name}: its arguments have no docstring"


@pytest.mark.parametrize("name", [n for n in library.__all__ if isinstance(getattr(library, n), library.Op)])
def test_an_op_is_called_by_its_name(name):
    op = getattr(library, name)
    assert (op.name, repr(op)) == (name, f"Op({name})")


def test_import_and_plan_need_no_triton_and_no_driver():
    program = """
import sys
sys.modules["triton"] = None
sys.modules["cuda.bindings.driver"] = None
import numpy, ml_dtypes, safetensors
before = len(sys.modules)
from openinfer.kernels import H200, NullPack, linear_add
from openinfer.tensor import Arena, Device, bfloat16
modules = len(sys.modules) - before
arena, pack = Arena(Device("null"), None), NullPack(H200)
x, h, weight = (arena.alloc(shape, bfloat16) for shape in ((4, 64), (4, 64), (64, 64)))
linear_add(pack, x=x, h=h, weight=weight)
assert pack.specs()[0].function == "gemm_small"
print(modules)
"""
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert int(found.stdout) < 240  # beyond numpy's: an import takes time by the module
