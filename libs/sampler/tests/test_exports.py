import subprocess
import sys
import types

import openinfer.sampler as sampler


def test_all_is_sorted_and_nothing_else_leaks():
    assert all(getattr(sampler, name) is not None for name in sampler.__all__)  # some are imported now
    public = {
        name
        for name, value in vars(sampler).items()
        if not name.startswith("_") and name != "TYPE_CHECKING" and not isinstance(value, types.ModuleType)
    }
    # Constants, classes, functions, as the linter sorts them.
    assert sampler.__all__ == sorted(sampler.__all__, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    assert public == set(sampler.__all__)


def test_every_public_name_is_documented():
    assert [name for name in sampler.__all__ if not getattr(sampler, name).__doc__] == []


def test_importing_needs_the_standard_library_only():
    code = (
        "import sys; before = set(sys.modules); import openinfer.sampler.grammar;"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"openinfer"}
