import re
import subprocess
import sys
from types import ModuleType

import openinfer.tensor as lib


def _natural(name: str) -> tuple[bool, bool, str]:
    """Constants, classes, the rest; numbers by value."""
    return not name.isupper(), not name[0].isupper(), re.sub(r"\d+", lambda m: m[0].zfill(4), name)


def test_all_is_sorted_and_complete() -> None:
    assert lib.__all__ == sorted(lib.__all__, key=_natural)
    public = {n for n, v in vars(lib).items() if not n.startswith("_") and not isinstance(v, ModuleType)}
    assert public | {"dtypes"} == set(lib.__all__)


def test_every_public_class_and_function_has_a_docstring() -> None:
    for name in lib.__all__:
        thing = getattr(lib, name)
        if callable(thing):
            assert thing.__doc__, name


def test_every_error_is_in_one_tree_and_a_stdlib_type() -> None:
    errors = [e for e in vars(lib).values() if isinstance(e, type) and issubclass(e, Exception)]
    for error in errors:
        assert issubclass(error, lib.TensorError)
        if error is not lib.TensorError:
            assert error.__mro__[2].__module__ == "builtins"
            assert error.__name__ in lib.errors.__doc__


def test_import_touches_no_driver_and_no_torch() -> None:
    code = (
        "import sys, openinfer.tensor as t; t.Device('cuda', 1); t.Device('null'); "
        "bad = {'torch', 'triton', 'cuda.bindings.driver'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
