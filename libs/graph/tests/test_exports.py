import subprocess
import sys
from types import ModuleType

import openinfer.graph as lib
import openinfer.graph.errors as errors


def test_all_is_sorted_and_complete() -> None:
    # Constants, classes, functions, as the linter sorts them.
    assert lib.__all__ == sorted(lib.__all__, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    public = {n for n, v in vars(lib).items() if not n.startswith("_") and not isinstance(v, ModuleType)}
    assert public == set(lib.__all__)


def test_every_public_thing_has_a_docstring() -> None:
    for name in lib.__all__:
        assert getattr(lib, name).__doc__, name


def test_every_error_is_in_one_tree_and_a_stdlib_type() -> None:
    classes = [e for e in vars(errors).values() if isinstance(e, type)]
    assert lib.GraphError in classes
    for error in classes:
        assert issubclass(error, lib.GraphError)
        assert errors.__doc__ is not None
        assert error.__name__ in errors.__doc__
        if error is not lib.GraphError:
            assert error.__mro__[2].__module__ == "builtins"


def test_import_touches_no_driver_and_no_torch() -> None:
    code = (
        "import sys, openinfer.graph; "
        "bad = {'torch', 'triton', 'cuda.bindings.driver'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
