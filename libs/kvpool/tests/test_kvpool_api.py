"""The public names are the listed ones, sorted, and importing them is cheap and needs nothing."""

import ast
import subprocess
import sys
import types
from pathlib import Path

import openinfer.kvpool


def test_all_is_sorted_and_complete():
    public = {
        name
        for name, value in vars(openinfer.kvpool).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public == set(openinfer.kvpool.__all__)
    assert openinfer.kvpool.__all__ == sorted(openinfer.kvpool.__all__)


def test_every_public_name_is_documented():
    for name in openinfer.kvpool.__all__:
        assert getattr(openinfer.kvpool, name).__doc__, name


def test_import_needs_the_standard_library_only_and_loads_little():
    code = (
        "import sys; before = set(sys.modules); import openinfer.kvpool; new = set(sys.modules) - before; "
        "print(len(new), *{name.split('.')[0] for name in new} - sys.stdlib_module_names)"
    )
    command = [sys.executable, "-I", "-c", code]
    modules, *others = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert int(modules) < 100
    assert others == ["openinfer"]


def test_no_module_reaches_into_the_private_names_of_another():
    for path in Path(openinfer.kvpool.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and node.attr.startswith("_")
                and not node.attr.startswith("__")
            ):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                assert own or node.attr == "_fields", f"{path}:{node.lineno}: {ast.unparse(node)}"
